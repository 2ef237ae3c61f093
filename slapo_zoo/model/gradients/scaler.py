"""GradScaler for fp16 with which either all ranks skip an optimizer step, or none."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` with which all ranks of a scheduled model skip an optimizer step together.

    With torch's own GradScaler, an overflow in one rank's shard would let that rank alone skip the step, and replicas
    of a weight would diverge.

        scaler = slapo_zoo.GradScaler(model)
        loss = model.train_step(batch, scaler=scaler)      # or scaler.scale(loss).backward()
        scaler.unscale_(optimizer); model.clip_grad_norm_(1.0)
        scaler.step(optimizer); scaler.update()

    Args:
        model: a scheduled model.
        **options: options of torch's GradScaler.
    """

    def __init__(self, model: Any, **options: Any):
        self._place, self._mesh = next(model.parameters()).device, model.mesh
        super().__init__(self._place.type, **options)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        here = [value.to(self._place) for value in found.values()]
        anywhere = torch.stack(here).amax(0) if here else torch.zeros(1, device=self._place)
        for mesh_dim in self._mesh.sizes:
            if self._mesh.size(mesh_dim) > 1:
                dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._mesh.group(mesh_dim))
        return dict.fromkeys(found or [self._place], anywhere)
