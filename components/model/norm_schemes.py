"""Where a block puts its norms and what it scales, as data.

A block computes, for attention and then for the feed-forward, with the alpha of ProRes as a (1 without it):

    out_norm(c * x + a * b * res_norm(f(s * in_norm(x))))

A scheme says which of the three norms exist and what c, b and s are, layer by layer. Every scheme has a final norm
before the output projection.
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
        in_norm_scale: s, constant factor on in_norm's output, which may differ by layer: one graph serves them all when
            compiled, as long as each has one. None = no factor.
        in_norm_start: what in_norm's weight starts at, where not at 1.
        skip_scale: c, constant factor on the skip path. Each of its values costs a graph, as each set of norms does.
        branch_scale: b, constant factor on the branch's output; likewise.
    """

    in_norm: bool = False
    res_norm: bool = False
    out_norm: bool = False
    in_norm_scale: float | None = None
    in_norm_start: float = 1.0
    skip_scale: float = 1.0
    branch_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.in_norm and (self.in_norm_scale, self.in_norm_start) != (None, 1.0):
            raise ValueError("in_norm_scale and in_norm_start need in_norm")


@dataclass(frozen=True)
class NormScheme:
    """One scheme.

    Attributes:
        summary: its equation, with `a` for ProRes, shown by `--help`.
        placement: (layer 1..L, L) -> norms and factors of that layer.
        embedding_norm: a norm on the embedding's output, too.
        init: the weight init that belongs to it; None = the default.
        min_layers: the least L that it is defined for.
    """

    summary: str
    placement: Callable[[int, int], Placement]
    embedding_norm: bool = False
    init: str | None = None
    min_layers: int = 1


NORM_SCHEMES: dict[str, NormScheme] = {
    "pre": NormScheme("Pre-LN: x + a * F(Norm(x))", lambda layer, n_layers: Placement(in_norm=True)),
    "post": NormScheme("Post-LN: Norm(x + a * F(x))", lambda layer, n_layers: Placement(out_norm=True)),
    "sandwich": NormScheme(
        "Sandwich-LN: x + a * Norm(F(Norm(x)))", lambda layer, n_layers: Placement(in_norm=True, res_norm=True)
    ),
    # arXiv 2502.02732
    "peri": NormScheme(
        "Peri-LN: x + a * Norm(F(Norm(x))), and a norm on the embedding's output",
        lambda layer, n_layers: Placement(in_norm=True, res_norm=True),
        embedding_norm=True,
    ),
    # arXiv 2502.05795
    "lns": NormScheme(
        "LayerNorm Scaling: x + a * F(Norm(x) / sqrt(l))",
        lambda layer, n_layers: Placement(in_norm=True, in_norm_scale=layer**-0.5),
    ),
    # What the ProRes paper's reference code does in its place.
    "lns-learnable": NormScheme(
        "LayerNorm Scaling as a start: x + a * F(Norm(x)), weights of these norms start at 1 / sqrt(l)",
        lambda layer, n_layers: Placement(in_norm=True, in_norm_start=layer**-0.5),
    ),
    # arXiv 2203.00555, the constants of a decoder alone
    "deepnorm": NormScheme(
        "DeepNorm: Norm(c * x + a * F(x)), c = (2L)^(1/4); its own init",
        lambda layer, n_layers: Placement(out_norm=True, skip_scale=(2 * n_layers) ** 0.25),
        init="deepnorm",
    ),
    # arXiv 2412.13795
    "mix": NormScheme(
        "Mix-LN: Post-LN in the first floor(L/4) layers, Pre-LN in the rest; compiled, two graphs",
        lambda layer, n_layers: Placement(out_norm=True) if layer <= n_layers // 4 else Placement(in_norm=True),
    ),
    # arXiv 2403.09635. At L = 2 nothing would be left of the skip path.
    "deepscale": NormScheme(
        "DeepScaleLM: lam * x + a * beta * F(Norm(x)), beta^2 = 2/L, lam^2 + beta^2 = 1, L > 2; its own init",
        lambda layer, n_layers: Placement(
            in_norm=True, skip_scale=(1 - 2 / n_layers) ** 0.5, branch_scale=(2 / n_layers) ** 0.5
        ),
        init="deepscale",
        min_layers=3,
    ),
}
