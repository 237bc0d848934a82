"""Tensors that are the same on every rank of a mesh, as DTensors, and the part of a DTensor that a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def replicated(tensor: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """`tensor`, which every rank of the mesh has, as a DTensor; itself without a mesh."""
    if mesh is None:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, without its graph; shares its storage."""
    tensor = tensor.detach()
    # Not isinstance: importing DTensor takes most of a second, which a loop on one device need not wait for.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
