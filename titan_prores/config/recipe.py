"""A run as data: engine sections, one component a slot, and the sets of transforms, parallelisms and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_prores.config.component_spec import ComponentSpec, ResumeRule, dump, resume_rules
from titan_prores.config.engine_sections import (
    ENGINE_SECTIONS,
    SECTIONS,
    Comm,
    Job,
    Metrics,
    Parallelism,
    Profiling,
    Training,
)
from titan_prores.config.errors import ConfigError, shown
from titan_prores.config.keys import Key, dotted, split_key
from titan_prores.config.kinds import KINDS, SETS


@dataclass(frozen=True)
class Recipe:
    """Everything a run is made of. A component is handed its own `ComponentSpec.config` and never this."""

    job: Job
    training: Training
    parallelism: Parallelism
    metrics: Metrics
    comm: Comm
    profiling: Profiling
    slots: Mapping[str, ComponentSpec]
    sets: Mapping[str, tuple[ComponentSpec, ...]]
    disabled: Mapping[str, tuple[ComponentSpec, ...]]
    origins: Mapping[str, str] = field(compare=False, default_factory=dict)
    imports: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as TOML-ready tables, every default filled in."""
        tables: dict[str, Any] = {"import": list(self.imports)} if self.imports else {}
        for section in SECTIONS:
            table = dump(getattr(self, section)) if section in ENGINE_SECTIONS else {}
            if section in self.slots:
                spec = self.slots[section]
                table = {"name": spec.name, **dump(spec.config)}
            for group, enabled in ((self.sets, True), (self.disabled, False)):
                for spec in group.get(section, ()):
                    label = split_key(spec.key)[-1]
                    component = {"name": spec.name} if spec.name != label else {}
                    table[label] = {"enabled": enabled, **component, **dump(spec.config)}
            tables[section] = table
        return tables

    def resume_rules(self) -> dict[Key, ResumeRule]:
        """Key -> whether a resumed run may change it."""
        rules: dict[Key, ResumeRule] = {}
        for section in ENGINE_SECTIONS:
            rules |= resume_rules(getattr(self, section), "free", (section,))
        for section, spec in self.slots.items():
            default = KINDS[spec.kind].on_resume
            rules[(section, "name")] = ResumeRule(default)
            rules |= resume_rules(spec.config, default, (section,))
        for specs in self.sets.values():
            for spec in specs:
                rules |= resume_rules(spec.config, KINDS[spec.kind].on_resume, split_key(spec.key))
        return rules


def flatten(table: Mapping[str, Any], key: Key = ()) -> dict[Key, Any]:
    """Key -> leaf value of nested tables."""
    flat: dict[Key, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, (*key, name))
        else:
            flat[(*key, name)] = value
    return flat


def differences(recipe: Recipe, earlier: Mapping[str, Any]) -> Iterator[tuple[Key, Key | None, Any, Any]]:
    """Compare the values of two recipes. A key that one of them lacks has its default there.

    Args:
        recipe: the recipe of now.
        earlier: `Recipe.to_dict()` of another one, perhaps of an earlier version.

    Yields:
        Key, that of the setting that it is or lies in (None where this version has no such setting), and the values of
        `earlier` and of now, of each key whose values differ; sorted by key.
    """
    rules, before, now = recipe.resume_rules(), flatten(earlier), flatten(recipe.to_dict())
    for key in sorted(before.keys() | now.keys()):
        prefixes = [key[:length] for length in range(len(key), 0, -1)]
        ruled = next((prefix for prefix in prefixes if prefix in rules), None)
        default = rules[ruled].default if ruled == key else None
        old, new = before.get(key, default), now.get(key, default)
        if old != new:
            yield key, ruled, old, new


def changes_since(recipe: Recipe, earlier: Mapping[str, Any]) -> tuple[list[ConfigError], list[str]]:
    """Compare with the resolved recipe that a checkpoint holds.

    A key that one of the two lacks has its default there, so that a later version may have more keys. Settings of a
    transform that was or is off, and of a component of another name, are free: they had or have no effect.

    Args:
        recipe: the recipe of the run that wants to resume.
        earlier: `Recipe.to_dict()` of the run that wrote the checkpoint.

    Returns:
        An error for each changed key that must be the same, and a line for each other change.
    """
    rules, before = recipe.resume_rules(), flatten(earlier)
    off = {key[:2] for key, on in before.items() if key[0] in SETS and key[2:] == ("enabled",) and not on}
    errors, notes = [], []
    for key, ruled, old, new in differences(recipe, earlier):
        same = ruled is not None and rules[ruled].rule == "same"
        if same and key[:2] not in off and any(k[: len(ruled) - 1] == ruled[:-1] for k in before):
            errors.append(
                ConfigError(
                    dotted(key),
                    f"was {shown(old)} when the checkpoint was written and must stay so",
                    value=new,
                    where=_origin(recipe.origins, key),
                )
            )
        else:
            notes.append(f"{dotted(key)}: {shown(old)} -> {shown(new)}")
    return errors, notes


def _origin(origins: Mapping[str, str], key: Key) -> str | None:
    """Place of a key or of the nearest table around it."""
    return next((origins[dotted(key[:n])] for n in range(len(key), 0, -1) if dotted(key[:n]) in origins), None)
