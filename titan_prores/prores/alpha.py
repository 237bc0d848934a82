"""The owner of alpha: one fp32 vector a model, which every ScaledResidualAdd sees one element of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from titan_prores.prores.residual import ScaledResidualAdd

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _rebuild(adds: Sequence[Sequence[ScaledResidualAdd]], device: torch.device, values: np.ndarray) -> AlphaVector:
    alpha = AlphaVector(adds, device)
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
    """

    def __init__(
        self, adds: Sequence[Sequence[ScaledResidualAdd]], device: torch.device, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        # A tuple is no ModuleList: the adds stay children of their blocks alone.
        self.adds = tuple(tuple(layer) for layer in adds)
        self.mesh = mesh
        self.values = np.ones(len(adds), dtype=np.float32)
        self._place(device)

    def _place(self, device: torch.device) -> None:
        """Put the current values into new storage on `device` and let every add look at it."""
        self._local = torch.from_numpy(self.values.copy()).to(device)
        for alpha, layer in zip(self._local.unbind(), self.adds, strict=True):
            for add in layer:
                add.alpha = alpha

    @property
    def tensor(self) -> torch.Tensor:
        """alpha as a tensor of shape [L], fp32: a DTensor replicated over the mesh where there is one."""
        if self.mesh is None:
            return self._local
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(self._local, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    @torch.no_grad()
    def set(self, values: np.ndarray) -> None:
        """Move alpha of all layers in place, by one copy. `values`: shape [L], rounded to fp32."""
        if values.shape != self.values.shape:
            raise ValueError(f"{values.shape[0]} values of alpha for {self.values.shape[0]} layers")
        self.values = values.astype(np.float32)
        self._local.copy_(torch.from_numpy(self.values))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AlphaVector:
        # nn.Module moves and casts through here. Only the device counts, and storage that `to_empty` leaves
        # unset is filled again.
        self._place(fn(torch.empty(0, device=self._local.device)).device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AlphaVector:
        # Views copied one by one would no longer share the vector's storage; the mesh must not be copied at all.
        clone = AlphaVector(copy.deepcopy(self.adds, memo), self._local.device, self.mesh)
        memo[id(self)] = clone
        clone.set(self.values)
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled for the same reason in one piece, and without the mesh, which means nothing to another process.
        return _rebuild, (self.adds, self._local.device, self.values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input: it may hang in an nn.Sequential, which calls all of its children."""
        return x

    def extra_repr(self) -> str:
        return f"n_layers={len(self.adds)}"
