"""AdamW (arXiv 1711.05101) as torch has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from titan_prores import NO_DECAY, ParameterGroup, Section, register, setting, split_parameters


@register("optimizer", "adamw")
class AdamW:
    """torch.optim.AdamW; by default no weight decay on norms and embeddings."""

    class Config(Section):
        lr: float = setting(1e-3, "peak learning rate", gt=0)
        beta1: float = setting(0.9, "decay rate of the mean of gradients", ge=0, lt=1, on_resume="same")
        beta2: float = setting(0.95, "decay rate of the mean of squared gradients", ge=0, lt=1, on_resume="same")
        eps: float = setting(1e-8, "term added to the denominator for numerical stability", gt=0, on_resume="same")
        weight_decay: float = setting(
            0.1, "decoupled weight decay, multiplied by the learning rate", ge=0, on_resume="same"
        )
        groups: tuple[ParameterGroup, ...] | None = setting(
            None,
            "ordered parameter groups; a parameter belongs to the first whose pattern matches its name; "
            f"default: no weight decay on {', '.join(NO_DECAY)}",
            on_resume="same",
        )
        implementation: Literal["for-loop", "foreach", "fused"] = setting(
            "fused", "implementation of torch.optim.AdamW"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        c = self.config
        return torch.optim.AdamW(
            split_parameters(named_parameters, c.groups, c.lr, c.weight_decay),
            lr=c.lr,
            betas=(c.beta1, c.beta2),
            eps=c.eps,
            foreach=c.implementation == "foreach",
            fused=c.implementation == "fused",
        )
