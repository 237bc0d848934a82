"""How large the residual branches of every layer are beside the stream that they are added to."""

from __future__ import annotations

import math
from typing import Any

from titan_prores import register
from titan_prores.components.metrics._probe import Probe, ProbeSection


@register("metrics", "branch_ratio")
class BranchRatio(Probe):
    """Adds the ratio of norms |alpha * F(x)| / |x| to a row, a list for each residual add of a layer.

    The key is the name of the add in its layer: `branch_ratio_attention` for `attention_add`, `branch_ratio_ffn` for
    `ffn_add`. Both norms are over the whole batch. x is the stream before a constant factor such as DeepNorm's. A layer
    without such an add has NaN.
    """

    class Config(ProbeSection):
        pass

    def look(self, step: int) -> dict[str, Any]:
        import torch

        reader = self.reader
        n_layers, device = len(reader.model.layers), reader.mesh.device
        squares: dict[str, torch.Tensor] = {}  # name -> [branch and stream, layer]

        def add(number: int, name: str, x_BSD: torch.Tensor, branch_BSD: torch.Tensor) -> None:
            if name not in squares:
                squares[name] = torch.full((2, n_layers), math.nan, dtype=torch.float64, device=device)
            found = torch.stack([branch_BSD.square().sum(dtype=torch.float64), x_BSD.square().sum(dtype=torch.float64)])
            squares[name][:, number] = found + squares[name][:, number].nan_to_num(nan=0.0)

        reader.forward(self.tokens_BS, add=add)
        summed = reader.sum(torch.stack(list(squares.values())))
        ratios = (summed[:, 0] / summed[:, 1]).sqrt().tolist()
        return {
            f"branch_ratio_{name.removesuffix('_add').replace('.', '_')}": found
            for name, found in zip(squares, ratios, strict=True)
        }
