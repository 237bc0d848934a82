"""Residual and learning-rate schedules against values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from titan_prores.config import registry
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import Resolver
from titan_prores.config.sources import Tree
from titan_prores.prores import SCHEDULES, Schedule

# Four layers, T = 10: step -> alpha of layers 1..4, by hand from METHOD's table.
R2, R3 = math.sqrt(0.5), math.sqrt(1 / 3)
BY_HAND = {
    "linear": {0: [0] * 4, 5: [0.5, 0.25, 5 / 30, 0.125], 10: [1, 0.5, 1 / 3, 0.25], 30: [1, 1, 1, 0.75], 40: [1] * 4},
    "linear-sqrt": {0: [0] * 4, 10: [1, R2, R3, 0.5], 40: [1] * 4},
    "linear-square": {0: [0] * 4, 10: [1, 0.25, 1 / 9, 0.0625], 20: [1, 1, 4 / 9, 0.25], 40: [1] * 4},
    "equal": {0: [0] * 4, 3: [0.3] * 4, 10: [1] * 4, 11: [1] * 4},
    "reverse": {0: [0] * 4, 10: [0.25, 1 / 3, 0.5, 1], 39: [0.975, 1, 1, 1], 40: [1] * 4},
    "stagewise-0": {0: [0] * 4, 5: [0.5, 0, 0, 0], 10: [1, 0, 0, 0], 25: [1, 1, 0.5, 0], 40: [1] * 4},
    "stagewise-L": {0: [0.25] * 4, 5: [0.625, 0.25, 0.25, 0.25], 35: [1, 1, 1, 0.625], 40: [1] * 4},
    "stagewise-sqrt-L": {0: [0.5] * 4, 15: [1, 0.75, 0.5, 0.5], 40: [1] * 4},
    "stagewise-sqrt-l": {0: [1, R2, R3, 0.5], 10: [1, R2, R3, 0.5], 35: [1, 1, 1, 0.75], 40: [1] * 4},
    "fix-L": {0: [0.25] * 4, 10**6: [0.25] * 4},
    "fix-sqrt-L": {0: [0.5] * 4, 10**6: [0.5] * 4},
    "fix-sqrt-l": {0: [1, R2, R3, 0.5], 10**6: [1, R2, R3, 0.5]},
}


def component(name: str, n_layers: int, **settings: float):
    """The registered schedule as a recipe would get it."""
    resolver = Resolver(Tree())
    spec = resolver.component("residual_schedule", {"name": name, **settings}, ("residual_schedule",))
    assert not resolver.errors, resolver.errors
    return spec.build(n_layers=n_layers)


# What stands in no table of the paper, with tests of its own.
BEYOND = {"adaptive", "from_table", "learned"}


def test_every_schedule_has_a_hand_worked_table() -> None:
    assert BY_HAND.keys() == SCHEDULES.keys() == set(registry.names("residual_schedule")) - BEYOND


@pytest.mark.parametrize("name", BY_HAND)
def test_residual_schedule_by_hand(name: str) -> None:
    constant = name.startswith("fix")
    settings = {} if constant else {"T": 10}
    for step, expected in BY_HAND[name].items():
        alpha = component(name, 4, **settings).alpha(step)
        np.testing.assert_allclose(alpha, expected, rtol=1e-12, atol=0, err_msg=f"{name} at {step}")
        assert alpha.dtype == np.float64
    if not constant:  # the same schedule by the step at which it is over
        total = {"total": 10 if name == "equal" else 40}
        for step, expected in BY_HAND[name].items():
            np.testing.assert_allclose(component(name, 4, **total).alpha(step), expected, rtol=1e-12)


@pytest.mark.parametrize("name", [n for n in BY_HAND if not n.startswith("fix")])
@pytest.mark.parametrize("n_layers", [1, 3, 7, 24, 120])
@pytest.mark.parametrize("total", [1, 100, 479, 12000])
def test_every_layer_is_at_one_at_total_and_not_before(name: str, n_layers: int, total: int) -> None:
    schedule = Schedule(name, n_layers, total=total)
    assert schedule.alpha(total).astype(np.float32).tolist() == [1.0] * n_layers
    assert schedule.total_steps == total
    if total > n_layers > 1:  # with one layer a floor of 1/L is no warmup
        assert schedule.alpha(total - 1).min() < 1


def test_reference_total_agrees_when_depth_divides_it() -> None:
    """The reference code gives layer l the length linspace(W // L, W, L)[l-1]."""
    W, L = 24000, 24
    lengths = np.linspace(W // L, W, L)
    for step in (1, 999, 12345, W):
        np.testing.assert_allclose(
            Schedule("linear", L, total=W).alpha(step), np.minimum(step / lengths, 1), rtol=1e-12
        )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("linear", {}, "neither was given"),
        ("linear", {"T": 10, "total": 40}, "not both"),
        ("fix-L", {"T": 10}, "takes neither"),
        ("linear", {"T": 0}, "greater than 0"),
        ("equal", {"total": -1}, "greater than 0"),
        ("linaer", {"T": 1}, "linear-square"),
    ],
)
def test_wrong_lengths_are_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(name, 4, **settings)


def lr(name: str, total_steps: int, **settings: float) -> list[float]:
    resolver = Resolver(Tree())
    spec = resolver.component("lr_scheduler", {"name": name, **settings}, ("lr_scheduler",))
    assert not resolver.errors, resolver.errors
    schedule = spec.build(total_steps=total_steps)
    return [schedule.factor(step) for step in range(total_steps)]


def test_wsd_by_hand() -> None:
    """N = 20, w = 4, D = int(0.1 * 20) = 2: update 1 has lr 0, the last one half the peak."""
    assert lr("wsd", 20, warmup_steps=4) == [0, 0.25, 0.5, 0.75, *[1.0] * 15, 0.5]
    assert lr("wsd", 10, decay_ratio=0.4) == [*[1.0] * 7, 0.75, 0.5, 0.25]
    assert lr("wsd", 10, decay_ratio=0.4, min_lr_factor=0.2)[-1] == pytest.approx(0.2 + 0.8 * 0.25)
    assert lr("wsd", 5, decay_ratio=0.0) == [1.0] * 5


def test_linear_cosine_constant_by_hand() -> None:
    assert lr("linear", 6, warmup_steps=2) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
    assert lr("linear", 4, min_lr_factor=0.5) == pytest.approx([1, 0.875, 0.75, 0.625])
    assert lr("cosine", 6, warmup_steps=2) == pytest.approx([0, 0.5, 1, (1 + R2) / 2, 0.5, (1 - R2) / 2])
    assert lr("cosine", 2, min_lr_factor=0.1) == pytest.approx([1, 0.55])
    assert lr("constant", 5, warmup_steps=2) == [0, 0.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [("wsd", {"warmup_steps": 11}, "warmup_steps"), ("wsd", {"warmup_steps": 8, "decay_ratio": 0.5}, "decay_ratio")],
)
def test_schedules_longer_than_the_run_are_refused(name: str, settings: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lr(name, 10, **settings)
    assert caught.value.key == f"lr_scheduler.{key}"
