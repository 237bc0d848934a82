"""How weights are drawn, as data: name -> (dim, n_layers, std) -> init rules, most particular first.

Patterns are shell-style and matched against parameter names; a block's weights are `layers.<i>.attention.w*` and
`layers.<i>.feed_forward.w*`.
"""

from __future__ import annotations

from collections.abc import Callable

from titan_prores.init import InitRule, normal, ones, trunc_normal

WeightInit = Callable[[int, int, float], list[InitRule]]

_NORMS = InitRule("*norm.weight", ones)

WEIGHT_INITS: dict[str, WeightInit] = {
    # The ProRes paper: every weight from one truncated normal, cut at 3 standard deviations.
    "trunc_normal": lambda dim, n_layers, std: [_NORMS, InitRule("*.weight", trunc_normal(std))],
    # Its reference code: plain normals, the embedding's wider by sqrt(dim).
    "normal": lambda dim, n_layers, std: [
        _NORMS,
        InitRule("tok_embeddings.weight", normal(std * dim**0.5)),
        InitRule("*.weight", normal(std)),
    ],
}
