"""alpha as a trained parameter: one logit a layer, alpha = sigmoid(logit)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from titan_prores.prores.placement import local, replicated
from titan_prores.prores.schedule import ResidualSchedule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# name -> (start, l, L) -> alpha of every layer at the start, with l the vector 1..L of float64.
STARTS: dict[str, Callable[[float, np.ndarray, int], np.ndarray]] = {
    "constant": lambda start, l, L: np.full(L, start),  # noqa: E741
    "1/l": lambda start, l, L: start / l,  # noqa: E741
    "1/sqrt(l)": lambda start, l, L: start / np.sqrt(l),  # noqa: E741
}


class LearnedSchedule(ResidualSchedule):
    """alpha = sigmoid(logit), one trained logit per layer, which `ProRes` makes and holds.

    Args:
        n_layers: L.
        start: alpha of the first layer at the start, between 0 and 1 without either.
        depth: a key of `STARTS`: how alpha depends on the layer at the start.
        monotone: weight of `penalty`, which is added to the loss whose gradient the logits get.

    Raises:
        ValueError: one of these is out of its range.
    """

    def __init__(self, n_layers: int, *, start: float = 0.1, depth: str = "1/l", monotone: float = 0.0) -> None:
        if n_layers < 1:
            raise ValueError(f"n_layers = {n_layers}: must be at least 1")
        if not 0 < start < 1:
            raise ValueError(f"start = {start}: must be between 0 and 1, without either")
        if depth not in STARTS:
            raise ValueError(f"depth = {depth!r} is none of {', '.join(STARTS)}")
        if not 0 <= monotone < float("inf"):
            raise ValueError(f"monotone = {monotone}: must be a finite number of at least 0")
        self.n_layers, self.monotone = n_layers, monotone
        self._start = STARTS[depth](start, np.arange(1, n_layers + 1, dtype=np.float64), n_layers)

    def alpha(self, step: int) -> np.ndarray:
        return self._start.copy()

    def initial_logits(self) -> np.ndarray:
        return np.log(self._start) - np.log1p(-self._start)

    def penalty(self, alpha: torch.Tensor) -> torch.Tensor:
        """monotone * sum over l of max(alpha_{l+1} - alpha_l, 0)^2: what a deeper layer is ahead of a shallower one."""
        return self.monotone * torch.relu(alpha[1:] - alpha[:-1]).square().sum()


class AlphaLogits(nn.Module):
    """The logits as a parameter of the model, fp32 whatever the model is cast to.

    Args:
        schedule: how logits become alpha.
        initial: the logits before any training, shape [L].
        device: where they are.
        mesh: mesh over which they are replicated, as a DTensor; None makes them a plain tensor.
    """

    def __init__(
        self, schedule: ResidualSchedule, initial: np.ndarray, device: torch.device, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.schedule, self.initial = schedule, initial
        self.logits = nn.Parameter(replicated(torch.empty(len(initial), device=device), mesh))
        if device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Put in what the schedule starts from; for a model that was made without storage."""
        self.fill(self.local)

    def fill(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """The same for a tensor of shape [L], in place. Nothing is drawn."""
        tensor.copy_(torch.from_numpy(self.initial))

    @property
    def local(self) -> torch.Tensor:
        """The logits as a plain tensor, shape [L], sharing the parameter's storage."""
        return local(self.logits)

    def set_gradient(self, alpha_gradient: torch.Tensor) -> None:
        """Give the logits their gradient, the penalty's included.

        Args:
            alpha_gradient: of the loss with respect to alpha, shape [L], summed over all ranks.
        """
        with torch.enable_grad():
            logits = self.local.clone().requires_grad_()
            alpha = self.schedule.alpha_of(logits)
            # Linear in alpha, so that its gradient is the loss's own, by the chain rule.
            surrogate = (alpha * alpha_gradient.to(alpha)).sum() + self.schedule.penalty(alpha)
            (gradient,) = torch.autograd.grad(surrogate, logits)
        self.logits.grad = replicated(gradient, getattr(self.logits, "device_mesh", None))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AlphaLogits:
        def keeping_fp32(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keeping_fp32, recurse)

    def forward(self, x: torch.Tensor) -> Any:
        """The input: it may hang in an nn.Sequential, which calls all of its children."""
        return x

    def extra_repr(self) -> str:
        return f"n_layers={len(self.initial)}"
