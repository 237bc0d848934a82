"""learned and adaptive: values by hand, gradients by finite differences, what survives, what is refused."""

from __future__ import annotations

import copy
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate

from tests.unit.components.test_llama import build, tokens
from tests.unit.prores.test_prores import L, Model, inputs
from titan_prores.build import build_components, transform_model
from titan_prores.components.model.norm_schemes import NORM_SCHEMES
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.layout import plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve
from titan_prores.distributed import mesh as mesh_module
from titan_prores.dry_run.report import report
from titan_prores.model.grad_norm import clip
from titan_prores.prores import AdaptiveSchedule, GradientLeftError, LearnedSchedule, ProRes

KEY = "prores_schedule.logits"
DEBUG = Path(__file__).parents[3] / "train_configs" / "debug.toml"


def learned(model: nn.Module, **settings: Any) -> ProRes:
    return ProRes(model, LearnedSchedule(L, **settings))


def logits_of(model: nn.Module) -> nn.Parameter:
    return model.get_parameter(KEY)


# --- learned -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "expected"),
    [("constant", [0.4] * 4), ("1/l", [0.4, 0.2, 0.4 / 3, 0.1]), ("1/sqrt(l)", [0.4, 0.4 / 2**0.5, 0.4 / 3**0.5, 0.2])],
)
def test_start_by_hand(depth: str, expected: list[float]) -> None:
    schedule = LearnedSchedule(4, start=0.4, depth=depth)
    for step in (0, 1000):
        np.testing.assert_allclose(schedule.alpha(step), expected, rtol=1e-15)
    np.testing.assert_allclose(schedule.initial_logits(), [np.log(a / (1 - a)) for a in expected], rtol=1e-12)
    model = Model()
    scaling = ProRes(model, schedule)
    scaling.set_step(0)
    np.testing.assert_allclose(scaling.values, expected, rtol=1e-6)
    np.testing.assert_allclose(logits_of(model).detach().sigmoid(), expected, rtol=1e-6)


def test_penalty_by_hand() -> None:
    """Layers 2 and 4 are ahead of the one before by 0.2 and 0.1."""
    alpha = torch.tensor([0.3, 0.5, 0.4, 0.5], dtype=torch.float64, requires_grad=True)
    penalty = LearnedSchedule(4, monotone=3.0).penalty(alpha)
    assert penalty.item() == pytest.approx(3 * (0.04 + 0.01))
    penalty.backward()
    assert alpha.grad.tolist() == pytest.approx([-1.2, 1.2, -0.6, 0.6])
    assert LearnedSchedule(1, monotone=3.0).penalty(alpha[:1]).item() == 0


def functional(model: Model, x: torch.Tensor, logits: torch.Tensor, monotone: float) -> torch.Tensor:
    """The loss that the logits descend, as a plain function, all in float64."""
    weights, alpha = [p.detach() for name, p in model.named_parameters() if name != KEY], logits.sigmoid()
    for number in range(L):
        w1, b1, w2, b2 = weights[4 * number : 4 * number + 4]
        x = x + alpha[number] * torch.tanh(x @ w1.T + b1)
        x = x + alpha[number] * torch.tanh(x @ w2.T + b2)
    return x.square().sum() + monotone * sum(max(float(d), 0.0) ** 2 for d in alpha.diff())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("monotone", [0.0, 50.0])
