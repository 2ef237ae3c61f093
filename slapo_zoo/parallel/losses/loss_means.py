"""Mean losses that divide by the number of labels (other than -100) of all micro-batches and dp ranks together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn
from torch.overrides import TorchFunctionMode

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel.collectives import all_gather
from slapo_zoo.parallel.known import IGNORED
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.replaced import replaced

# In the order in which the heads of `transformers` compute their terms.
LABELS = (
    "mc_labels", "labels", "next_sentence_label", "sentence_order_label", "start_positions",
    "end_positions", "bool_masked_pos",
)  # fmt: skip
MEANS = (fn.cross_entropy, fn.mse_loss, fn.binary_cross_entropy_with_logits)
BY_CLASS, BCE = (fn.cross_entropy, fn.nll_loss), (MEANS[2], fn.binary_cross_entropy)
OF_OWN = {*MEANS, *BY_CLASS, *BCE, fn.l1_loss, fn.smooth_l1_loss, fn.huber_loss}
_SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__"}
_FACTORS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}
_QUOTIENTS = {"div", "div_", "true_divide", "__truediv__", "__itruediv__"}
_SAME = {"neg", "__neg__", "float", "double", "to", "type", "type_as", "half", "bfloat16", "cpu", "cuda",
         "clone", "contiguous", "detach", "view_as", "squeeze", "unsqueeze", "reshape", "view", "mean", "sum"}  # fmt: skip
_SHARE = "_is_share"  # attribute of a tensor: True if it is a sum of means times constants


def count_targets(class_name: str, batch: Mapping[str, Any]) -> list[Tensor]:
    """Return the numbers of labels by which the means in a model's loss divide: scalars on the device of the labels.

    Args:
        class_name: name of the model class; a class that predicts the next token ignores each row's first label.
        batch: keyword arguments of the model's forward; each argument of labels in it gives one mean and one number.
    """
    mask = batch.get("attention_mask") if head_of(class_name).over_real_tokens else None
    targets = targets_of(class_name, batch)
    return [_count(*each, batch) if mask is None else (mask == 1).sum() for each in targets.items()]


def targets_of(class_name: str, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return {name of a label argument in `batch`: its labels}, in the order in which a forward computes their mean
    losses. "labels" lack the first of each row if models of class `class_name` predict the next token.
    """
    found = {name: batch[name] for name in LABELS if batch.get(name) is not None}
    cut = batch.get("shift_labels")  # shifted before the tokens were cut over cp
    if "labels" in found:
        found["labels"] = shifted(class_name, found["labels"]) if cut is None else cut
    return found


def shifted(class_name: str, labels: Tensor) -> Tensor:
    """Return the labels that a model class's loss uses: all, or all but the first of each row for next-token prediction."""
    return labels[..., 1:] if head_of(class_name).shifts else labels


def _count(name: str, target: Tensor, batch: Mapping[str, Any]) -> Tensor:
    if target.is_floating_point():
        return torch.full((), target.numel(), device=target.device)
    if name.endswith("_positions"):  # positions beyond the sequence are ignored
        tokens = batch.get("input_ids")
        tokens = batch["inputs_embeds"] if tokens is None else tokens
        return (target < tokens.shape[1]).sum()
    return (target != IGNORED).sum()


