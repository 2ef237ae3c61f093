"""pipeline_split: older name of cut_pipeline_stage."""

from dataclasses import dataclass

from slapo_zoo.language.directive import primitive
from slapo_zoo.language.primitives.cut_pipeline_stage import CutPipelineStage


@primitive("pipeline_split")
@dataclass(frozen=True)
class PipelineSplit(CutPipelineStage):
    """End a pipeline stage with this module: `cut_pipeline_stage` under its older name.

    rewrite:  ... h.5 h.6 ...  -->  [... h.5] [h.6 ...]
    """
