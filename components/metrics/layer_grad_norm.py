"""Gradient norm of every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan_prores import Metric, Section, register, setting

if TYPE_CHECKING:
    from torch import nn


@register("metrics", "layer_grad_norm")
class LayerGradNorm(Metric):
    """Adds `layer_grad_norm` to a row: the L2 norm of each layer's gradients before clipping, shallowest first."""

    class Config(Section):
        every_steps: int = setting(
            10, "measure every N steps; each measurement costs one reduction per layer", unit="optimizer steps", gt=0
        )

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        import torch

        from titan_prores import total_norm

        if step % self.config.every_steps:
            return {}
        # Stacked on the device, so that the host waits once and not once a layer.
        device = next(model.parameters()).device  # where the norm of a layer without gradients belongs too
        norms = torch.stack(
            [total_norm(p.grad for p in layer.parameters() if p.grad is not None).to(device) for layer in model.layers]
        )
        return {"layer_grad_norm": norms.tolist()}