class GlobalMeans(TorchFunctionMode):
    """Mode whose context `over` makes a mean loss of a micro-batch divide by the number of targets in the whole batch.

    rewrite:  loss_k(x, y, reduction="mean")  -->  loss_k(x, y, reduction="sum") / counts[k]
              with weights w of the classes   -->  ... / sum of w[y] over the whole batch

    The k-th call of a mean loss in a forward is term k. The model's loss, and what the user's own `loss_function`
    returns, must be a sum of means times constants; any other loss raises MeshError.

    Args:
        counts: number of targets of each term in the whole batch, over all micro-batches and dp ranks.
        targets: name --> labels of this dp rank for each term; None if the user gave `counts`.
        group: process group of the dp ranks.
    """

    def __init__(self, counts: Sequence[float], targets: Mapping | None = None, group: Any = None):
        super().__init__()
        self.counts, self.group, self.found, self.in_own = counts, group, 0, False
        self.targets = None if targets is None else list(targets.values())
        self.is_needed = True  # a forward without a mean loss is refused
        self.part: list[Tensor] = []
        self.expected: Sequence[Tensor] = ()
        self.totals: dict[int, tuple[Any, float]] = {}  # number of a call --> its weights, divisor

    @contextmanager
    def over(
        self, model: Any, part: Mapping[str, Tensor], expected: Sequence[Tensor] = ()
    ) -> Iterator[None]:
        """Context of a micro-batch's forward of `model`, in which mean losses divide by the counts of the whole batch.
        `part` maps argument names to the micro-batch's labels; `expected` is, for each loss term, the number of these
        that are not -100, or empty. MeshError if a term's mean is over another number, or if there is no mean loss.
        """
        self.expected = expected
        own, self.found, self.part = vars(model).get("_loss_function"), 0, list(part.values())
        if own is not None:
            model._loss_function = partial(self._run_own, own)
        try:
            with self:
                yield
        finally:
            if own is not None:
                model._loss_function = own
        if self.is_needed and not self.found:
            problem = "the forward called none of the mean losses that can be split over rows"
            raise _refusal(problem, MEANS)

    @staticmethod
    def require_sum(loss: Tensor) -> None:
        """Raise MeshError if `loss`, computed inside this mode, has a term that is no mean loss times a constant."""
        if not getattr(loss, _SHARE, True):
            raise _refusal("it adds a term that is no mean over targets (a router's load-balancing loss, a z-loss)")  # fmt: skip

    def _run_own(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replaced(self, "in_own", True):
            loss = own(*args, **kwargs)
        if not getattr(loss, _SHARE, False):
            what = "something else than a sum of constants times means that these functions return"
            raise _refusal(f"loss_function returns {what}", OF_OWN)
        return loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = func in (OF_OWN if self.in_own else MEANS)
        if not known or kwargs.get("reduction", "mean") != "mean":
            found = func(*args, **kwargs)
            if (self.in_own or self.found) and isinstance(found, Tensor):
                setattr(found, _SHARE, _is_linear(func.__name__, args))
            return found
        count = self._divisor(func, args[0], args[1], kwargs)
        self.found += 1
        if func is fn.cross_entropy and hasattr(args[0], "cross_entropy_over"):
            loss = args[0].cross_entropy_over(count, *args[1:], **kwargs)
        else:
            loss = func(*args, **{**kwargs, "reduction": "sum"}) / count
        setattr(loss, _SHARE, True)
        return loss

    def _divisor(self, func: Any, x: Tensor, y: Tensor, options: Mapping[str, Any]) -> float:
        """Return the divisor of the mean loss that the forward computes now: its number of targets over all
        micro-batches and dp ranks or, if it has class weights (`weight=`), the sum of its targets' weights. `func` is
        the loss function of torch, called with predictions x, targets y and keyword arguments `options`.
        """
        k = min(self.found, len(self.counts) - 1) if self.in_own else self.found
        if k >= len(self.counts):
            problem = f"the forward computes more mean losses than the {len(self.counts)} whose targets were counted (one per label argument of the batch, or those in targets=)"
            raise _refusal(problem)
        weight = None if func in BCE else options.get("weight")
        by_class = func in BY_CLASS and not y.is_floating_point()
        if weight is not None and (self.targets is None or not by_class):
            problem = f"{func.__name__} divides by weights (its argument weight=), so micro-batches and dp ranks cannot be averaged by counts of targets"
            raise _refusal(problem)
        if self.targets is None or not (self.in_own or weight is not None):
            if self.expected and by_class and self.targets is not None:
                self._require_counted(k, y, options.get("ignore_index", IGNORED))
            return self.counts[k]
        if by_class:
            return self._by_class(k, y, weight, options["ignore_index"])
        if options.get("pos_weight") is not None:
            self._total(options["pos_weight"], torch.zeros((), device=y.device))
        if (self.part[k] == IGNORED).any():
            raise _refusal(f"{func.__name__} cannot ignore labels, and some labels are -100")
        shape = (
            y[:, 0].shape if func is fn.cross_entropy else torch.broadcast_shapes(x.shape, y.shape)
        )
        return self.counts[k] * shape.numel() / self.part[k].numel()

    def _require_counted(self, k: int, y: Tensor, ignored: int) -> None:
        """Raise MeshError if a micro-batch's loss term `k` uses more or fewer targets than were counted in its labels:
        elements of the targets `y` other than `ignored` (the loss's `ignore_index`), against labels other than -100.
        """
        found, counted = int((y != ignored).sum()), int(self.expected[k])
        if found != counted:
            problem = f"the loss compares {found} targets of a micro-batch whose labels have {counted} other than {IGNORED}"
            hint = f"set labels to {IGNORED} wherever the loss ignores them (at padding; for segmentation load with semantic_loss_ignore_index={IGNORED} too), or pass micro_batches=1 and use dp=1"
            raise MeshError("train_step", "the model's loss", problem, hint)

    def _by_class(self, k: int, y: Tensor, weight: Tensor | None, ignored: int) -> float:
        """Return the divisor of loss term `k` (from 0): the sum of the class weights of its targets over all
        micro-batches and dp ranks; for `weight` None each target has weight 1. `ignored` is its `ignore_index`.
        MeshError if `y`, the micro-batch's targets, have another sum of weights than its labels.
        """

        def weighed(targets: Tensor) -> Tensor:
            real = (targets != ignored) & (targets != IGNORED)
            each = real if weight is None else weight.detach()[targets.where(real, 0)] * real
            return each.sum(dtype=torch.float64)

        here, expected = float(weighed(y)), float(weighed(self.part[k]))
        if abs(here - expected) > 1e-6 * expected:
            problem = f"the loss uses other targets than the batch's labels: the class weights of its targets sum to {here:g}, those of the labels to {expected:g}"
            raise _refusal(problem)
        assert self.targets is not None  # noqa: S101 - asked for before
        return self._total(weight, weighed(self.targets[k]))

    def _total(self, weights: Tensor | None, mine: Tensor) -> float:
        """Return the sum over dp of `mine`, the sum of the class weights of this rank's targets. Raise MeshError if
        `weights`, the weight of each class, differ between micro-batches or ranks.
        """
        if self.found not in self.totals:
            marks = [] if weights is None else [weights.detach().double().flatten()]
            own = torch.cat([mine.double()[None], *marks])[None]
            rows = all_gather(own, 0, self.group).tolist()
            alike = all(row[1:] == rows[0][1:] for row in rows)
            self.totals[self.found] = weights if alike else None, sum(row[0] for row in rows)
        before, total = self.totals[self.found]
        if weights is not None and (before is None or not torch.equal(before, weights)):
            what = "class weights (weight= or pos_weight=)"
            raise _refusal(f"micro-batches or dp ranks have different {what}")
        return total


def _is_linear(name: str, args: Sequence[Any]) -> bool:
    """Return whether the torch operation `name` makes a sum of mean losses times constants of `args`: it adds such
    sums, multiplies or divides one by a constant, or reshapes or casts one. The caller stores the result as `_is_share`
    of the new tensor; mean losses have it True.
    """
    kinds = [getattr(x, _SHARE, None) for x in args if isinstance(x, Tensor) or x != 0]
    if name in _SUMS:
        return all(kinds)
    of_two = kinds == [True, None] or (kinds == [None, True] and name in _FACTORS)
    return of_two if name in _FACTORS | _QUOTIENTS else name in _SAME and kinds[0] is True


def _refusal(problem: str, known: Iterable[Any] = ()) -> MeshError:
    names = ", ".join(sorted(function.__name__ for function in known))
    hint = "pass micro_batches=1 and use dp=1, or give train_step a loss_fn (docs/your_own_loop.md)"
    problem = f"{problem} ({names})" if names else problem
    return MeshError("train_step", "the model's loss", problem, hint)
