"""Import the file of every primitive, which registers the primitive; a new primitive needs a file and a line here."""

from slapo_zoo.language.primitives.annotate import Annotate as Annotate
from slapo_zoo.language.primitives.checkpoint import Checkpoint as Checkpoint
from slapo_zoo.language.primitives.core_attention import CoreAttentionSeam as CoreAttentionSeam
from slapo_zoo.language.primitives.cut_pipeline_stage import CutPipelineStage as CutPipelineStage
from slapo_zoo.language.primitives.decompose import Decompose as Decompose
from slapo_zoo.language.primitives.expert_parallel import ExpertParallel as ExpertParallel
from slapo_zoo.language.primitives.fork_rng import ForkRng as ForkRng
from slapo_zoo.language.primitives.fuse import Fuse as Fuse
from slapo_zoo.language.primitives.hook import Hook as Hook
from slapo_zoo.language.primitives.pipeline_split import PipelineSplit as PipelineSplit
from slapo_zoo.language.primitives.primitive_registry import list_primitives as list_primitives
from slapo_zoo.language.primitives.primitive_registry import (
    register_primitive as register_primitive,
)
from slapo_zoo.language.primitives.replace import Replace as Replace
from slapo_zoo.language.primitives.replace_all import ReplaceAll as ReplaceAll
from slapo_zoo.language.primitives.shard import Shard as Shard
from slapo_zoo.language.primitives.shard_argument import ShardArgument as ShardArgument
from slapo_zoo.language.primitives.shard_attribute import ShardAttribute as ShardAttribute
from slapo_zoo.language.primitives.sum_gradient import SumGradient as SumGradient
from slapo_zoo.language.primitives.sync import Sync as Sync
from slapo_zoo.language.primitives.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from slapo_zoo.language.primitives.sync_ops import sync_op as sync_op
from slapo_zoo.language.primitives.sync_reshard import reshard as reshard
from slapo_zoo.language.primitives.sync_rms_norm import SyncRMSNorm as SyncRMSNorm
from slapo_zoo.language.primitives.trace import Trace as Trace
from slapo_zoo.language.primitives.trace_until import TraceUntil as TraceUntil
from slapo_zoo.language.primitives.unfused import Unfused as Unfused
from slapo_zoo.language.primitives.vocab_bias import VocabBias as VocabBias
