"""ProRes in a plain PyTorch model: what it computes, that it moves, and that it says when it must not."""

from __future__ import annotations

import copy
import gc
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from titan_prores.prores import AlphaMovedError, AlphaVector, ProRes, ResidualAdd, ScaledResidualAdd, Schedule

L = 4
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


class Block(nn.Module):
    """Two branches, as a transformer block has."""

    def __init__(self, dim: int, *scales: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.first_add, self.second_add = ResidualAdd(*scales), ResidualAdd(*scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_add(x, torch.tanh(self.first(x)))
        return self.second_add(x, torch.tanh(self.second(x)))


class Model(nn.Module):
    def __init__(
        self, dim: int = 8, skip_scale: float = 1.0, branch_scale: float = 1.0, recompute: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(dim, skip_scale, branch_scale) for _ in range(L))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def prores(model: Model, T: float = 10) -> ProRes:
    return ProRes(model, Schedule("linear", L, T=T))


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("skip_scale", "branch_scale"), [(1.0, 1.0), (1.7, 1.0), (0.9, 0.3)])
def test_alpha_one_is_bitwise_the_plain_model(dtype: torch.dtype, skip_scale: float, branch_scale: float) -> None:
    plain = Model(skip_scale=skip_scale, branch_scale=branch_scale).to(dtype)
    scaled = copy.deepcopy(plain)
    prores(scaled).set_step(10 * L)
    x = inputs(dtype)
    assert torch.equal(scaled(x), plain(x)) and scaled(x).dtype == dtype
    for mine, theirs in zip(gradients(scaled, x), gradients(plain, x), strict=True):
        assert torch.equal(mine, theirs)


@BACKENDS
def test_alpha_one_is_bitwise_the_plain_model_compiled(backend: str) -> None:
    plain = Model()
    scaled = copy.deepcopy(plain)
    prores(scaled).set_step(10 * L)
    for model in (plain, scaled):
        for layer in model.layers:
            layer.compile(fullgraph=True, backend=backend)
    x = inputs()
    assert torch.equal(scaled(x), plain(x))
    for mine, theirs in zip(gradients(scaled, x), gradients(plain, x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_alpha_zero_is_the_identity(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    prores(model).set_step(0)
    assert torch.equal(model(inputs(dtype)), inputs(dtype))
    assert all(not gradient.any() for gradient in gradients(model, inputs(dtype)))


def test_any_alpha_against_the_formula_in_float64() -> None:
    """Output and gradients against a plain function; both branches of a layer share alpha(l, t)."""
    model = Model(skip_scale=1.3, branch_scale=0.7).double()
    scaling = prores(model)
    x = inputs(torch.float64)
    for step in (0, 3, 17, 100):
        scaling.set_step(step)
        weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
        y = x
        for number in range(L):
            # alpha is kept in fp32.
            alpha = float(np.float32(min(step / (10 * (number + 1)), 1.0)))
            w1, b1, w2, b2 = weights[4 * number : 4 * number + 4]
            y = 1.3 * y + alpha * 0.7 * torch.tanh(y @ w1.T + b1)
            y = 1.3 * y + alpha * 0.7 * torch.tanh(y @ w2.T + b2)
        torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
        expected = torch.autograd.grad(y.square().sum(), weights)
        torch.testing.assert_close(gradients(model, x), list(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 1), (3, 5, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_alpha_broadcasts(shape: tuple[int, ...], dtype: torch.dtype, rtol: float) -> None:
    """One alpha for all, per sequence or per token: sum and all three gradients against plain float64 arithmetic."""
    draw = torch.Generator().manual_seed(0)
    x, f, weight = (torch.randn(3, 5, 8, generator=draw).to(dtype) for _ in range(3))
    alpha = torch.rand(shape, generator=draw)  # fp32, as its owner keeps it
    add = ScaledResidualAdd(1.3, 0.7)
    ours = [t.clone().requires_grad_() for t in (x, f, alpha)]
    add.alpha = ours[2]
    y = add(*ours[:2])
    assert y.dtype == dtype and y.shape == x.shape
    theirs = [t.double().requires_grad_() for t in (x, f, alpha)]
    expected = 1.3 * theirs[0] + theirs[2] * (0.7 * theirs[1])
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=rtol)
    (y * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    assert ours[2].grad.dtype == torch.float32
    for mine, wanted in zip(ours, theirs, strict=True):
        close = max(rtol, 1e-6) if mine.dtype == torch.float32 else rtol
        scale = wanted.grad.abs().max().item()
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=close, atol=close * scale)


def test_each_sequence_has_its_own_alpha() -> None:
    x, f = torch.randn(2, 3, 5, 8).to(torch.bfloat16).unbind()
    add = ScaledResidualAdd()
    add.alpha = torch.tensor([0.0, 1.0, 0.5]).view(3, 1, 1)
    assert torch.equal(add(x, f), torch.stack([x[0], x[1] + f[1], x[2] + 0.5 * f[2]]))


def test_first_forward_is_at_step_zero_and_both_branches_share_alpha() -> None:
    model = Model()
    scaling = prores(model)
    scaling.set_step(0)
    assert scaling.values.tolist() == [0.0] * L
    scaling.set_step(5)
    for number, layer in enumerate(model.layers, 1):
        assert layer.first_add.alpha.item() == layer.second_add.alpha.item() == np.float32(5 / (10 * number))
        assert layer.first_add.alpha.shape == ()


def test_names_and_state_dict_stay() -> None:
    plain, model = Model(), Model()
    scaling = prores(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert scaling.n_adds == 2 * L
    assert isinstance(model.get_submodule("layers.2.second_add"), ScaledResidualAdd)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.half().float(),
        lambda m: m.to("meta").to_empty(device="cpu"),
        copy.deepcopy,
    ],
    ids=["bfloat16", "double", "half-float", "to_empty", "deepcopy"],
)
def test_alpha_moves_after_the_model_was_changed(change) -> None:
    """Otherwise the adds would silently keep the old alpha."""
    model = Model()
    prores(model).set_step(3)
    changed = change(model)
    dtype = next(changed.parameters()).dtype
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.copy_(torch.full_like(parameter, 0.1))
    owner: AlphaVector = changed.prores_alpha
    assert owner.tensor.dtype == torch.float32
    assert owner.tensor.tolist() == [np.float32(3 / (10 * n)) for n in range(1, L + 1)]
    x = inputs(dtype)
    before = changed(x)
    owner.set(np.zeros(L))
    assert torch.equal(changed(x), x) and not torch.equal(before, x)
    if changed is not model:
        assert not torch.equal(model(inputs()), inputs()), "the copy's alpha moved the original's"


def test_a_copy_goes_through_torch_save() -> None:
    model = Model()
    prores(model).set_step(3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Model()
    other.load_state_dict(torch.load(file, weights_only=True))
    prores(other).set_step(3)
    assert torch.equal(other(inputs()), model(inputs()))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_moving_between_forward_and_backward_is_an_error(recompute: bool) -> None:
    """With recomputed activations torch itself would say nothing and the gradient would be wrong."""
    model = Model(recompute=recompute)
    scaling = prores(model)
    scaling.set_step(5)
    loss = model(inputs().requires_grad_()).sum()
    with pytest.raises(AlphaMovedError, match="set_step\\(6\\)"):
        scaling.set_step(6)
    loss.backward()
    scaling.set_step(6)


def test_guard_lets_accumulation_evaluation_and_dropped_graphs_pass() -> None:
    model = Model()
    scaling = prores(model)
    for step in range(3):
        scaling.set_step(step)
        losses = [model(inputs()).sum() for _ in range(2)]
        losses[0].backward()
        with pytest.raises(AlphaMovedError):
            scaling.set_step(step)
        losses[1].backward()
        with torch.no_grad():
            model(inputs())
    scaling.set_step(3)
    dropped = model(inputs())
    del dropped
    gc.collect()
    scaling.set_step(4)


@BACKENDS
def test_warmup_adds_no_graph_to_compiled_blocks(backend: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, reference = Model(), Model()
    scaling, expected = prores(model, T=3), prores(reference, T=3)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    graphs = []
    for step in range(3 * L + 2):
        scaling.set_step(step)
        expected.set_step(step)
        x = inputs().requires_grad_()
        torch.testing.assert_close(gradients(model, x), gradients(reference, x))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] == 1


def test_saves_nothing_more_for_backward() -> None:
    """Distinct storages kept by autograd, alpha's own left out."""

    def saved(model: Model) -> int:
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t
        ):
            output = model(inputs())
            if hasattr(model, "prores_alpha"):
                kept.pop(model.prores_alpha.tensor.untyped_storage().data_ptr())
            total = sum(kept.values())
        output.sum().backward()
        return total

    plain, scaled = Model(), Model()
    prores(scaled).set_step(3)
    assert saved(scaled) == saved(plain) > 0


def test_what_cannot_be_rewritten_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(8), nn.Linear(8, 8)])

    with pytest.raises(ValueError, match="layer 2 of 2 has no ResidualAdd"):
        ProRes(Bare(), Schedule("linear", 2, T=1))
    model = Model()
    model.stray = ResidualAdd()
    with pytest.raises(ValueError, match="stray: a ResidualAdd outside the layers"):
        prores(model)
    with pytest.raises(ValueError, match="for 3 layers, the model has 4"):
        ProRes(Model(), Schedule("linear", 3, T=1))
    model = Model()
    prores(model)
    with pytest.raises(ValueError, match="scaled already"):
        prores(model)
    model = Model()
    model.layers[1].second_add = model.layers[1].first_add
    with pytest.raises(ValueError, match=r"used in two places"):
        prores(model)


def test_what_an_add_does_besides_is_never_lost() -> None:
    class Doubled(ResidualAdd):
        def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
            return residual + 2 * branch

    model = Model()
    model.layers[1].first_add = Doubled()
    with pytest.raises(ValueError, match=r"layers\.1\.first_add does more than a ResidualAdd"):
        prores(model)
    model = Model()
    model.layers[2].second_add.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers\.2\.second_add does more"):
        prores(model)


def test_guard_sees_outputs_of_any_shape_and_layers_called_alone() -> None:
    class Wrapped(Model):
        def forward(self, x: torch.Tensor) -> object:
            return type("Output", (), {"x": super().forward(x)})()

    model = Wrapped(recompute=True)
    scaling = prores(model)
    scaling.set_step(5)
    output = model(inputs()).x
    with pytest.raises(AlphaMovedError):
        scaling.set_step(6)
    output.sum().backward()
    x = inputs()
    for layer in model.layers:
        x = layer(x)
    with pytest.raises(AlphaMovedError):
        scaling.set_step(6)
    x.sum().backward()
    scaling.set_step(6)


def test_a_sequential_model_and_pickle() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(8) for _ in range(L)))
    scaling = ProRes(model, Schedule("linear", L, T=10), layers=list(model))
    scaling.set_step(0)
    assert torch.equal(model(inputs()), inputs())
    scaling.set_step(7)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert torch.equal(copied(inputs()), model(inputs()))
    copied.get_submodule("prores_alpha").set(np.zeros(L))
    assert torch.equal(copied(inputs()), inputs()) and not torch.equal(model(inputs()), inputs())


def test_a_schedule_without_a_number_is_refused() -> None:
    scaling = ProRes(Model(), lambda step: np.full(L, np.nan if step else 1.0))
    with pytest.raises(ValueError, match=r"nan.*at step 1"):
        scaling.set_step(1)
