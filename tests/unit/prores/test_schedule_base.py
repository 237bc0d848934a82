"""What any residual schedule may leave out: hooks, the base class, and the class."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.prores.test_prores import L, Model, inputs
from titan_prores.config import registry
from titan_prores.config.component_spec import ComponentSpec
from titan_prores.config.errors import ConfigError
from titan_prores.config.sections import Section
from titan_prores.prores import (
    AdaptiveSchedule,
    LearnedSchedule,
    ProRes,
    ResidualSchedule,
    Schedule,
    TableSchedule,
    as_schedule,
)
from titan_prores.protocols.residual_schedule import ResidualSchedule as Component


class AlphaAlone(ResidualSchedule):
    def alpha(self, step: int) -> np.ndarray:
        return np.full(L, step / 10)


class Unrelated:
    """No base class, one hook."""

    def __init__(self, config: Section | None = None, *, n_layers: int = L) -> None:
        self.n_layers = n_layers

    def alpha(self, step: int) -> np.ndarray:
        return np.full(self.n_layers, step / 10)

    def row(self, step: int) -> dict[str, int]:
        return {"mine": step}


def test_every_kind_of_schedule_derives_from_the_base_class() -> None:
    for schedule in (Schedule, LearnedSchedule, AdaptiveSchedule, TableSchedule, Component):
        assert issubclass(schedule, ResidualSchedule)
    for name in registry.names("residual_schedule"):
        assert issubclass(registry.lookup("residual_schedule", name), ResidualSchedule), name


@pytest.mark.parametrize("given", [AlphaAlone(), Unrelated(), lambda step: np.full(L, step / 10)])
def test_alpha_alone_is_enough(given) -> None:
    schedule = as_schedule(given)
    assert not schedule.trained and not schedule.measures(0) and schedule.state() == {} == AlphaAlone().row(3)
    schedule.load_state({})
    model = Model()
    scaling = ProRes(model, given)
    assert {len(layer._forward_hooks) for layer in model.layers} == {1}, "nothing is measured"
    scaling.set_step(5)
    model(inputs()).sum().backward()
    scaling.after_backward()
    assert scaling.values.tolist() == [0.5] * L and "prores_schedule.logits" not in model.state_dict()


def test_hooks_of_an_unrelated_class_are_used() -> None:
    assert as_schedule(Unrelated()).row(3) == {"mine": 3}
    ours = Schedule("linear", L, T=1)
    assert as_schedule(ours) is ours


def test_initial_logits_alone_make_a_schedule_trained() -> None:
    class Trained(AlphaAlone):
        def initial_logits(self) -> np.ndarray:
            return np.linspace(-1.0, 1.0, L)

    model = Model()
    scaling = ProRes(model, Trained())
    scaling.set_step(0)
    np.testing.assert_allclose(scaling.values, 1 / (1 + np.exp(-np.linspace(-1.0, 1.0, L))), rtol=1e-6)
    model(inputs()).square().sum().backward()
    scaling.after_backward()
    assert model.get_parameter("prores_schedule.logits").grad.all()


def test_a_component_defines_alpha_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_table", {kind: dict(named) for kind, named in registry._table.items()})

    class Mine(Component):
        """One alpha for all."""

        class Config(Section):
            pass

        def alpha(self, step: int) -> np.ndarray:
            return np.full(self.n_layers, 0.5)

    registry.register("residual_schedule", "mine")(Mine)
    assert (
        ComponentSpec("residual_schedule", "mine", Mine, Mine.Config()).build(n_layers=3).alpha(0).tolist() == [0.5] * 3
    )
    Unrelated.Config = Mine.Config
    registry.register("residual_schedule", "unrelated")(Unrelated)

    class Nothing(Component):
        Config = Mine.Config

    with pytest.raises(ConfigError, match="Nothing lacks alpha"):
        registry.register("residual_schedule", "nothing")(Nothing)

    class Wrong(Mine):
        def observe(self, step: int) -> None: ...

    with pytest.raises(ConfigError, match=r"cannot be called as observe\(step, turned\)"):
        registry.register("residual_schedule", "wrong")(Wrong)