def test_gradient_is_that_of_finite_differences(recompute: bool, monotone: float) -> None:
    """In float64, over two microbatches; alpha itself is kept in fp32, so to a hundred-thousandth."""
    model = Model(recompute=recompute).double()
    scaling = learned(model, start=0.3, depth="constant", monotone=monotone)
    moved = torch.tensor([-0.5, 0.3, -1.0, 0.2])
    with torch.no_grad():
        logits_of(model).copy_(moved)
    scaling.set_step(0)
    batches = [inputs(torch.float64), 0.5 * inputs(torch.float64).flip(0)]
    for x in batches:
        model(x.requires_grad_()).square().sum().backward()
    scaling.after_backward()
    h, expected = 1e-5, []
    for number in range(L):
        step = h * torch.eye(L, dtype=torch.float64)[number]
        sides = [
            functional(model, torch.cat(batches).detach(), moved.double() + sign * step, monotone) for sign in (1, -1)
        ]
        expected.append((sides[0] - sides[1]).item() / (2 * h))
    np.testing.assert_allclose(logits_of(model).grad.numpy(), expected, rtol=1e-5)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_training_adds_no_graph_to_compiled_layers(recompute: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    models = [Model(recompute=recompute), Model(recompute=recompute)]
    scalings = [learned(model, start=0.3) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for layer in models[0].layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    graphs = []
    for step in range(5):
        for model, scaling in zip(models, scalings, strict=True):
            scaling.set_step(step)
            for _ in range(2):
                model(inputs().requires_grad_()).square().sum().backward()
            scaling.after_backward()
        gradients = [logits_of(model).grad for model in models]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        assert gradients[0].all()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 5 and graphs[0] == 1
    assert abs(scalings[0].values - scalings[0].schedule.alpha(0)).min() > 0.01, "alpha has moved"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.half().float(),
        copy.deepcopy,
        lambda m: torch.load(saved(m), weights_only=False),
    ],
    ids=["bfloat16", "double", "half-float", "deepcopy", "pickle"],
)
def test_logits_stay_fp32_and_alpha_goes_on_having_a_gradient(change) -> None:
    model = Model()
    scaling = learned(model)
    with torch.no_grad():
        logits_of(model).copy_(torch.tensor([0.1, -0.7, 1.3, 1 / 3]))
    scaling.set_step(0)
    changed = change(model)
    assert logits_of(changed).dtype == torch.float32 and logits_of(changed).requires_grad
    assert torch.equal(logits_of(changed), torch.tensor([0.1, -0.7, 1.3, 1 / 3]))
    assert torch.equal(changed.prores_alpha.tensor, logits_of(changed).detach().sigmoid())
    changed(inputs(next(changed.layers.parameters()).dtype)).float().square().sum().backward()
    assert changed.prores_alpha.take_gradient().all()
    assert not changed.prores_alpha.has_gradient and not model.prores_alpha.has_gradient


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_the_state_dict_has_one_more_key() -> None:
    plain, model = Model(), Model()
    learned(model)
    assert set(model.state_dict()) - set(plain.state_dict()) == {KEY}
    assert {n for n, _ in model.named_parameters()} == set(model.state_dict())
    other = Model()
    scaling = learned(other, start=0.9)
    other.load_state_dict(model.state_dict())
    scaling.set_step(0)
    np.testing.assert_allclose(scaling.values, LearnedSchedule(L).alpha(0), rtol=1e-6)


def test_a_model_made_without_storage() -> None:
    with torch.device("meta"):
        model = Model()
    scaling = learned(model, start=0.3)
    model.to_empty(device="cpu")
    scaling.trained.reset_parameters()
    scaling.set_step(0)
    np.testing.assert_allclose(scaling.values, LearnedSchedule(L, start=0.3).alpha(0), rtol=1e-6)


def test_a_gradient_that_is_not_taken_is_an_error() -> None:
    scaling = learned(model := Model())
    scaling.set_step(0)
    model(inputs()).sum().backward()
    with pytest.raises(GradientLeftError, match=r"set_step\(1\) before after_backward\(\)"):
        scaling.set_step(1)
    scaling.after_backward()
    scaling.set_step(1)
    with torch.no_grad():
        model(inputs())
    scaling.set_step(2)


def test_clipping_leaves_those_apart_alone() -> None:
    model = Model()
    scaling = learned(model)
    for apart_is_finite in (True, False):
        scaling.set_step(0)
        model(inputs()).square().sum().backward()
        scaling.after_backward()
        own = [p for name, p in model.named_parameters() if name != KEY]
        expected = torch.stack([p.grad.norm() for p in own]).norm()
        if not apart_is_finite:
            logits_of(model).grad[1] = float("inf")
        before = logits_of(model).grad.clone()
        norm = clip(model.parameters(), expected.item() / 2, apart=[logits_of(model)])
        assert torch.equal(logits_of(model).grad, before)
        assert torch.stack([p.grad.norm() for p in own]).norm().item() == pytest.approx(expected.item() / 2, rel=1e-5)
        assert norm.isfinite().item() == apart_is_finite
        if apart_is_finite:
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        model.zero_grad()


