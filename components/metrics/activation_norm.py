"""Activation norm of every layer on held-out text."""

from __future__ import annotations

from typing import Any

from titan_prores import register
from titan_prores.components.metrics._probe import Probe, ProbeSection


@register("metrics", "activation_norm")
class ActivationNorm(Probe):
    """Adds `activation_norm`, the mean over tokens of the L2 norm of a layer's output, and `activation_rms` to a row.

    `activation_rms` is the root mean square over tokens and dimensions. Both are lists, shallowest layer first.
    """

    class Config(ProbeSection):
        pass

    def look(self, step: int) -> dict[str, Any]:
        import torch

        reader = self.reader
        # Of each layer: sum of norms, sum of squares, tokens, elements.
        sums = torch.zeros(4, len(reader.model.layers), dtype=torch.float64, device=reader.mesh.device)

        def layer(number: int, x_BSD: torch.Tensor, y_BSD: torch.Tensor) -> None:
            norm_BS = torch.linalg.vector_norm(y_BSD, dim=-1).double()
            sums[0, number] += norm_BS.sum()
            sums[1, number] += norm_BS.square().sum()
            sums[2, number] += norm_BS.numel()
            sums[3, number] += y_BSD.numel()

        reader.forward(self.tokens_BS, layer=layer)
        norms, squares, tokens, elements = reader.sum(sums)
        return {"activation_norm": (norms / tokens).tolist(), "activation_rms": (squares / elements).sqrt().tolist()}
