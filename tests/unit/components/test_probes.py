"""The forward pass of probes: it leaves no trace, and what is kept for later is only taken for what it is."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.model.transformed import N_LAYERS, SEQ_LEN, Transformed, transform
from titan_prores.components.metrics.activation_norm import ActivationNorm
from titan_prores.components.metrics.branch_ratio import BranchRatio
from titan_prores.components.metrics.residual_cosine import FILE, ResidualCosine
from titan_prores.components.transform.compile import graphs
from titan_prores.config.engine_sections import Training
from titan_prores.config.errors import ConfigError
from titan_prores.model.held_out_reader import HeldOutReader
from titan_prores.model.transforms import Transforms
from titan_prores.output.run_folder import RunFolder
from titan_prores.prores import ResidualAdd

MESH = SimpleNamespace(
    device=torch.device("cpu"), degrees={"tp": 1}, sum_over=lambda axis, tensor: tensor, gather=lambda value: [value]
)


class Stream:
    """Held-out tokens 0, 1, 2, ... below 60."""

    name, eot_id = "validation", 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count) % 60


def held_out_reader(made: Transformed, length: int = 5 * SEQ_LEN + 1) -> HeldOutReader:
    return HeldOutReader(
        made.model, made.transforms, MESH, Stream(length), Training(seq_len=SEQ_LEN, local_batch_size=2)
    )


def prepared(component, made: Transformed, run=None, start_step: int = 0, **settings):
    probe = component(component.Config(every_steps=2, **settings))
    info = {"total_steps": 20, "end_step": 9, "start_step": start_step}
    probe.prepare(run, info, held_out_reader(made))
    return probe


def test_windows_are_spread_over_the_text() -> None:
    held = held_out_reader(Transformed())
    assert held.tokens(2)[:, 0].tolist() == [0, 2 * SEQ_LEN]
    assert len(held.tokens(99)) == 5, "all there are"
    with pytest.raises(ConfigError, match="validation split has 3 tokens"):
        held_out_reader(Transformed(), 3).tokens(1)


def test_due_every_so_many_steps_and_at_the_end() -> None:
    made = Transformed()
    probe = prepared(ActivationNorm, made)
    due = [step for step in range(1, 10) if probe.measure(step, made.model)]
    assert due == [2, 4, 6, 8, 9]


def test_no_graph_is_added_and_nothing_changes() -> None:
    torch._dynamo.reset()
    made, plain = Transformed(transform("compile", backend="eager")), Transformed()
    held = held_out_reader(made)
    made.gradients(2)
    before, random_state = graphs(), torch.get_rng_state()
    gradients = {name: p.grad.clone() for name, p in made.model.named_parameters()}
    seen, expected = [], []
    for each, found in ((made, seen), (plain, expected)):
        each.gradients(2)
        held_out_reader(each).forward(
            held.tokens(3), layer=lambda number, x, y, found=found: found.append((number, x, y))
        )
    assert [number for number, _, _ in seen] == [0, 1, 2, 3] * 2, "three sequences are two parts of at most two"
    for (_, x, y), (_, x_plain, y_plain) in zip(seen, expected, strict=True):
        assert torch.equal(x, x_plain) and torch.equal(y, y_plain)
    assert graphs() == before and torch.equal(torch.get_rng_state(), random_state)
    assert made.model.training and all(p.grad is not None for p in made.model.parameters())
    assert all(not m._forward_hooks for layer in made.model.layers for m in layer.modules() if m is not layer)
    again = made.gradients(2)[1]
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    assert graphs() == before, "the compiled layers are still valid"


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.add = nn.Linear(4, 4), nn.Dropout(0.5), ResidualAdd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, self.drop(self.first(x)))


def test_dropout_draws_nothing_and_a_failure_leaves_no_hook() -> None:
    model = nn.Module()
    model.layers, model.embedding = nn.ModuleList([Dropped()]), nn.Embedding(60, 4)
    model.forward = lambda tokens: model.layers[0](model.embedding(tokens))
    held = HeldOutReader(model, Transforms(()), MESH, Stream(40), Training(seq_len=4, local_batch_size=2))
    state, found = torch.get_rng_state(), []
    held.forward(held.tokens(1), add=lambda number, name, x, branch: found.append((name, branch)))
    with torch.no_grad():
        assert torch.equal(found[0][1], model.layers[0].first(model.embedding(held.tokens(1))))
    assert found[0][0] == "add" and torch.equal(torch.get_rng_state(), state) and model.layers[0].drop.training

    def fail(*_: object) -> None:
        raise RuntimeError("observer")

    with pytest.raises(RuntimeError, match="observer"):
        held.forward(held.tokens(1), layer=fail)
    assert not model.layers[0]._forward_hooks and model.layers[0].drop.training


def test_branches_that_are_off_have_ratio_0_and_no_direction() -> None:
    made = Transformed()
    made.gradients(0)
    assert prepared(BranchRatio, made).look(2) == {
        "branch_ratio_attention": [0.0] * N_LAYERS,
        "branch_ratio_ffn": [0.0] * N_LAYERS,
    }
    held = held_out_reader(made)
    tokens_BS = held.tokens(2)
    off = held.residual_directions(tokens_BS)
    assert off.shape == (N_LAYERS, 2, SEQ_LEN, 32) and off.dtype == torch.float16 and not off.any()
    made.gradients(5)
    assert all(math.isnan(value) for value in held.residual_cosines(tokens_BS, off))
    assert held.residual_cosines(tokens_BS, held.residual_directions(tokens_BS)) == pytest.approx(
        [1.0] * N_LAYERS, abs=1e-5
    )


def test_reference_of_an_earlier_part_of_the_run(tmp_path) -> None:
    run = RunFolder(tmp_path, is_main=True)
    made = Transformed()
    made.gradients(5)
    first = prepared(ResidualCosine, made, run, reference_ratio=0.15)
    assert first.look(2) == {} and first.reference is None, "step 3 is the earliest"
    assert first.look(4) == {} and first.reference[0] == 4
    found = first.look(6)
    assert found["residual_cosine_step"] == 4 and found["residual_cosine"] == pytest.approx([1.0] * N_LAYERS, abs=1e-5)
    assert prepared(ResidualCosine, made, run, start_step=4).look(6) == found
    assert prepared(ResidualCosine, made, run, start_step=3).reference is None, "that step is to come again"
    assert prepared(ResidualCosine, made, run, start_step=4, sequences=2).reference is None, "it is of other text"
    content = (tmp_path / FILE).read_bytes()
    for damaged in (content[:100], b"", content[:-200], content.replace(b"step", b"pest")):
        (tmp_path / FILE).write_bytes(damaged)
        assert prepared(ResidualCosine, made, run, start_step=4).reference is None