@pytest.fixture
def two_by_two():
    """The debug recipe with a trained alpha on a mesh of 2 x 2 ranks without the other three: components, model."""
    recipe = debug_recipe("learned", "--transforms.prores.residual_schedule.lr=0.5", TP2)
    degrees = plan_mesh(recipe.parallelism, 4)
    components = build_components(recipe, degrees)
    mesh = mesh_module.start_fake(degrees)
    yield recipe, components, mesh
    mesh_module.stop()


TP2 = "--parallelism.tensor_parallel_degree=2"


def debug_recipe(name: str, *overrides: str) -> Recipe:
    own = [f"--transforms.prores.residual_schedule.name={name}", *overrides]
    return resolve(sources.load(DEBUG, own, registry.DEFAULTS), 4)


def test_logits_have_a_group_of_their_own_and_are_whole_on_every_rank(two_by_two) -> None:
    recipe, components, mesh = two_by_two
    transform_model(recipe, components, mesh)
    model = components.model
    optimizer, added = components.build_optimizer(model)
    logits = logits_of(model)
    assert len(added) == 1 and added[0] is logits
    assert logits.placements == (Replicate(),) * 3 and logits.to_local().shape == (4,)
    first, *others = optimizer.param_groups
    assert first["params"] == [logits] and (first["lr"], first["peak_lr"], first["weight_decay"]) == (0.5, 0.5, 0.0)
    assert all(group["lr"] == group["peak_lr"] == 3e-3 for group in others)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))


def test_a_parameter_that_no_rule_draws_is_refused(two_by_two, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, components, mesh = two_by_two
    monkeypatch.setattr(type(dict(components.transforms.named)["prores"]), "init_rules", lambda self: ())
    with pytest.raises(ConfigError, match=r"changes the names of weights.*prores_schedule\.logits"):
        transform_model(recipe, components, mesh)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("learned", "8 residual adds scaled, learned (4 logits from alpha = 0.1, 1/l; lr = 0.01)"),
        ("adaptive", "8 residual adds scaled, adaptive (all layers at 1 after 4000 to 7000 steps"),
    ],
)
def test_check_describes_them(name: str, said: str) -> None:
    assert said in report(debug_recipe(name, TP2), 4)


# --- adaptive ------------------------------------------------------------------------------------------------------


def adaptive(**settings: Any) -> AdaptiveSchedule:
    given = {"warmup_steps": 4, "min_steps": 2, "max_steps": 6, "tolerance": 0.1, "every_steps": 1, "smoothing": 0.5}
    return AdaptiveSchedule(3, **{**given, **settings})


def test_bounds_without_any_measurement() -> None:
    """Layers begin at 0, 6 and 12; a pure function of the step, in whatever order it is asked."""
    schedule = adaptive(floor=0.2)
    expected = {
        16: [1, 1, 1],
        0: [0.2] * 3,
        2: [0.6, 0.2, 0.2],
        6: [1, 0.2, 0.2],
        7: [1, 0.4, 0.2],
        12: [1, 1, 0.2],
        14: [1, 1, 0.6],
        10**9: [1] * 3,
    }
    for step, alpha in expected.items():
        np.testing.assert_allclose(schedule.alpha(step), alpha, rtol=1e-12)


def test_settling_by_hand() -> None:
    """Running means at smoothing 1/2, layer 1: 4, 3, 2.75; changes -1/4 and -1/12, which is settled."""
    schedule = adaptive()
    for step, first in enumerate([100, 4, 2, 2.5]):  # the first is of alpha = 0
        assert schedule.begins(step) == [0] and schedule.measures(step)
        schedule.observe(step, np.array([first, 1.0, 9.0]))
    assert schedule.begins(3) == [0] and schedule.begins(4) == [0, 4]
    np.testing.assert_allclose(schedule.alpha(5), [1, 0.25, 0])
    # Layer 2 stands still from the start, yet two of its measurements are needed, and then min_steps are over.
    for step, second in enumerate([7, 1, 1], 4):
        assert schedule.begins(step) == [0, 4] and "adaptive_change" not in schedule.row(step)
        schedule.observe(step, np.array([100.0, second, 9.0]))
    assert schedule.begins(7) == [0, 4, 7] and not schedule.measures(7)
    np.testing.assert_allclose(schedule.alpha(9), [1, 1, 0.5])
    assert schedule.row(9) == {"adaptive_layers": 3}


