"""Runs that go on from a checkpoint or from other weights: what would change the model is asked, the rest is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_prores.build import Components, build_components
from titan_prores.checkpoint.resume import (
    changed_sources,
    check_start,
    learning_rates_changed,
    models_changed,
    switched,
)
from titan_prores.config import sources
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.layout import plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.config.registry import register
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section
from titan_prores.protocols.transform import Phase, Transform

ROOT = Path(__file__).resolve().parents[3]
FROM = "--checkpoint.init_from=there/step-00000020"
OFF = "--transforms.prores.enabled=false"
SCHEDULE = "--transforms.prores.residual_schedule"


def built(*overrides: str) -> tuple[Recipe, dict[str, Transform]]:
    recipe, components = whole(*overrides)
    return recipe, dict(components.transforms.named)


def whole(*overrides: str) -> tuple[Recipe, Components]:
    tree = sources.load(ROOT / "train_configs/debug.toml", overrides, ROOT / "components/defaults.toml")
    recipe = resolve(tree)
    return recipe, build_components(recipe, plan_mesh(recipe.parallelism, 1))


def alphas(*overrides: str, steps: tuple[int, ...] = (0, 1, 5)) -> list[list[float]]:
    """alpha of the run's own steps, through the transform's hooks."""
    prores = built(*overrides)[1]["prores"]
    found = []

    class Recorded:
        def set_step(self, step: int) -> None:
            found.append(prores.schedule.alpha(step).tolist())

    prores.prores = Recorded()
    for step in steps:
        prores.before_step(step)
    return found


def test_start_moves_the_schedule() -> None:
    # T = 2: alpha(l, t) = min(t / 2 l, 1)
    linear = [[min(t / (2 * layer), 1.0) for layer in (1, 2, 3, 4)] for t in (0, 1, 5)]
    assert alphas() == alphas("--transforms.prores.start=fresh") == alphas("--transforms.prores.start=0") == linear
    shifted = [[min(t / (2 * layer), 1.0) for layer in (1, 2, 3, 4)] for t in (3, 4, 8)]
    assert alphas("--transforms.prores.start=3") == shifted
    assert alphas("--transforms.prores.start=warm") == [[1.0] * 4] * 3


@pytest.mark.parametrize("name", ["equal", "stagewise-0", "adaptive"])
def test_every_schedule_that_warms_up_is_warm_at_once(name: str) -> None:
    length = ", T = 2" if name != "adaptive" else ""
    given = f'{SCHEDULE}={{ name = "{name}"{length} }}'
    assert alphas(given, "--transforms.prores.start=warm") == [[1.0] * 4] * 3
    assert alphas(given)[0][3] < 1


def test_weights_from_elsewhere_need_a_start() -> None:
    meta = {"step": 20, "recipe": {"transforms": {"prores": {"enabled": True}}}}
    for own, known in (((), None), ((), meta), ((f'{SCHEDULE}={{ name = "adaptive" }}',), meta)):
        with pytest.raises(
            ConfigErrors, match=r"transforms\.prores\.start: has to be set.*there/step-00000020"
        ) as caught:
            check_start(*built(FROM, *own), known)
        message = str(caught.value)
        assert all(choice in message for choice in ('"warm" = ', '"fresh" = ', "a step = "))
        assert ("trained 20 steps with prores" in message) == (known is not None)


@pytest.mark.parametrize(
    "own",
    [
        ("--transforms.prores.start=fresh",),
        ("--transforms.prores.start=warm",),
        ("--transforms.prores.start=7",),
        (OFF,),
        (f'{SCHEDULE}={{ name = "fix-L" }}',),
        (f'{SCHEDULE}={{ name = "learned" }}',),
    ],
)
def test_nothing_is_asked_where_it_is_said_or_makes_no_difference(own: tuple[str, ...]) -> None:
    check_start(*built(FROM, *own))
    check_start(*built())


def test_what_the_weights_were_trained_with_and_is_off_is_said(logged) -> None:
    for changes in (True, False):
        logged.clear()
        check_start(*built(FROM, OFF), {"step": 3, "recipe": {}, "changes_model": {"prores": changes}})
        assert bool(logged) == changes
    check_start(
        *built(FROM, "--transforms.prores.start=warm"), {"step": 3, "recipe": {}, "changes_model": {"prores": 1}}
    )
    assert not logged


@pytest.mark.parametrize("start", [-1, True, 1.5, '"wram"'])
def test_no_start(start: object) -> None:
    with pytest.raises(ConfigErrors, match=r"transforms\.prores\.start"):
        built(f"--transforms.prores.start={str(start).lower()}")


def test_a_learned_schedule_has_no_start() -> None:
    with pytest.raises(
        ConfigErrors, match=r"transforms\.prores\.start = 'warm': alpha of this schedule comes from its logits"
    ):
        built(f'{SCHEDULE}={{ name = "learned" }}', "--transforms.prores.start=warm")


def meta_of(step: int, *overrides: str) -> dict[str, Any]:
    recipe, transforms = built(*overrides)
    return {"recipe": recipe.to_dict(), "changes_model": models_changed(recipe, transforms, step)}


def refused(step: int, before: tuple[str, ...], after: tuple[str, ...], **meta: Any) -> list[str]:
    return [str(error) for error in switched(*built(*after), step, {**meta_of(step, *before), **meta})]


def test_prores_may_be_switched_where_every_alpha_is_1() -> None:
    for step, n_errors in ((7, 1), (8, 0)):  # 4 layers, T = 2
        for before, after in (((), (OFF,)), ((OFF,), ())):
            errors = refused(step, before, after)
            assert len(errors) == n_errors
            assert all("when the checkpoint was written" in e and "transforms.prores.enabled" in e for e in errors)
    assert refused(0, (), ()) == refused(0, (OFF,), (OFF,)) == []


@pytest.mark.parametrize("name", ["fix-L", "learned", "stagewise-L"])
def test_a_schedule_below_1_may_not_be_switched(name: str) -> None:
    length = ", T = 1000" if name.startswith("stagewise") else ""
    own = (f'{SCHEDULE}={{ name = "{name}"{length} }}',)
    assert len(refused(500, own, (OFF,))) == len(refused(500, (OFF,), own)) == 1


def test_a_table_that_falls_again_is_no_plain_model(tmp_path: Path) -> None:
    rows = ["step,alpha_1,alpha_2,alpha_3,alpha_4", *(f"{t},{a},{a},{a},{a}" for t, a in ((20, 1), (30, 0.2), (40, 1)))]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    own = (f'{SCHEDULE}={{ name = "from_table", path = "{tmp_path}/a.csv" }}',)
    assert len(refused(20, (OFF,), own)) == 1 and refused(40, (OFF,), own) == []


def test_a_checkpoint_that_does_not_say_counts_by_what_is_known_of_the_transform() -> None:
    old = {"changes_model": {}}
    assert len(refused(8, (), (OFF,), **old)) == 1
    compiled = "--transforms.compile.enabled=true"
    assert refused(8, (compiled,), (), **old) == refused(8, (), (compiled,)) == []


class _Section(Section):
    pass


def test_a_transform_of_a_users_own_counts_by_its_phase_or_its_word(monkeypatch) -> None:
    from titan_prores.config import registry

    monkeypatch.setattr(registry, "_table", {kind: dict(named) for kind, named in registry._table.items()})
    for name, own in (
        ("rewriting", {"phase": Phase.REWRITE}),
        ("rounding", {"phase": Phase.REWRITE, "changes_model": False}),
        ("precise", {"phase": Phase.PRECISION}),
        ("lossy", {"phase": Phase.PRECISION, "changes_model": True}),
    ):
        members = {**own, "Config": _Section, "apply": lambda self, model, context: None}
        register("transform", name)(type(name, (Transform,), members))
        on = (f"--transforms.{name}.enabled=true",)
        expected = int(name in ("rewriting", "lossy"))
        assert len(refused(8, on, ())) == len(refused(8, (), on)) == expected, name


def test_a_users_schedule_that_ends_is_asked_about_and_not_called_warm(monkeypatch) -> None:
    from titan_prores.config import registry

    monkeypatch.setattr(registry, "_table", {kind: dict(named) for kind, named in registry._table.items()})

    @register("residual_schedule", "ending")
    class Ending:
        class Config(Section):
            pass

        def __init__(self, config: Section, *, n_layers: int) -> None:
            self.rows = np.ones((30, n_layers))

        def alpha(self, step: int) -> np.ndarray:
            return self.rows[step]

    own = (f'{SCHEDULE}={{ name = "ending" }}',)
    assert len(refused(8, own, (OFF,))) == 1
    with pytest.raises(ConfigErrors, match="has to be set"):
        check_start(*built(FROM, *own))
    with pytest.raises((ConfigError, ConfigErrors), match="IndexError"):
        built(*own, "--transforms.prores.start=warm")


def rates(before: tuple[str, ...], now: tuple[str, ...], step: int = 10) -> str:
    recipe, c = whole(*now)
    earlier = built(*before)[0].to_dict()
    return learning_rates_changed(recipe, c.optimizer, c.lr_scheduler, c.model, earlier, step)


def test_learning_rates_of_the_next_steps_are_shown_where_they_change() -> None:
    # wsd: 3e-3 from step 5 on, down to 0 over the last tenth of the steps
    assert rates((), ("--optimizer.lr=1e-3",)) == (
        "learning rate before -> now: step 11: 0.003 -> 0.001; step 12: 0.003 -> 0.001; step 13: 0.003 -> 0.001; "
        "step 20: 0.0015 -> 0.0005"
    )
    longer = rates((), ("--training.steps=40",))
    assert longer.endswith("step 13: 0.003 -> 0.003; step 21: past its end -> 0.003; step 40: past its end -> 0.00075")
    assert rates((), ()) == rates((), ("--training.stop_after=15",)) == ""
    assert rates(("--lr_scheduler.name=cosine",), ()).startswith("learning rate before -> now: step 11: 0.00")


def test_a_scheduler_that_is_gone_is_no_reason_not_to_resume() -> None:
    recipe, c = whole()
    earlier = {**recipe.to_dict(), "lr_scheduler": {"name": "gone"}}
    assert learning_rates_changed(recipe, c.optimizer, c.lr_scheduler, c.model, earlier, 3) == ""


def test_text_that_changed_is_named_by_its_files() -> None:
    before = {"a.txt": "1", "b.txt": "1", "c.txt": "1"}
    assert changed_sources(before, {**before, "a.txt": "2", "b.txt": "2"}) == ": 2 files changed, such as a.txt"
    assert changed_sources(before, {"a.txt": "1", "b.txt": "1", "d.txt": "1"}) == (
        ": 1 file no longer there, such as c.txt; 1 file new, such as d.txt"
    )
    assert changed_sources(before, before) == changed_sources(None, before) == changed_sources(before, None) == ""


def test_weights_from_elsewhere_need_checkpoints_to_be_on() -> None:
    with pytest.raises(ConfigErrors, match=r"checkpoint\.enabled = false: the weights are to come from there/step"):
        built(FROM, "--checkpoint.enabled=false")


def test_a_table_that_comes_back_to_its_first_alpha_is_asked_about(tmp_path: Path) -> None:
    rows = ["step,alpha_1,alpha_2,alpha_3,alpha_4", *(f"{t},{a},{a},{a},{a}" for t, a in ((0, 1), (5, 0), (10, 1)))]
    (tmp_path / "dip.csv").write_text("\n".join(rows))
    with pytest.raises(ConfigErrors, match="has to be set"):
        check_start(*built(FROM, f'{SCHEDULE}={{ name = "from_table", path = "{tmp_path}/dip.csv" }}'))


@pytest.mark.parametrize(
    ("source", "here", "said"),
    [
        ((), (f'{SCHEDULE}={{ name = "fix-L" }}',), "with other settings of prores"),
        ((), (f'{SCHEDULE}={{ name = "learned" }}',), "with other settings of prores"),
        ((OFF,), (f'{SCHEDULE}={{ name = "fix-L" }}',), "without prores"),
        ((f'{SCHEDULE}={{ name = "fix-L" }}',), (OFF,), "with prores"),
        ((f'{SCHEDULE}={{ name = "fix-L" }}',), (f'{SCHEDULE}={{ name = "fix-L" }}',), None),
        ((), ("--transforms.prores.start=warm",), None),
        ((OFF,), (OFF,), None),
    ],
)
def test_weights_that_were_trained_otherwise_are_said(source, here, said, logged) -> None:
    check_start(*built(FROM, *here), {"step": 3, **meta_of(3, *source)})
    assert [f"trained {said}:" in line for line in logged] == [True] * (said is not None)
