"""Every primitive, named: adding one means one file and one line here."""

from slapo_zoo.primitives.checkpoint import Checkpoint as Checkpoint
from slapo_zoo.primitives.core_attention import CoreAttentionSeam as CoreAttentionSeam
from slapo_zoo.primitives.cut_pipeline_stage import CutPipelineStage as CutPipelineStage
from slapo_zoo.primitives.fork_rng import ForkRng as ForkRng
from slapo_zoo.primitives.replace import Replace as Replace
from slapo_zoo.primitives.shard import Shard as Shard
from slapo_zoo.primitives.shard_attribute import ShardAttribute as ShardAttribute
from slapo_zoo.primitives.sum_gradient import SumGradient as SumGradient
from slapo_zoo.primitives.sync import Sync as Sync