def test_layers_wait_for_min_steps() -> None:
    schedule = adaptive(min_steps=5)
    for step in range(5):
        assert schedule.begins(step) == [0]
        schedule.observe(step, np.ones(3))
    assert schedule.begins(5) == [0, 5]


def test_what_is_unsettled_waits_for_the_bound() -> None:
    schedule = adaptive()
    for step in range(13):
        if schedule.measures(step):
            schedule.observe(step, np.full(3, 2.0**step))
    assert schedule.begins(12) == [0, 6, 12]
    assert not schedule.measures(12)


def test_numbers_that_are_not_finite_are_passed_over() -> None:
    schedule, other = adaptive(), adaptive()
    for step, value in enumerate([4, float("nan"), 2, float("inf"), 2.5]):
        schedule.observe(step, np.array([value, 1.0, 1.0]))
        if np.isfinite(value):
            other.observe(step, np.array([value, 1.0, 1.0]))
    assert schedule.state() == other.state() and np.isfinite(schedule.state()["mean"])


def test_a_layer_that_turns_nothing_has_not_settled() -> None:
    """There is nothing to compare with: the first change is known two measurements after it has begun to."""
    schedule = adaptive(min_steps=1, tolerance=10)
    for step, first in enumerate([0, 0, 0, 1]):
        schedule.observe(step, np.array([first, 0.0, 0.0]))
        assert schedule.begins(step + 1) == [0] and "adaptive_change" not in schedule.row(step)
    schedule.observe(4, np.array([1.0, 0.0, 0.0]))
    assert schedule.begins(5) == [0, 5]


def test_the_change_shown_is_that_of_the_newest_layer() -> None:
    schedule = adaptive(tolerance=0)
    for step, first in enumerate([9.0, 4.0, 2.0]):
        schedule.observe(step, np.array([first, 1.0, 1.0]))
    assert schedule.row(2) == {"adaptive_layers": 1, "adaptive_change": 0.25}
    assert schedule.row(6) == {"adaptive_layers": 2}, "which began by the bound"


def test_measurements_are_as_rare_as_they_should_be() -> None:
    schedule = adaptive(every_steps=5)
    assert [step for step in range(16) if schedule.measures(step)] == [0, 5, 10]


