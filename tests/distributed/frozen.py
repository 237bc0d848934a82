"""A Llama with frozen parameters of every kind: embedding, norms, linears, a whole layer."""

from __future__ import annotations

from typing import Any

from titan_prores.components.model.llama import Llama, LlamaConfig


class FrozenLlama(Llama):
    """Trains all but the embedding, the first layer and the norms of the second."""

    Config = LlamaConfig

    def __init__(self, config: LlamaConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self.tok_embeddings.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        for name, parameter in self.layers[1].named_parameters():
            parameter.requires_grad_("norm" not in name)
