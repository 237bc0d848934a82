"""How weights are drawn, as data.

Patterns are shell-style and matched against parameter names; a block's weights are `layers.<i>.attention.w*` and
`layers.<i>.feed_forward.w*`. Weights of norms are 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from titan_prores.init import InitRule, fan_in_normal, normal, ones, trunc_normal, xavier_normal


@dataclass(frozen=True)
class Shape:
    """What of a model an init may depend on, besides the shape of the matrix itself."""

    dim: int
    n_layers: int
    vocab_size: int
    seq_len: int


@dataclass(frozen=True)
class WeightInit:
    """One init.

    Attributes:
        summary: shown by `--help`.
        matrices: (shape, std) -> rules of all that is no norm, most particular first.
        min_layers: the least L that it is defined for.
    """

    summary: str
    matrices: Callable[[Shape, float], list[InitRule]]
    min_layers: int = 1

    def rules(self, shape: Shape, std: float) -> list[InitRule]:
        return [InitRule("*norm.weight", ones), *self.matrices(shape, std)]


OUTPUT_PROJECTIONS = ("attention.wo", "feed_forward.w2")


def _scaled(shape: Shape, std: float) -> list[InitRule]:
    out = trunc_normal(std / math.sqrt(2 * shape.n_layers))
    rules = [InitRule(f"layers.*.{name}.weight", out) for name in OUTPUT_PROJECTIONS]
    return [*rules, InitRule("*.weight", trunc_normal(std))]


def _ds(shape: Shape, std: float) -> list[InitRule]:
    rules = [
        InitRule(f"layers.{layer - 1}.{name}.weight", trunc_normal(std / math.sqrt(2 * layer)))
        for layer in range(1, shape.n_layers + 1)
        for name in OUTPUT_PROJECTIONS
    ]
    return [*rules, InitRule("*.weight", trunc_normal(std))]


def _ds_all(shape: Shape, std: float) -> list[InitRule]:
    rules = [
        InitRule(f"layers.{layer - 1}.*.weight", trunc_normal(std / math.sqrt(layer)))
        for layer in range(1, shape.n_layers + 1)
    ]
    return [*rules, InitRule("*.weight", trunc_normal(std))]


def _deepnorm(shape: Shape, std: float) -> list[InitRule]:
    small = xavier_normal((8 * shape.n_layers) ** -0.25)
    return [
        *(InitRule(f"layers.*.attention.{name}.weight", xavier_normal()) for name in ("wq", "wk")),
        InitRule("layers.*.weight", small),
        InitRule("*.weight", trunc_normal(std)),
    ]


# Moments of silu(z) for z ~ N(0, 1): mean square, then the squared coefficients of its expansion in Hermite polynomials
# of degree 0 and 1.
SILU_SQUARE = 0.3557


def attention_gains(shape: Shape) -> Iterator[float]:
    """What the attention output of each layer is multiplied with for unit variance, shallowest first."""
    lam2, beta2 = 1 - 2 / shape.n_layers, 2 / shape.n_layers
    correlation = math.pi**2 / (6 * math.log(shape.vocab_size) ** 2)
    for _ in range(shape.n_layers):
        spread = math.exp(1 - correlation)
        own = sum(spread / (n - 1 + spread) for n in range(1, shape.seq_len + 1)) / shape.seq_len
        variance = correlation + (1 - correlation) * own
        yield variance**-0.5
        correlation = lam2 * correlation + beta2 * (correlation + (1 - correlation) * 2 / shape.seq_len) / variance
        mixed = correlation * (0.12 + 0.703 * correlation + 0.177 * correlation**2)
        correlation = lam2 * correlation + beta2 * mixed


def _deepscale(shape: Shape, std: float) -> list[InitRule]:
    return [
        *(
            InitRule(f"layers.{index}.attention.wo.weight", fan_in_normal(gain))
            for index, gain in enumerate(attention_gains(shape))
        ),
        InitRule("layers.*.feed_forward.w2.weight", fan_in_normal(SILU_SQUARE**-0.5)),
        InitRule("tok_embeddings.weight", normal(1.0)),
        InitRule("*.weight", fan_in_normal()),
    ]


WEIGHT_INITS: dict[str, WeightInit] = {
    "trunc_normal": WeightInit(
        "the ProRes paper: every weight from one normal of std, cut at 3 standard deviations",
        lambda shape, std: [InitRule("*.weight", trunc_normal(std))],
    ),
    "normal": WeightInit(
        "its reference code: plain normals of std, the embedding's of std * sqrt(dim)",
        lambda shape, std: [
            InitRule("tok_embeddings.weight", normal(std * shape.dim**0.5)),
            InitRule("*.weight", normal(std)),
        ],
    ),
    "scaled": WeightInit("Scaled Init: trunc_normal, wo and w2 with std / sqrt(2L)", _scaled),
    # arXiv 1908.11365, as open_lm has it and the ProRes paper uses it
    "ds": WeightInit("DS-Init: trunc_normal, wo and w2 of layer l with std / sqrt(2l)", _ds),
    "ds-all": WeightInit(
        "DS-Init as first published: trunc_normal, every weight of layer l with std / sqrt(l)", _ds_all
    ),
    # arXiv 2203.00555
    "deepnorm": WeightInit(
        "DeepNorm: Xavier normals of gain (8L)^(-1/4), wq and wk of gain 1; embedding and output trunc_normal",
        _deepnorm,
    ),
    # arXiv 2403.09635
    "deepscale": WeightInit(
        "DeepScaleLM: normals that give the embedding and the output of every branch unit variance", _deepscale, 3
    ),
}
