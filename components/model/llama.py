"""Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention (arXiv 2302.13971, 2307.09288)."""

from __future__ import annotations

from typing import ClassVar

from titan_prores import register, setting
from titan_prores.components.model.decoder import CUSTOM, Decoder, DecoderConfig

# name -> (dim, ffn_dim, n_heads, n_layers); the shapes of the ProRes paper and its reference code, and two for CPUs.
_SHAPES = {
    "debug": (64, 176, 4, 4),
    "14M": (256, 684, 4, 12),
    "71M": (512, 1368, 8, 12),
    **{f"71M-{n_layers}": (512, 1368, 8, n_layers) for n_layers in (24, 48, 72, 96, 120)},
    "130M": (768, 2048, 12, 12),
    "350M": (1024, 2736, 16, 24),
    "1.3B": (2048, 5632, 32, 24),
    "3B": (2560, 6848, 32, 32),
    "7B": (4096, 11008, 32, 32),
}
FLAVORS = {
    name: {"dim": dim, "ffn_dim": ffn_dim, "n_heads": n_heads, "n_layers": n_layers}
    for name, (dim, ffn_dim, n_heads, n_layers) in _SHAPES.items()
}


class LlamaConfig(DecoderConfig):
    """Shape of a Llama."""

    flavors: ClassVar = FLAVORS

    flavor: str = setting(
        "debug", f"named shape: {', '.join(FLAVORS)}; {CUSTOM} = every number is given", on_resume="free"
    )


@register("model", "llama")
class Llama(Decoder):
    """Llama decoder: rotary, RMSNorm, SwiGLU, grouped-query attention; norm placement and init by name."""

    Config = LlamaConfig
