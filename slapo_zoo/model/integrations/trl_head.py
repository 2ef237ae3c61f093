"""Replace TRL's fused language-model head on a model whose head is sharded.

Trainers of TRL replace a model's forward by one that multiplies by `lm_head.weight`. Over tp that weight is a
shard of the vocabulary, and its gradient would be incomplete. The forward of this file takes the model's own logits.
"""

from types import MethodType
from typing import Any

import torch

from slapo_zoo.errors import SlapoError

THEIRS = "_fused_forward"  # the function that `trl.trainer.utils.add_fused_lm_head` puts there


def take_back_forward(model: Any) -> None:
    """Replace TRL's fused forward, if a model has that, by one that uses the model's own logits.

    Raises:
        SlapoError: the forward was replaced, but not by TRL's fused one.
    """
    replaced = vars(model).get("forward")
    if replaced is None:
        return
    function = getattr(replaced, "__func__", replaced)
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != THEIRS:
        problem = f"found a forward of {getattr(function, '__module__', 'another library')}, expected the model's own"
        hint = "leave out the option that replaces model.forward: only the model's own forward knows its shards"
        raise SlapoError("ScheduledTrainer", "model", problem, hint)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    model.forward = MethodType(_forward_at(cells["temperature"].cell_contents), model)


def _forward_at(temperature: float) -> Any:
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None,
        num_items_in_batch: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        own = type(self).forward
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}  # fmt: skip
            given = {name: value for name, value in given.items() if value is not None}
            return own(self, *args, **given, **kwargs)
        output = own(self, *args, **{**kwargs, "use_cache": False})
        logits, target = output.logits, shift_labels
        if target is None:
            logits, target = logits[:, :-1], labels[:, 1:]
        return _scored(self, output, logits.float() / temperature, target, num_items_in_batch)

    return forward


def _scored(model: Any, output: Any, logits: Any, target: Any, items: Any) -> Any:
    """Return TRL's output object: loss, log-probabilities and entropy per token, 0 where the label is -100.

    Args:
        model: the scheduled model.
        output: output of its forward.
        logits: [rows, tokens, vocabulary], divided by the temperature.
        target: labels [rows, tokens].
        items: number of targets that the loss divides by; None: those in `target`.
    """
    from trl.trainer.utils import FusedCausalLMOutput  # pyright: ignore[reportMissingImports]

    mask = target != -100
    every = logits.log_softmax(-1)
    log_probs = every.gather(-1, target.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0.0)
    entropy = -(every.exp() * every).sum(-1)
    with torch.no_grad():
        squares = (2 * every).logsumexp(-1).masked_fill(~mask, 0.0)
        means = logits.mean(-1).masked_fill(~mask, 0.0)
        best = (logits.argmax(-1) == target) & mask
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    aux = getattr(output, "aux_loss", None)
    if aux is not None:
        loss = loss + getattr(model.config, "router_aux_loss_coef", 0.0) * aux
    return FusedCausalLMOutput(
        loss=loss, log_probs=log_probs, entropy=entropy.masked_fill(~mask, 0.0), log_sum_sq_probs=squares,
        mean_logits=means, is_top1=best, label_mask=mask, aux_loss=aux,
    )  # fmt: skip
