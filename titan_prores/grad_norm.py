"""The L2 norm of gradients, in fp32 whatever they are in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all elements of all tensors, parts on other ranks included; fp32 scalar. Collective for DTensors."""
    # Tensors of different meshes cannot be taken together: their norms are, once each is whole.
    by_mesh = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [_norm(group) for group in by_mesh.values()]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
