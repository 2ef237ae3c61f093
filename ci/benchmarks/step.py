"""Time of training steps, forward + backward + AdamW on one process: slapo_zoo, plain transformers, torch.compile.

The alternatives of a row take turns in one process; their ratio is the result. Memory is the peak of anonymous memory
of new processes, with 8 rows of 512 tokens. `--only NAMES` runs the models whose names begin so, "NAMES eager"
without torch.compile, "memory NAMES" measures memory, NAME:dtype takes one dtype. Rows are stored in
hub_cards/bench/<device>.json.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from slapo_zoo.dispatch.benchmark import GAIN
from slapo_zoo.dispatch.tables import MEASURED, UNMEASURED, slug

ONLY = ""
REPEATS, MOST_SECONDS = 7, 8.0
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_",
            "mkldnn::_linear_pointwise", "aten::mkldnn_convolution", "aten::convolution_backward")  # fmt: skip
WIDE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


@dataclass(frozen=True)
class Case:
    """A model and batch to measure: one row of the table.

    Args:
        config: class and fields of the config; sizes and dropout are the family's own defaults.
        cls: name of the model class.
        layers: config fields that reduce the number of layers; {} for all layers.
        rows: rows of the batch.
        tokens: tokens per row.
        masked: share of the labels that are not ignored, as in masked-language models.
        padded: whether half of the batch is padding.
        targets: dtype --> the ratio (plain step / scheduled step) that is wanted at least.
    """

    config: tuple[str, dict[str, Any]]
    cls: str
    layers: dict[str, Any]
    rows: int = 2
    tokens: int = 512
    masked: float = 1.0
    padded: bool = False
    targets: dict[str, float] = field(default_factory=dict)


BERT, GPT2 = ("BertConfig", {}), ("GPT2Config", {"loss_type": "ForCausalLMLoss"})
NEO = ("GPTNeoConfig", {"hidden_size": 768, "num_heads": 12})
CASES = {
    "bert 12 layers": Case(BERT, "BertForMaskedLM", {}, masked=0.15, targets={"float32": 1.2, "bfloat16": 1.2}),
    "gpt2 12 layers": Case(GPT2, "GPT2LMHeadModel", {}, targets={"float32": 1.1, "bfloat16": 1.2}),
    "bert": Case(BERT, "BertForMaskedLM", {"num_hidden_layers": 4}, masked=0.15),
    "padded bert": Case(BERT, "BertForMaskedLM", {"num_hidden_layers": 4}, rows=4, masked=0.15, padded=True, targets={"float32": 1.5, "bfloat16": 1.5}),
    "roberta 12 layers": Case(("RobertaConfig", {"vocab_size": 50265, "max_position_embeddings": 514}), "RobertaForMaskedLM", {}, masked=0.15, targets={"float32": 1.25, "bfloat16": 1.25}),
    "albert": Case(("AlbertConfig", WIDE), "AlbertForMaskedLM", {"num_hidden_layers": 4}, masked=0.15),
    "gpt2": Case(GPT2, "GPT2LMHeadModel", {"n_layer": 4}),
    "gpt_neo": Case(NEO, "GPTNeoForCausalLM", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, tokens=1024, targets={"float32": 1.15, "bfloat16": 1.5}),
    "opt": Case(("OPTConfig", {}), "OPTForCausalLM", {"num_hidden_layers": 4}),
    "t5": Case(("T5Config", {"d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_start_token_id": 0}), "T5ForConditionalGeneration", {"num_layers": 3}),
    "llama": Case(("LlamaConfig", WIDE | {"vocab_size": 32000}), "LlamaForCausalLM", {"num_hidden_layers": 4}),
    "gpt_neox": Case(("GPTNeoXConfig", WIDE | {"vocab_size": 50432}), "GPTNeoXForCausalLM", {"num_hidden_layers": 4}),
    "vit": Case(("ViTConfig", {"num_labels": 1000}), "ViTForImageClassification", {"num_hidden_layers": 4}, rows=4),
    "wideresnet": Case(("WideResNetConfig", {"num_labels": 1000}), "WideResNetForImageClassification", {"depths": (1, 1, 1, 1)}, rows=4),
}  # fmt: skip


def class_named(name: str) -> Any:
    """Return the class with this name of `transformers`, or of the one family that `transformers` lacks."""
    import transformers

    from slapo_zoo.hf.own import wideresnet

    return getattr(transformers, name, None) or getattr(wideresnet, name)


def config_of(case: Case) -> Any:
    """Return the config of a case."""
    name, fields = case.config
    return class_named(name)(**fields, **case.layers, architectures=[case.cls])


def is_vision(case: Case) -> bool:
    """Return whether the model's input is an image."""
    return case.cls.endswith("ForImageClassification")


