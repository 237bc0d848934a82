"""Where a block puts its norms, as data.

A block computes, for attention and then for the feed-forward, with the alpha of ProRes as a (1 without it):

    out_norm(c * x + a * res_norm(f(s * in_norm(x))))

A scheme says which of the three norms exist and what c and s are, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The norms of one layer's two sub-blocks.

    Attributes:
        in_norm: norm before the branch (`attention_norm`, `ffn_norm`).
        res_norm: norm on the branch's output (`attention_post_norm`, `ffn_post_norm`).
        out_norm: norm after the add (`attention_out_norm`, `ffn_out_norm`).
        skip_scale: c, factor on the skip path.
        branch_scale: s, factor on the branch's input.
    """

    in_norm: bool = False
    res_norm: bool = False
    out_norm: bool = False
    skip_scale: float = 1.0
    branch_scale: float = 1.0


# Name -> (layer 1..L, L) -> placement. The final norm before the output projection is there in every scheme.
NORM_SCHEMES: dict[str, Callable[[int, int], Placement]] = {
    # Pre-LN: x + a * F(Norm(x))
    "pre": lambda layer, n_layers: Placement(in_norm=True),
    # Post-LN: Norm(x + a * F(x))
    "post": lambda layer, n_layers: Placement(out_norm=True),
    # Sandwich-LN: x + a * Norm(F(Norm(x)))
    "sandwich": lambda layer, n_layers: Placement(in_norm=True, res_norm=True),
}
