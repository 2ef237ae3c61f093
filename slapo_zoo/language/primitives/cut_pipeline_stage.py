"""cut_pipeline_stage: cut the model into pipeline stages after a module."""

from dataclasses import dataclass

from slapo_zoo.language.directive import Directive, Site, primitive


@primitive("cut_pipeline_stage")
@dataclass(frozen=True)
class CutPipelineStage(Directive):
    """End a pipeline stage after this module; the next stage begins with the module that runs after it.

    rewrite:  ... h.5 h.6 ...  -->  [... h.5] [h.6 ...]
    errors:   the module is the whole model; the model was cut here before

    Args:
        call: for a block that runs several times in a forward (ALBERT): index, from 0, of the call after which to cut.
    """

    call: int = 0

    def check(self, site: Site) -> None:
        if not site.path:
            raise self.fail(site, "the whole model cannot be cut", "name one of its blocks")
        if self.call < 0:
            raise self.fail(site, "found a negative call", "count the calls of the block from 0")
        if (site.path, self.call) in site.state.cuts:
            raise self.fail(site, "a stage ends here already", "remove one of the two cuts")

    def apply(self, site: Site) -> None:
        site.state.cuts.append((site.path, self.call))

    def undo(self, site: Site) -> None:
        site.state.cuts.remove((site.path, self.call))
