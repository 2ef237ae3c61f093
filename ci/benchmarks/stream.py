"""Memory of `stream_weights` beyond the model, and a check that its bytes equal those of the saved files."""

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import MIB, give_back, on_ranks

BESIDE = 64 * MIB  # bytes that a rank may hold beyond one bucket


def streamed(config: Any, buckets: tuple[int, ...], folder: str) -> Any:
    """Save a model, then stream its weights with each bucket size of `buckets`, in bytes.

    Returns:
        ((growth of this rank's memory, seconds) per bucket, whether all tensors equal those in the files); the
            second
        is None on ranks other than 0.
    """
    from safetensors import safe_open

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.weights.ledger import AnonymousPeak

    model = AutoScheduledModel.from_config(config, tp=2, pp=2, seed=0)
    model.save_pretrained(folder)
    found, digests = [], {}
    for bucket in buckets:
        give_back()
        with AnonymousPeak() as peak:
            begin = time.perf_counter()
            for name, tensor in model.stream_weights(bucket=bucket):
                digests[name] = _digest(tensor)
            found.append((peak.growth, time.perf_counter() - begin))
    if model.mesh.rank:
        return found, None
    saved = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            saved |= {name: _digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found, digests == saved


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return a table row per bucket size, with the memory of the rank that held most."""
    from benchmarks.checkpoints import gpt2_1b

    config = gpt2_1b(quick)
    buckets = tuple(n * MIB for n in ((160, 256) if quick else (512, 1024)))
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks(streamed, 4, config, buckets, folder)
    rows = []
    for i, bucket in enumerate(buckets):
        growth = max(found[i][0] for found, _ in ranks)
        beyond = ["held, MiB"] if growth > bucket + BESIDE else []
        beyond += [] if ranks[0][1] else ["bytes of the files"]
        rows.append({"what": f"tp=2 pp=2, bucket {bucket // MIB} MiB", "held, MiB": growth / MIB,
                     "at most, MiB": (bucket + BESIDE) / MIB, "s": ranks[0][0][i][1],
                     "bytes of the files": ranks[0][1], "beyond": beyond})  # fmt: skip
    return {"stream_weights of a GPT-2 of 1.02 billion parameters, float32": rows}
