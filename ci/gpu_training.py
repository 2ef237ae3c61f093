"""Stages of `gpu-day` that train as users do: every family of the zoo, and loops with precision, recomputation, compile.

All of them run in one process on the device and compare with plain transformers, or with a run of another kind.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import batch_of, config_of, device

LEARNING_RATE = 1e3  # so large that weights before minus weights after give the gradient in fp32
FAMILY_ERROR = 1e-3  # relative error of a loss, or of all gradients together, in fp32
SAME, NEAR, HALF = (
    1e-5,
    1e-4,
    3e-2,
)  # relative difference of losses: same arithmetic, other order of sums, 16 bits
STEPS = 4


def names(fake: bool) -> list[str]:
    """Return the names of all cases of this file."""
    from slapo_zoo.zoo.table import families

    models = ["gpt2"] if fake else sorted(set(families()) - {"wideresnet"})
    return [*(f"families:{name}" for name in models), *(f"loops:{name}" for name in LOOPS)]


def families(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Compare loss and gradients of a tiny model of type `what` on the device with plain transformers in fp64 on the CPU.

    Each of these runs is compared: without kernels, with those that are chosen by themselves, and with each kernel that
    has a place in the model, alone. Return {kernels: relative error}; RuntimeError names those above FAMILY_ERROR.
    """
    import transformers
    from type_coverage import default_config, model_types

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.dispatch.choose_kernel import force
    from slapo_zoo.dispatch.kernel_registry import load_kernels
    from slapo_zoo.verify.tiny_case import tiny_case
    from slapo_zoo.zoo.kernels_for_modules import _paths_by_pattern
    from slapo_zoo.zoo.tiny_config import Sizes

    cls = getattr(transformers, model_types()[what][0])
    with tempfile.TemporaryDirectory() as folder:
        case = tiny_case(default_config(what, cls), cls, Path(folder), Sizes())
        batch = {k: x.to(device()) for k, x in case.batch.items()}

        def error(kernels: Any) -> tuple[float, Any]:
            options: dict[str, Any] = {
                "kernels": kernels,
                "dtype": torch.float32,
                "auto_class": cls,
            }
            model: Any = AutoScheduledModel.from_pretrained(folder, device=device(), **options)
            model.train()
            before = model.consolidated_state_dict()
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            with force("triton"):
                loss = float(model.train_step(batch))
            optimizer.step()
            after = model.consolidated_state_dict()
            off, far, sizes = abs(loss / case.truth.loss - 1), 0.0, 0.0
            for name, wanted in case.truth.grads.items():
                same = [name, *(other for other, first in case.truth.tied.items() if first == name)]
                kept = next(other for other in same if other in before)
                grad = (before[kept].double() - after[kept].double()).cpu() / LEARNING_RATE
                far += float((grad - wanted).square().sum())
                sizes += float(wanted.square().sum())
            return max(off, (far / sizes) ** 0.5), model

        plain, model = error("reference")
        found = {"reference": plain, "auto": error("auto")[0]}
        places = [
            k.name
            for k in load_kernels().values()
            if k.serves and _paths_by_pattern(model.schedule, k)
        ]
        wrong = {}
        for name in [] if fake else places:
            try:
                found[name] = error([name])[0]
            except Exception as problem:
                wrong[name] = f"{type(problem).__name__}: {str(problem)[-300:]}"
    wrong |= {name: value for name, value in found.items() if not value <= FAMILY_ERROR}
    if wrong:
        raise RuntimeError(f"{what}: {wrong}")
    return found


