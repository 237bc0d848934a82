"""A small Llama under transforms, without a process group; shared by the tests of single transforms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from titan_prores.components.loss.cross_entropy import CrossEntropy
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.config import sources
from titan_prores.config.resolve import Resolver
from titan_prores.model.transforms import Transforms
from titan_prores.model.weight_init import init_weights
from titan_prores.protocols.transform import Transform, TransformContext

N_LAYERS, VOCABULARY, SEQ_LEN = 4, 64, 16
T = 3  # updates until layer l is at 1: T * l
MESH = SimpleNamespace(
    degrees={"dp_replicate": 1, "dp_shard": 1, "tp": 1}, device_mesh=None, device=torch.device("cpu")
)


def transform(name: str, /, **settings: Any) -> Transform:
    resolver = Resolver(sources.Tree())
    spec = resolver.component("transform", {"name": name, **settings}, ("transforms", name))
    assert not resolver.errors, resolver.errors
    return spec.build()


class Transformed:
    """Model, loss and transforms as the engine puts them together; weights and tokens are the same each time."""

    def __init__(
        self, *transforms: Transform, norm: str = "pre", n_layers: int = N_LAYERS, model: nn.Module | None = None
    ) -> None:
        shape = LlamaConfig(dim=32, n_layers=n_layers, n_heads=2, n_kv_heads=1, ffn_dim=48, norm=norm)
        self.model = Llama(shape, vocab_size=VOCABULARY, seq_len=SEQ_LEN) if model is None else model
        prores = transform("prores", residual_schedule={"name": "linear", "T": T})
        named = [(type(t).__name__, t) for t in (*transforms, prores)]
        for _, each in named:
            each.prepare(self.model, {"tp": 1})
            each.check(self.model, {"tp": 1})
        self.transforms = Transforms(named)
        self.lines = self.transforms.apply(self.model, TransformContext(MESH))
        self.loss = self.transforms.wrap_loss(CrossEntropy(CrossEntropy.Config()))
        if model is None:
            init_weights(self.model, self.model.init_rules(), seed=0)
            self.model.fill_buffers()
        self.tokens = torch.randint(VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))

    def forward(self) -> torch.Tensor:
        return self.loss(self.model(self.tokens), self.tokens.roll(-1, 1))

    def gradients(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and gradients of the update after `step` completed ones, without an optimizer."""
        self.transforms.before_step(step)
        self.model.zero_grad()
        loss = self.forward()
        loss.backward()
        self.transforms.after_step(step + 1)
        return loss.detach(), {name: p.grad for name, p in self.model.named_parameters()}


def assert_same_bits(ours: Transformed, theirs: Transformed, step: int) -> None:
    """Loss and every gradient, which must not be zero where alpha is not."""
    (loss, gradients), (expected_loss, expected) = ours.gradients(step), theirs.gradients(step)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0 or step == 0, name
        assert torch.equal(gradients[name], gradient), name
