"""What a resumed run may change: every key of every component there is, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from titan_prores.config import registry, sources
from titan_prores.config.engine_sections import SETS, SLOTS
from titan_prores.config.keys import dotted
from titan_prores.config.kinds import KINDS
from titan_prores.config.recipe import Recipe, changes_since, flatten
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import slot_kind
from titan_prores.config.setting_types import declared, type_name

DEBUG = Path(__file__).parents[3] / "train_configs" / "debug.toml"

# All of these sections must stay the same, but for what follows.
SAME = {"model", "tokenizer", "dataset", "loss"}
FREE_IN_SAME = {
    "model.flavor",  # a name for sizes, which are compared themselves
    "tokenizer.path",
    "dataset.files",  # where it lies; what it holds is compared, as the tokens that it gives
    "transforms.prores.residual_schedule.path",  # as above: its content has a hash, which is compared
    "transforms.prores.residual_schedule.lr",  # as any other learning rate
    "dataset.max_skipped_records",  # as files: the tokens are compared
    "dataset.cache_folder",
    "dataset.num_workers",
    "dataset.shard_tokens",
    "dataset.verify",
}
SAME_IN_FREE = {
    "training.seed",
    "training.seq_len",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.groups",
    "transforms.prores.residual_schedule",
    "transforms.prores.start",
}


def must_stay(key: str) -> bool:
    """The rule as a user is told it, beside that which the components declare."""
    if key in FREE_IN_SAME:
        return False
    return key.split(".")[0] in SAME or any(key == k or key.startswith(f"{k}.") for k in SAME_IN_FREE)


def recipe_of(*overrides: str) -> Recipe:
    return resolve(sources.load(DEBUG, overrides, registry.DEFAULTS))


MADE_UP = {"path": '"x"', "list of path": '["x"]'}
GIVEN = {dotted(key) for key in flatten(recipe_of().to_dict())}


def needed(component: type, key: str) -> list[str]:
    """Overrides for what neither a component nor the recipe has a value of."""
    missing = [(name, info) for name, info in component.Config.model_fields.items() if info.is_required()]
    return [
        f"--{key}.{name}={MADE_UP[type_name(declared(info))]}" for name, info in missing if f"{key}.{name}" not in GIVEN
    ]


def built_in(kind: str) -> dict[str, type]:
    """Components of this repository: other tests of the same process register their own."""
    found = {name: registry.lookup(kind, name) for name in registry.names(kind)}
    return {name: cls for name, cls in found.items() if cls.__module__.startswith(f"{registry.BUILTIN_PACKAGE}.")}


def places() -> Iterator[tuple[str, str, str, list[str]]]:
    """Every component there is: its kind, its name, the key that it is at and the overrides that put it there."""
    for key, kind in {**SLOTS, "transforms.prores.residual_schedule": "residual_schedule"}.items():
        for name, component in built_in(kind).items():
            yield kind, name, key, [f"--{key}.name={name}", *needed(component, key)]
    for section, kind in SETS.items():
        for name in built_in(kind):
            yield kind, name, f"{section}.{name}", [f"--{section}.{name}.enabled=true"]


PLACES = {f"{kind}.{name}": (key, overrides) for kind, name, key, overrides in places()}


def other(value: Any) -> Any:
    """Another value of the same type, as far as there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return [*value, "x"] if isinstance(value, list) else 1


def test_there_is_a_place_for_each_component_of_each_kind() -> None:
    assert set(PLACES) == {f"{kind}.{name}" for kind in KINDS for name in built_in(kind)}
    inside = [
        slot_kind(info)
        for kind in KINDS
        for component in built_in(kind).values()
        for info in component.Config.model_fields.values()
    ]
    assert set(inside) == {None, "residual_schedule"}  # the one kind whose components are inside of others


@pytest.mark.parametrize("component", PLACES)
def test_each_key_that_must_stay_is_refused_by_name_and_each_other_goes_on(component: str) -> None:
    """Changed alone in what the checkpoint says, so that no other fault can be the reason."""
    place, overrides = PLACES[component]
    recipe = recipe_of(*overrides)
    assert changes_since(recipe, recipe.to_dict()) == ([], [])
    flat = flatten(recipe.to_dict())
    assert any(dotted(key).startswith(f"{place}.") for key in flat)
    for key, value in flat.items():
        earlier = copy.deepcopy(recipe.to_dict())
        *tables, name = key
        reduce(dict.__getitem__, tables, earlier)[name] = other(value)
        errors, notes = changes_since(recipe, earlier)
        if must_stay(dotted(key)):
            assert [error.key for error in errors] == [dotted(key)] and notes == [], key
            assert "when the checkpoint was written and must stay so" in str(errors[0])
        else:
            assert errors == [] and len(notes) == 1 and notes[0].startswith(f"{dotted(key)}: "), key


@pytest.mark.parametrize("section", ["model", "tokenizer", "dataset", "loss"])
def test_another_component_is_refused_by_its_name(section: str) -> None:
    earlier = recipe_of().to_dict()
    earlier[section] = {"name": "another", "its_own_key": 3}
    errors, _ = changes_since(recipe_of(), earlier)
    assert f"{section}.name" in [error.key for error in errors]