def loops(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Run the loop named `what`, one of LOOPS, for GPT-2, BERT and T5; return {class: relative difference of losses}.

    RuntimeError is raised for a difference above what the loop allows.
    """
    run, allowed = LOOPS[what]
    found = {}
    for family in (
        ("GPT2LMHeadModel",)
        if fake or what == "compiled"
        else ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration")
    ):
        ours, wanted = run(family)
        found[family] = max(abs(a - b) / abs(b) for a, b in zip(ours, wanted, strict=True))
    if not max(found.values()) <= allowed:
        raise RuntimeError(f"{what}: {found}, allowed {allowed}")
    return found


def _models(family: str, dropout: str = "0", **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return (scheduled model on the device, plain model there with the same weights, batch)."""
    import transformers

    from slapo_zoo import AutoScheduledModel

    torch.manual_seed(0)
    config = config_of(family, tiny=True, dropout=dropout)
    ours: Any = AutoScheduledModel.from_config(config, seed=0, device=device(), **options)
    plain: Any = getattr(transformers, family)(copy.deepcopy(config))
    plain.load_state_dict(
        {k: v.float().cpu() for k, v in ours.consolidated_state_dict().items()}, strict=False
    )
    plain.tie_weights()
    batch = batch_of(config, 4, 12, padded="Bert" in family)
    return ours.train(), plain.to(device()).train(), batch


def _step(model: Any, batch: dict[str, Any]) -> Any:
    loss = model(**batch).loss
    loss.backward()
    return loss


def _losses(
    model: Any, batch: dict[str, Any], step: Callable[..., Any] = _step, scaler: Any = None
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(float(step(model, batch)))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return losses


def _train_step(model: Any, batch: dict[str, Any]) -> Any:
    return model.train_step(batch)


def _plain(family: str) -> Any:
    ours, plain, batch = _models(family)
    return _losses(ours, batch, _train_step), _losses(plain, batch)


def _by_hand(family: str) -> Any:
    ours, plain, batch = _models(family)
    return _losses(ours, batch), _losses(plain, batch)


def _host_batch(family: str) -> Any:
    ours, plain, batch = _models(family)
    return _losses(ours, {k: x.cpu() for k, x in batch.items()}, _train_step), _losses(plain, batch)


def _micro(family: str) -> Any:
    ours, plain, batch = _models(family)
    return _losses(ours, batch, lambda m, b: m.train_step(b, micro_batches=2)), _losses(
        plain, batch
    )


def _precision(name: str) -> Callable[[str], Any]:
    def run(family: str) -> Any:
        ours, plain, batch = _models(family, precision=name)
        return _losses(ours, batch, _train_step), _losses(plain, batch)

    return run


def _autocast(family: str) -> Any:
    ours, plain, batch = _models(family)

    def step(model: Any, batch: dict[str, Any]) -> Any:
        with torch.autocast(device(), torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return loss

    return _losses(ours, batch, step), _losses(plain, batch, step)


def _scaled(family: str) -> Any:
    from slapo_zoo import GradScaler

    ours, plain, batch = _models(family)

    def of(model: Any, scaler: Any) -> list[float]:
        def step(model: Any, batch: dict[str, Any]) -> Any:
            with torch.autocast(device(), torch.float16):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            return loss

        return _losses(model, batch, step, scaler)

    return of(ours, GradScaler(ours)), of(plain, torch.amp.GradScaler(device()))


def _compiled(family: str) -> Any:
    ours, plain, batch = _models(family)
    return _losses(torch.compile(ours), batch), _losses(plain, batch)


def _recomputed(policy: str) -> Callable[[str], Any]:
    def run(family: str) -> Any:
        ours, _, batch = _models(family, "default", checkpoint_ratio=1.0, checkpoint_policy=policy)
        saved, _, _ = _models(family, "default")
        return _losses(ours, batch, _train_step), _losses(saved, batch, _train_step)

    return run


def _resumed(family: str) -> Any:
    """Save a training state after half of the steps, load it into a new model, and go on; dropout is on."""
    from slapo_zoo import load_checkpoint, save_checkpoint

    whole, _, batch = _models(family, "default")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    wanted, found = [], []

    def step(model: Any, optimizer: Any) -> float:
        loss = float(model.train_step(batch))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with tempfile.TemporaryDirectory() as folder:
        wanted += [step(whole, optimizer) for _ in range(2)]
        save_checkpoint(whole, folder, optimizer, step=2)
        wanted += [step(whole, optimizer) for _ in range(2)]
        again, _, _ = _models(family, "default")
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        load_checkpoint(again, folder, optimizer)
        found += [*wanted[:2], *(step(again, optimizer) for _ in range(2))]
    return found, wanted


def _saved(family: str) -> Any:
    """Compare the bits of weights that plain transformers loads from what `save_pretrained` wrote after a step."""
    import transformers

    ours, _, batch = _models(family)
    _losses(ours, batch, _train_step)
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        plain: Any = getattr(transformers, family).from_pretrained(folder)
    ours_state = {k: v.cpu() for k, v in ours.consolidated_state_dict().items()}
    same = [
        float(torch.equal(x, ours_state[k]))
        for k, x in plain.state_dict().items()
        if k in ours_state
    ]
    return same, [1.0] * len(same)


def _adapted(family: str) -> Any:
    from peft import LoraConfig, get_peft_model

    ours, plain, batch = _models(family)
    layers = {"GPT2LMHeadModel": ["c_attn"], "BertForMaskedLM": ["query", "value"]}.get(
        family, ["q", "v"]
    )
    found = []
    for model in (ours, plain):
        torch.manual_seed(0)
        found.append(
            _losses(
                get_peft_model(model, LoraConfig(target_modules=layers, lora_dropout=0.0)), batch
            )
        )
    return tuple(found)


LOOPS: dict[str, tuple[Callable[[str], Any], float]] = {
    "plain": (_plain, NEAR), "by_hand": (_by_hand, NEAR), "host_batch": (_host_batch, NEAR), "micro": (_micro, NEAR),
    "bf16": (_precision("bf16"), HALF), "fp16": (_precision("fp16"), HALF), "bf16-pure": (_precision("bf16-pure"), 2 * HALF),
    "autocast": (_autocast, HALF), "scaled": (_scaled, HALF), "compiled": (_compiled, NEAR),
    "recomputed": (_recomputed(""), SAME), "save_matmuls": (_recomputed("save_matmuls"), SAME),
    "resumed": (_resumed, SAME), "saved": (_saved, 0.0), "adapted": (_adapted, NEAR),
}  # fmt: skip
