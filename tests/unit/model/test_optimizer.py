"""AdamW, its parameter groups and the loss, against formulas worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titan_prores.config import registry
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import Resolver
from titan_prores.config.sections import Section
from titan_prores.config.sources import Tree


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(4, 3)
        self.w = nn.Linear(3, 3)
        self.norm = nn.RMSNorm(3)


def build(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    resolver = Resolver(Tree())
    spec = resolver.component("optimizer", {"name": "adamw", **settings}, ("optimizer",))
    assert not resolver.errors, resolver.errors
    return spec.build().build(model.named_parameters())


def groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[list[str], float, float]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        (sorted(names[id(p)] for p in group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]


def test_default_groups_decay_matrices_alone() -> None:
    model = Net()
    assert groups(build(model, lr=0.5, weight_decay=0.2), model) == [
        (["norm.weight", "tok_embeddings.weight", "w.bias"], 0.5, 0.0),
        (["w.weight"], 0.5, 0.2),
    ]


def test_groups_are_ordered_and_scale_the_learning_rate() -> None:
    model = Net()
    chosen = [{"patterns": ["tok_*"], "lr_scale": 10.0}, {"patterns": ["*.weight"], "weight_decay": 0.3}]
    assert groups(build(model, lr=0.1, weight_decay=0.0, groups=chosen), model) == [
        (["tok_embeddings.weight"], 1.0, 0.0),
        (["norm.weight", "w.weight"], 0.1, 0.3),
        (["w.bias"], 0.1, 0.0),
    ]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Net(), groups=[{"patterns": ["*.weight", "*.wieght"]}])
    assert caught.value.key == "groups[0].patterns" and caught.value.value == "*.wieght"


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_one_step_of_adamw_by_hand(implementation: str) -> None:
    """First step: m = (1-b1) g, v = (1-b2) g^2, both bias-corrected, so w <- w (1 - lr wd) - lr g / (|g| + eps)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = build(model, lr=0.1, weight_decay=0.5, eps=0.25, implementation=implementation)
    model.weight.grad = torch.tensor([[4.0]])
    optimizer.step()
    assert model.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1 * 4 / (4 + 0.25), rel=1e-6)


def test_loss_is_the_fp32_sum_over_valid_labels() -> None:
    loss = registry.lookup("loss", "cross_entropy")(Section())
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 0, 6], [-100, -100, 3, 3, 4]])
    by_hand = -sum(
        torch.log_softmax(logits[b, s].double(), -1)[labels[b, s]]
        for b in range(2)
        for s in range(5)
        if labels[b, s] != -100
    )
    assert loss(logits, labels).item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert loss(logits.bfloat16(), labels).dtype == torch.float32
    assert loss(logits, torch.full((2, 5), -100)).item() == 0.0
    assert loss(logits, labels).item() == pytest.approx(
        F.cross_entropy(logits.transpose(1, 2), labels).item() * 7, rel=1e-5
    )
