"""A transform as a plug-in would have it: adapters beside frozen weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from titan_prores.config.sections import Section, setting
from titan_prores.model.weight_init import normal
from titan_prores.protocols.model import InitRule
from titan_prores.protocols.transform import Phase, Transform, TransformContext


class AdaptedLinear(nn.Linear):
    """A linear with a product of two small ones beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.lora_b(self.lora_a(x))


class LoRA(Transform):
    """Freezes the model; adapters are inside of linears split by columns and by rows (arXiv 2106.09685)."""

    class Config(Section):
        rank: int = setting(4, "rank of the adapters")

    phase = Phase.REWRITE

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        model.requires_grad_(False)
        for layer in model.layers:
            for linear in (layer.attention.wq, layer.attention.wo):
                linear.__class__ = AdaptedLinear
                device, dtype = linear.weight.device, linear.weight.dtype
                linear.lora_a = nn.Linear(linear.in_features, self.config.rank, bias=False, device=device, dtype=dtype)
                linear.lora_b = nn.Linear(self.config.rank, linear.out_features, bias=False, device=device, dtype=dtype)

    def init_rules(self) -> Sequence[InitRule]:
        return [InitRule("*.lora_a.weight", normal(0.2)), InitRule("*.lora_b.weight", normal(0.2))]

    def describe(self) -> str:
        return f"rank {self.config.rank}"
