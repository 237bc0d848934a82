"""Gradient norm of every layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from titan_prores.config import Section, setting
from titan_prores.protocols import Metric
from titan_prores.registry import register

if TYPE_CHECKING:
    import torch
    from torch import nn


@register("metrics", "layer_grad_norm")
class LayerGradNorm(Metric):
    """Adds `layer_grad_norm` to a row: the L2 norm of each layer's gradients, after clipping, shallowest first."""

    class Config(Section):
        every_steps: int = setting(
            10, "measure every so many steps; each time costs a reduction a layer", unit="optimizer steps", gt=0
        )

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        import torch

        if step % self.config.every_steps:
            return {}
        # Stacked on the device, so that the host waits once and not once a layer.
        norms = torch.stack([grad_norm(layer.parameters()) for layer in model.layers])
        return {"layer_grad_norm": norms.tolist()}


def grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm of the whole gradients of `parameters`, a 0-dim fp32 tensor; collective where they are sharded."""
    import torch
    from torch.distributed.tensor import DTensor

    # Tensors of different meshes cannot be taken together: their norms are, once each is whole.
    by_mesh = defaultdict(list)
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            by_mesh[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    norms = []
    for grads in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(grads)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).float())
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
