"""The owner of alpha: one fp32 vector a model, which every ScaledResidualAdd sees one element of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from titan_prores.prores.placement import replicated
from titan_prores.prores.residual import ScaledResidualAdd

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _rebuild(
    adds: Sequence[Sequence[ScaledResidualAdd]], device: torch.device, values: np.ndarray, trained: bool
) -> AlphaVector:
    alpha = AlphaVector(adds, device, trained=trained)
    alpha.set(values)
    return alpha


class AlphaVector(nn.Module):
    """Holds alpha(1..L) and hands each add a 0-dim view, so that one copy a step moves every layer.

    It hangs in the model only to follow `.to(device)`, `to_empty` and deepcopy; it has no parameter, no buffer and no
    state-dict key. Whatever dtype the model is cast to, alpha stays fp32.

    Args:
        adds: per layer, the adds that share its alpha.
        device: where the vector starts.
        mesh: mesh over which `tensor` is replicated; None makes it a plain tensor.
        trained: whether backward passes leave a gradient at every layer's alpha, for `take_gradient`.
    """

    def __init__(
        self,
        adds: Sequence[Sequence[ScaledResidualAdd]],
        device: torch.device,
        mesh: DeviceMesh | None = None,
        *,
        trained: bool = False,
    ) -> None:
        super().__init__()
        # A tuple is no ModuleList: the adds stay children of their blocks alone.
        self.adds = tuple(tuple(layer) for layer in adds)
        self.mesh, self.trained = mesh, trained
        self._values: np.ndarray | None = np.ones(len(adds), dtype=np.float32)
        self._place(device)

    def _place(self, device: torch.device) -> None:
        """Put the current values into new storage on `device` and let every add look at it."""
        self._local = torch.from_numpy(self.values.copy()).to(device)
        views = self._local.unbind()
        # Leaves, so that a layer's gradient comes to rest here over all of an update's backward passes: the graph of
        # what alpha is computed from would not outlive the first of them.
        self._views = tuple(alpha.detach().requires_grad_() if self.trained else alpha for alpha in views)
        for alpha, layer in zip(self._views, self.adds, strict=True):
            for add in layer:
                add.alpha = alpha

    @property
    def values(self) -> np.ndarray:
        """alpha as numpy has it, shape [L], fp32. Waits for the device where `set` was given a tensor."""
        if self._values is None:
            self._values = self._local.cpu().numpy().copy()
        return self._values

    @property
    def tensor(self) -> torch.Tensor:
        """alpha as a tensor of shape [L], fp32: a DTensor replicated over the mesh where there is one."""
        return replicated(self._local, self.mesh)

    @torch.no_grad()
    def set(self, values: np.ndarray | torch.Tensor) -> None:
        """Move alpha of all layers in place, by one copy. `values`: shape [L], rounded to fp32."""
        if values.shape != self._local.shape:
            raise ValueError(f"{values.shape[0]} values of alpha for {self._local.shape[0]} layers")
        if isinstance(values, torch.Tensor):
            self._values = None
            self._local.copy_(values)
        else:
            self._values = values.astype(np.float32)
            self._local.copy_(torch.from_numpy(self._values))

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has left one since `take_gradient`."""
        return any(alpha.grad is not None for alpha in self._views)

    @torch.no_grad()
    def take_gradient(self) -> torch.Tensor:
        """What backward passes have left, shape [L], fp32, 0 for a layer that none came to; forgotten here.

        Collective over the mesh, where there is one: a rank has seen its own samples and, under tensor parallelism, its
        own part of the sequence, so the parts are summed over all of them.
        """
        parts = [torch.zeros_like(alpha) if alpha.grad is None else alpha.grad for alpha in self._views]
        for alpha in self._views:
            alpha.grad = None
        return self.sum_over_mesh(torch.stack(parts))

    def sum_over_mesh(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `part`, the same bits on all of them. Collective; without a mesh, `part` itself."""
        if self.mesh is None:
            return part
        from torch.distributed.tensor import DTensor, Partial

        parts = DTensor.from_local(part, self.mesh, [Partial()] * self.mesh.ndim, run_check=False)
        return parts.full_tensor()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AlphaVector:
        # nn.Module moves and casts through here. Only the device counts, and storage that `to_empty` leaves
        # unset is filled again.
        self._place(fn(torch.empty(0, device=self._local.device)).device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AlphaVector:
        # Views copied one by one would no longer share the vector's storage; the mesh must not be copied at all.
        clone = AlphaVector(copy.deepcopy(self.adds, memo), self._local.device, self.mesh, trained=self.trained)
        memo[id(self)] = clone
        clone.set(self.values)
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled for the same reason in one piece, and without the mesh, which means nothing to another process.
        return _rebuild, (self.adds, self._local.device, self.values, self.trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input: it may hang in an nn.Sequential, which calls all of its children."""
        return x

    def extra_repr(self) -> str:
        return f"n_layers={len(self.adds)}"
