"""Sharding rules for Wide ResNet: inner channels of a bottleneck are sharded; BatchNorm sees the rows of all dp ranks.

In shapes: C channels of a block's input, W between its convolutions, O of its output; n, the number of tp ranks,
divides W. conv2 reads this rank's channels; a reduce-scatter sums its outputs and shards them by channels again. So
conv1, conv2, conv3 and the two norms between them are all sharded.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.language.primitives import Shard, Sync, SyncBatchNorm
from slapo_zoo.zoo.rules import enter_whole, whole
from slapo_zoo.zoo.table import Table, register

NORM = (SyncBatchNorm(),)
OWN_NORM = (*(Shard(name, 0) for name in ("weight", "bias", "running_mean", "running_var")), *NORM)

WIDERESNET = register(
    Table(
        model_type="wideresnet",
        source="torchvision 0.28.0, models/resnet.py (wide_resnet50_2), for names and sizes",
        dims={},
        body=(
            # module                   rule                                                            per rank
            ("conv1",                  whole),                                                       # [C, 3, 7, 7]
            ("bn1",                    NORM),                                                        # [C]
            ("layer*.*.conv1",         enter_whole),                                                 # dx summed over tp
            ("layer*.*.conv1",         (Shard("weight", 0),)),                                       # [W/n, C, 1, 1]
            ("layer*.*.bn1",           OWN_NORM),                                                    # [W/n]
            ("layer*.*.conv2",         (Shard("weight", 1), Sync("fwd_post", "reduce_scatter", axis=1))),  # [W, W/n, 3, 3]
            ("layer*.*.bn2",           OWN_NORM),                                                    # [W/n]
            ("layer*.*.conv3",         (Shard("weight", 1), Sync("fwd_post", "all_reduce"))),        # [O, W/n, 1, 1]
            ("layer*.*.bn3",           NORM),                                                        # [O]
            ("layer*.*.downsample.0",  whole),                                                       # [O, C, 1, 1]
            ("layer*.*.downsample.1",  NORM),                                                        # [O]
        ),
        heads=(
            ("fc",                     whole),                                                       # [labels, O]
        ),
        blocks=("layer*.*",),
        tunable=tunable(attention=(), sequence_parallel=()),
        seam=False,
        batch_statistics=True,
    )
)