def test_state_goes_through_json_and_on_as_before() -> None:
    generator = np.random.default_rng(0)
    measured = 1 + generator.random((14, 3)) / 3
    straight, first = adaptive(), adaptive()
    for step in range(14):
        straight.observe(step, measured[step])
    for step in range(5):
        first.observe(step, measured[step])
    second = adaptive()
    second.load_state(json.loads(json.dumps(first.state())))
    for step in range(5, 14):
        second.observe(step, measured[step])
    assert second.state() == straight.state() and len(straight.state()["begun"]) == 3
    second.load_state({})
    assert second.state() == adaptive().state()
    for wrong in (
        {"begun": [0, 1, 2, 3]},
        {"begun": []},
        {"begun": None},
        {"begun": [1]},
        {"begun": [0, 5, 3]},
        {"begun": [0, 1.5]},
        {"mean": [1.0]},
        {"change": "x"},
    ):
        with pytest.raises(ValueError, match="state of an adaptive schedule"):
            second.load_state(wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 1}, "max_steps = 1: must be at least 2"),
        ({"warmup_steps": 0}, "warmup_steps = 0"),
        ({"every_steps": 0}, "every_steps = 0"),
        ({"tolerance": -1}, "tolerance = -1"),
        ({"tolerance": float("nan")}, "tolerance = nan"),
        ({"smoothing": 1.0}, "smoothing = 1.0: must be at least 0 and less than 1"),
        ({"floor": -0.1}, "floor = -0.1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adaptive(**settings)
    for start, depth, monotone in ((0, "1/l", 0), (1, "1/l", 0), (0.5, "l", 0), (0.5, "1/l", -1)):
        with pytest.raises(ValueError, match=r"^(start|depth|monotone) = "):
            LearnedSchedule(3, start=start, depth=depth, monotone=monotone)


class Recording(AdaptiveSchedule):
    """Keeps what it is told."""

    def observe(self, step: int, turned: np.ndarray) -> None:
        self.told = {**getattr(self, "told", {}), step: turned}
        super().observe(step, turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_what_is_measured_is_how_far_layers_turn_the_tokens_of_all_microbatches(
    dtype: torch.dtype, recompute: bool
) -> None:
    model = Model(recompute=recompute).to(dtype)
    schedule = Recording(L, warmup_steps=2, min_steps=2, max_steps=50, every_steps=2, tolerance=0)
    scaling = ProRes(model, schedule)
    batches = [inputs(dtype), 3 * inputs(dtype)[:2]]
    for step in range(4):
        scaling.set_step(step)
        with torch.no_grad():
            model(100 * inputs(dtype))  # validation is not measured
        for x in batches:
            model(x.requires_grad_()).float().square().sum().backward()
        scaling.after_backward()
    assert schedule.told.keys() == {0, 2}
    scaling.set_step(2)
    angles: list[list[torch.Tensor]] = [[] for _ in range(L)]
    with torch.no_grad():
        for x in batches:
            for number, layer in enumerate(model.layers):
                y = layer(x)
                cosine = torch.cosine_similarity(x.double(), y.double(), dim=-1).clamp(max=1)
                angles[number].append(cosine.acos().flatten())
                x = y
    # The chord of an angle; only the first layer has begun.
    expected = [(2 * (torch.cat(each) / 2).sin()).mean().item() for each in angles]
    assert expected[0] > 0.01 > 1e-6 > max(expected[1:])
    np.testing.assert_allclose(schedule.told[2], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [*((norm, torch.float32) for norm in NORM_SCHEMES), *((n, torch.bfloat16) for n in ("pre", "post"))],
)
def test_every_layer_is_seen_to_rise_whatever_its_norms(norm: str, dtype: torch.dtype) -> None:
    """Weights stay, so what a layer does moves with alpha alone. No other bound is near.

    A layer is at 1 after 12 updates, and its running mean halves the distance to that with each one after. That a layer
    turns little before, when alpha has hardly begun to rise, is not taken for having settled.
    """
    model = build(norm=norm, n_layers=4).to(dtype)
    # In bf16 the last digits of small alphas are lost, and with them what tells one measurement from the next.
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 1e-2}[dtype]
    scaling = ProRes(
        model,
        AdaptiveSchedule(
            4, warmup_steps=12, min_steps=1, max_steps=99, tolerance=tolerance, every_steps=1, smoothing=0.5
        ),
    )
    for step in range(100):
        scaling.set_step(step)
        model(tokens()).float().sum().backward()
        scaling.after_backward()
        if len(scaling.schedule.begins(step)) == 4:
            break
    waits = [later - earlier for earlier, later in itertools.pairwise(scaling.schedule.begins(100))]
    assert len(waits) == 3 and waits[0] <= 24, waits
    # What the first layer adds is large beside the embedding: with a wide tolerance its direction is settled early.
    judged = waits if dtype == torch.float32 else waits[1:]
    assert all(12 <= wait <= 12 + 12 for wait in judged), waits


@pytest.mark.parametrize("forward", [lambda x: x[..., :1] * 1.0, lambda x: x.mul_(2)], ids=["other shape", "in place"])
def test_layers_without_two_tensors_of_one_shape_are_an_error(forward: Any) -> None:
    model = Model()
    scaling = ProRes(model, AdaptiveSchedule(L, warmup_steps=2, min_steps=2, max_steps=5))
    model.layers[L - 1].forward = forward
    scaling.set_step(0)
    with pytest.raises(RuntimeError, match=f"layer {L}: .* two tensors of one shape"):
        model(inputs())


def test_layers_that_cannot_be_measured_are_an_error() -> None:
    torch._dynamo.reset()
    model = Model()
    scaling = ProRes(model, AdaptiveSchedule(L, warmup_steps=2, min_steps=2, max_steps=5))
    for layer in model.layers:
        layer.compile(backend="eager")
    scaling.set_step(0)
    model(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match=r"compile layer\.forward and not the layer"):
        scaling.after_backward()
    scaling.set_step(10)  # not an update to be measured
    model(inputs()).sum().backward()
