"""Allocating a meta model: ties stay, buffers that nobody fills are noticed; norms of gradients of any dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titan_prores.components.model.decoder import ScaledRMSNorm
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.model.grad_norm import total_norm
from titan_prores.model.weight_init import allocate, unfilled_buffers
from titan_prores.prores import ProRes, Schedule


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))


def test_allocate_keeps_ties_and_marks_buffers() -> None:
    with torch.device("meta"):
        model = Tied()
    names = [name for name, _ in model.named_parameters()]
    allocate(model, torch.device("cpu"))
    assert model.head.weight is model.embedding.weight and not model.head.weight.is_meta
    assert [name for name, _ in model.named_parameters()] == names
    assert unfilled_buffers(model) == ["table", "count"]
    model.table.zero_()
    assert unfilled_buffers(model) == ["count"]
    model.count.zero_()
    assert unfilled_buffers(model) == []


def test_allocate_can_keep_parameters_on_another_device() -> None:
    """As with CPU offload; here meta plays the device that computes."""
    shape = LlamaConfig(dim=32, n_layers=2, n_heads=2, ffn_dim=48)
    model = Llama(shape, vocab_size=32, seq_len=16)
    model.extra = ScaledRMSNorm(32, 1e-5, 0.5)  # has a weight and a buffer
    prores = ProRes(model, Schedule("linear", n_layers=2, T=1))
    allocate(model, torch.device("meta"), torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    buffers = dict(model.named_buffers())
    assert {"rotary.cos_SE", "extra.factor"} <= buffers.keys()
    assert {b.device.type for b in buffers.values()} == {"meta"}
    assert prores.alpha.tensor.device.type == model.layers[1].ffn_add.alpha.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_in_fp32_whatever_the_gradients_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator).to(dtype) for n in (1000, 3, 1)]
    expected = torch.cat([g.double() for g in gradients]).norm()
    norm = total_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert total_norm([]).item() == 0.0
