"""The L2 norm of gradients, in fp32 whatever they are in, and clipping by it."""

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


def clip(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, apart: Iterable[torch.nn.Parameter] = ()
) -> torch.Tensor:
    """Scale gradients in place so that their L2 norm is at most max_norm; 0 = leave them as they are. Collective.

    Gradients that are not finite are left as they are: scaled by their norm, one of them would make all of them so.

    Args:
        parameters: of the model.
        max_norm: of their gradients together.
        apart: those among them that are neither counted nor scaled.

    Returns:
        The norm before that, over all ranks, fp32 scalar; not finite either where a gradient of those apart is not.
    """
    apart = [parameter for parameter in apart if parameter.grad is not None]
    left_out = {id(parameter) for parameter in apart}
    parameters = [each for each in parameters if each.grad is not None and id(each) not in left_out]
    norm = total_norm(parameter.grad for parameter in parameters)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.nan_to_num(nan=0.0, posinf=0.0))
    return norm + 0.0 * total_norm(parameter.grad for parameter in apart).to(norm.device) if apart else norm


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