def batch_of(case: Case, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a batch with random tokens (or pixels in `dtype`) and labels."""
    torch.manual_seed(0)
    B, S = case.rows, case.tokens
    if is_vision(case):
        pixels = torch.randn(B, 3, *2 * [getattr(config, "image_size", 224)], dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (B,))}
    ids = torch.randint(3, config.vocab_size, (B, S))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.masked < 1.0:
        batch["labels"][torch.rand(B, S) >= case.masked] = -100
    if case.padded:
        lengths = torch.linspace(S // 8, S - S // 8, B).long()[:, None]
        batch["attention_mask"] = (torch.arange(S) < lengths).long()
        batch["labels"].masked_fill_(batch["attention_mask"] == 0, -100)
    return batch


TORCH_FAILS = "fails"  # torch.compile generates C++ that does not compile
UNPADDED = "unpadded_encoder"  # without a benchmark of its own: whole steps decide on it


def build(case: Case, dtype: torch.dtype, ours: bool, unpadded: bool = True) -> Any:
    """Return a model in training mode; `ours`: scheduled, with the kernels that kernels="auto" chooses.

    In a padded case `unpadded` decides whether the kernel UNPADDED is among them.
    """
    config = config_of(case)
    if ours:
        from slapo_zoo import AutoScheduledModel, Mesh
        from slapo_zoo.zoo.outline import Outline

        kernels: Any = "auto"
        if case.padded:
            found = Outline(config, None, Mesh(), dtype, kernels="auto").schedule.kernels
            kernels = {c.kernel for c in found if c.accepted} - {UNPADDED}
            kernels = sorted(kernels | ({UNPADDED} if unpadded else set()))
        return AutoScheduledModel.from_config(config, dtype=dtype, seed=0, kernels=kernels).train()
    return class_named(case.cls)._from_config(config, dtype=dtype).train()


def stepper(model: Any, forward: Any, batch: dict[str, Any], ours: bool) -> Callable[[], None]:
    """Return a function that runs one training step on `batch`, with the default optimizer of transformers' Trainer.

    `forward` computes the loss; it is unused with `ours`, where the scheduled model's `train_step` runs.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        if ours:
            model.train_step(batch)
        else:
            forward(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def alternatives(case: Case, dtype: torch.dtype, compile: bool) -> dict[str, Callable[[], None]]:
    """Return {name: function that runs a step}: "plain", "ours", "padding kept" in a padded case, and "compile" if
    asked.
    """
    batch = batch_of(case, config_of(case), dtype)
    plain = build(case, dtype, ours=False)
    mine = build(case, dtype, ours=True)
    found = {"plain": stepper(plain, plain, batch, False), "ours": stepper(mine, None, batch, True)}
    if case.padded:
        whole = build(case, dtype, ours=True, unpadded=False)
        found["padding kept"] = stepper(whole, None, batch, True)
    if compile:
        other = build(case, dtype, ours=False)
        found["compile"] = stepper(other, torch.compile(other, dynamic=False), batch, False)
    return found


def compiles(steps: dict[str, Callable[[], None]]) -> bool:
    """Run the step "compile" once, if there is one; remove it from `steps` and return False if torch cannot compile
    it.
    """
    from torch._inductor.exc import InductorError

    try:
        steps.get("compile", lambda: None)()
    except InductorError as error:
        print(f"torch.compile: {str(error).strip().splitlines()[0]}")
        del steps["compile"]
        return False
    return True


def timed(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return {name: milliseconds of each repeat} for functions in `steps`; they take turns, after one warm-up."""
    # one thread: its own time, which work beside it does not lengthen
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run()
    begin = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 2 and time.perf_counter() - begin > MOST_SECONDS:
            break
        for name, run in steps.items():
            before = clock()
            run()
            found[name].append(1e3 * (clock() - before))
    return found


def shares(step: Callable[[], None]) -> tuple[float, str]:
    """Return (share of time in matrix products, other operations that take most time, as text) of one scheduled step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    times = {e.key: e.self_cpu_time_total for e in seen.key_averages()}
    total = sum(times.values())
    products = sum(t for name, t in times.items() if name in PRODUCTS)
    rest = sorted(((t, name) for name, t in times.items() if name not in PRODUCTS), reverse=True)
    said = ", ".join(f"{name.split('::')[-1]} {100 * t / total:.0f} %" for t, name in rest[:4])
    return products / total, said


def peak(case: Case, dtype_name: str, ours: bool) -> int:
    """Return the peak growth of anonymous memory, in bytes, of building a model (`ours`: scheduled) and two steps."""
    from slapo_zoo.weights.ledger import AnonymousPeak

    dtype = getattr(torch, dtype_name)
    with AnonymousPeak() as seen:
        model = build(case, dtype, ours)
        run = stepper(model, model, batch_of(case, config_of(case), dtype), ours)
        run()
        run()
    return seen.growth


def measure(name: str, case: Case, dtype_name: str, compile: bool, repeats: int) -> dict[str, Any]:
    """Return the table row of a case (`name`) in a dtype after `repeats` rounds; `compile`: also try torch.compile."""
    dtype = getattr(torch, dtype_name)
    torch._dynamo.reset()
    steps = alternatives(case, dtype, compile)
    missing = UNMEASURED if compiles(steps) else TORCH_FAILS
    times = timed(steps, repeats)
    share, rest = shares(steps["ours"])
    ours = median(times["ours"])

    def ratio(
        other: str,
    ) -> Any:  # ratio of steps that follow each other, so that a slow minute counts for both
        pairs = zip(times[other], times["ours"], strict=True) if other in times else ()
        return median([a / b for a, b in pairs]) if other in times else missing

    row = {"model": name, "dtype": dtype_name, "B x S": f"{case.rows} x {case.tokens}",
           "ours ms": ours, "plain / ours": ratio("plain"), "wanted": case.targets.get(dtype_name, 1.0),
           "compile / ours": ratio("compile"), "GEMM share": share, "rest": rest,
           "threads": torch.get_num_threads()}  # fmt: skip
    if case.padded:
        row["padding kept / ours"] = ratio("padding kept")
    row["beyond"] = ["plain / ours"] if row["plain / ours"] < row["wanted"] else []
    return row


def keep(title: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of the table `title` into the file of this device, in place of rows of the same model and dtype."""
    rows = [{k: v for k, v in row.items() if k != "beyond"} for row in rows]
    file = MEASURED / f"{slug('cpu')}.json"
    content: dict[str, Any] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"device": "cpu"}
    )
    table = content.setdefault(title, [])
    new = {(row["model"], row["dtype"]) for row in rows}
    content[title] = [r for r in table if (r["model"], r["dtype"]) not in new] + rows
    for row in rows:
        if ratio := row.get("padding kept / ours"):
            key = f"{UNPADDED}:{row['dtype']}:1024"
            content.setdefault("dispatch", {})[key] = "ours" if ratio >= GAIN else "torch"
            content.setdefault("ratios", {})[key] = round(ratio, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def tiny(case: Case) -> Case:
    """Return the case with two rows of at most 32 tokens, for --quick."""
    from dataclasses import replace

    return replace(case, tokens=min(case.tokens, 32), rows=2)


def memory_rows(chosen: dict[str, Case]) -> list[dict[str, Any]]:
    """Return a row per language model: peak memory of ours and of the plain model, with 8 rows of 512 tokens.

    Each peak is measured in a process of its own.
    """
    from dataclasses import replace

    from benchmarks.ranks import on_ranks

    rows = []
    for name, case in chosen.items():
        if is_vision(case) or case.padded:
            continue
        case = replace(case, rows=8, tokens=512)
        mine, plain = (on_ranks(peak, 1, case, "float32", ours)[0] for ours in (True, False))
        row: dict[str, Any] = {"model": name, "dtype": "float32", "ours GiB": mine / 2**30, "plain GiB": plain / 2**30,
               "ours / plain": mine / plain, "wanted": 0.6}  # fmt: skip
        rows.append(row | {"beyond": ["ours / plain"] if mine > 0.6 * plain else []})
        keep("memory", rows[-1:])
    return rows


def _dtypes(name: str, wanted: Sequence[str]) -> list[str]:
    """Return the dtypes in which a model is to run, by the words "NAME" or "NAME:dtype" of `--only`."""
    found = [word.partition(":")[2] for word in wanted if name.startswith(word.partition(":")[0])]
    return [d for d in ("float32", "bfloat16") if d in found or "" in found]


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Measure the models that `--only` chooses, in both dtypes; return the table of steps, or that of memory."""
    wanted = ONLY.removeprefix("memory ").removesuffix(" eager").split(",")
    chosen = {name: case for name, case in CASES.items() if _dtypes(name, wanted)}
    if quick:
        small = {n: tiny(c) for n, c in chosen.items() if "12 layers" not in n}
        names = list(small)[:1] if ONLY else ["gpt2"]
        rows = [measure(n, small[n], "float32", False, 1) for n in names]
        return {"steps": [row | {"beyond": []} for row in rows]}
    if ONLY.startswith("memory "):
        found = {"memory": memory_rows(chosen)}
    else:
        found = {"steps": []}
        for name, case in chosen.items():
            for dtype in _dtypes(name, wanted):
                row = measure(name, case, dtype, not ONLY.endswith(" eager"), REPEATS)
                found["steps"].append(row)
                keep("steps", [row])  # a run that is cut short keeps what it has
    return found
