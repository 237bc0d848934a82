"""How weights are drawn, as data.

Patterns are shell-style and matched against parameter names; a block's weights are `layers.<i>.attention.w*` and
`layers.<i>.feed_forward.w*`. Weights of norms are 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from titan_prores import InitRule, fan_in_normal, normal, ones, trunc_normal, xavier_normal


@dataclass(frozen=True)
class ModelShape:
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
    matrices: Callable[[ModelShape, float], list[InitRule]]
    min_layers: int = 1

    def rules(self, shape: ModelShape, std: float) -> list[InitRule]:
        """Rules of every weight of the model, norms included."""
        return [InitRule("*norm.weight", ones), *self.matrices(shape, std)]


OUTPUT_PROJECTIONS = ("attention.wo", "feed_forward.w2")


def _scaled(shape: ModelShape, std: float) -> list[InitRule]:
    out = trunc_normal(std / math.sqrt(2 * shape.n_layers))
    rules = [InitRule(f"layers.*.{name}.weight", out) for name in OUTPUT_PROJECTIONS]
    return [*rules, InitRule("*.weight", trunc_normal(std))]


def _ds(shape: ModelShape, std: float) -> list[InitRule]:
    rules = [
        InitRule(f"layers.{layer - 1}.{name}.weight", trunc_normal(std / math.sqrt(2 * layer)))
        for layer in range(1, shape.n_layers + 1)
        for name in OUTPUT_PROJECTIONS
    ]
    return [*rules, InitRule("*.weight", trunc_normal(std))]


def _ds_all(shape: ModelShape, std: float) -> list[InitRule]:
    rules = [
        InitRule(f"layers.{layer - 1}.*.weight", trunc_normal(std / math.sqrt(layer)))
        for layer in range(1, shape.n_layers + 1)
    ]
    return [*rules, InitRule("*.weight", trunc_normal(std))]


def _deepnorm(shape: ModelShape, std: float) -> list[InitRule]:
    small = xavier_normal((8 * shape.n_layers) ** -0.25)
    return [
        *(InitRule(f"layers.*.attention.{name}.weight", xavier_normal()) for name in ("wq", "wk")),
        InitRule("layers.*.weight", small),
        InitRule("*.weight", trunc_normal(std)),
    ]


# deepscale, for wide layers, with E[x_i x_k] = r for the streams of two tokens and 1 for those of one:
#
# A norm gives every token a mean square of 1, and a matrix of std 1/sqrt(columns) keeps it: q, k, v, w1 x and w3 x have
# variance 1. So has a score q.k/sqrt(head_dim); of that, r is common to all keys of a query and cancels in the softmax.
#
# Feed-forward: E[(silu(g) u)^2] = E[silu(g)^2] for independent g and u ~ N(0, 1), so w2 gets the inverse root of that.
#
# Attention: position n gives sum_k p_k v_k, of variance P + r(1 - P) with P = E[sum_k p_k^2], which is about
# e^s / (n - 1 + e^s) for a softmax of n normal scores of variance s = 1 - r. wo gets the inverse root of the mean over
# positions. Two positions m < n share 1/n of their weights: their correlation is r + (1 - r)/n, over that same mean.
#
# r starts at the chance that two tokens are the same, pi^2 / (6 ln(V)^2) by Zipf's law for V of them, and each add
# makes it lambda^2 r + beta^2 r_branch. A feed-forward's is r E[silu(g) silu(g')] / E[silu(g)^2] for g, g' of
# correlation r: a power series whose coefficients are the shares of silu's Hermite components.
SILU_MEAN_SQUARE = 0.35578
SILU_SHARES = (0.120, 0.703, 0.177)  # constant, linear, quadratic and above


def _attention_gains(shape: ModelShape) -> Iterator[float]:
    """What wo of each layer is multiplied with for an attention output of unit variance, shallowest first."""
    n_keys = np.arange(1, shape.seq_len + 1)
    beta2 = 2 / shape.n_layers
    r = min(1.0, math.pi**2 / (6 * math.log(max(shape.vocab_size, 2)) ** 2))
    for _ in range(shape.n_layers):
        spread = math.exp(1 - r)
        mean_square_weight = float(np.mean(spread / (n_keys - 1 + spread)))
        variance = r + (1 - r) * mean_square_weight
        yield variance**-0.5
        shared = 2 / (shape.seq_len + 1)  # mean of 1/n over pairs of positions
        r = (1 - beta2) * r + beta2 * (r + (1 - r) * shared) / variance
        r = (1 - beta2) * r + beta2 * sum(share * r ** (power + 1) for power, share in enumerate(SILU_SHARES))


def _deepscale(shape: ModelShape, std: float) -> list[InitRule]:
    return [
        *(
            InitRule(f"layers.{index}.attention.wo.weight", fan_in_normal(gain))
            for index, gain in enumerate(_attention_gains(shape))
        ),
        InitRule("layers.*.feed_forward.w2.weight", fan_in_normal(SILU_MEAN_SQUARE**-0.5)),
        InitRule("tok_embeddings.weight", normal(1.0)),
        InitRule("*.weight", fan_in_normal()),
    ]


WEIGHT_INITS: dict[str, WeightInit] = {
    "trunc_normal": WeightInit(
        "the ProRes paper: every weight from a normal of std, truncated at 3 standard deviations",
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
        "DeepScaleLM: embedding and output of every branch have unit variance, whatever std; for untied embeddings",
        _deepscale,
        min_layers=3,
    ),
}
