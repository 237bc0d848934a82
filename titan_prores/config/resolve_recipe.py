"""From a tree of values to a `Recipe`, in two passes.

The first checks everything that the engine itself owns and needs no torch; the second imports plug-ins and components
and checks their own sections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from titan_prores.config import registry
from titan_prores.config.component_spec import Part
from titan_prores.config.engine_sections import ENGINE_SECTIONS, SECTIONS, Training
from titan_prores.config.errors import ConfigError, ConfigErrors, nearest
from titan_prores.config.keys import dotted, split_key
from titan_prores.config.kinds import SETS, SLOTS
from titan_prores.config.layout import data_parallel_size, global_batch_size, plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve_part, resolve_section
from titan_prores.config.sections import Section
from titan_prores.config.setting_types import type_of
from titan_prores.config.sources import Tree
from titan_prores.config.torchtitan_keys import TORCHTITAN_KEYS, _use_our_names


def load_plugins(tree: Tree) -> None:
    """Import what installed packages and the recipe's `import` offer.

    Raises:
        ConfigErrors: those that cannot be imported, all of them.
    """
    errors: list[ConfigError] = []
    try:
        registry.load_entry_points()
    except ConfigErrors as several:
        errors.extend(several.errors)
    for entry in tree.imports:
        try:
            registry.load_plugin(entry.reference, entry.folder)
        except ConfigError as error:
            error.where = error.where or entry.where
            errors.append(error)
    _refuse_if_any(errors)


def _refuse_sweep(tree: Tree) -> None:
    """One error for a sweep file, which has the keys of a recipe nowhere, instead of one for each of its keys."""
    recipe = tree.values.get("recipe")
    if isinstance(recipe, str) and tree.values.keys() & {"folder", "axes", "grids"}:
        where = tree.origin(("recipe",)) or ""
        sweep = where.rpartition(":")[0]
        raise ConfigErrors(
            [
                ConfigError(
                    "",
                    "this file is a sweep, not a recipe",
                    where=where,
                    allowed=f"titan-prores sweep {sweep}, or the recipe that it names, {recipe}",
                )
            ]
        )


def _engine_sections(tree: Tree, errors: list[ConfigError]) -> dict[str, Section]:
    """First pass: unknown sections and every fault in the engine's own keys."""
    sections: dict[str, Section] = {}
    for name, table in tree.values.items():
        where = tree.origin((name,))
        if name not in SECTIONS:
            errors.extend(_unknown_section(name, table, tree))
        elif not isinstance(table, dict):
            errors.append(
                ConfigError(
                    name,
                    f"must be a table, not {type_of(table)}",
                    value=table,
                    where=where,
                    allowed=f"[{name}] and its keys below",
                )
            )
    for name, section in ENGINE_SECTIONS.items():
        raw = tree.values.get(name, {})
        if not isinstance(raw, dict):
            continue
        if name in SETS:
            # Sub-tables name components and belong to the second pass.
            raw = {k: v for k, v in raw.items() if not isinstance(v, dict) or k in section.model_fields}
        found: list[ConfigError] = []
        sections[name] = resolve_section(section, raw, (name,), tree, found)
        for error in found:
            if name in SETS and error.problem == "unknown key" and error.nearest is None:
                error.allowed = f"{', '.join(sorted(section.model_fields))}, or a table [{name}.<component>]"
        errors.extend(found)
    return sections


def _unknown_section(name: str, table: Any, tree: Tree) -> list[ConfigError]:
    """Errors for what stands at the top level and is no section of ours."""
    if isinstance(table, dict):
        known = [key for key in table if f"{name}.{key}" in TORCHTITAN_KEYS]
        if known:
            return [
                ConfigError(f"{name}.{key}", "unknown key", value=table[key], where=tree.origin((name, key)))
                for key in known
            ]
        fault = ConfigError(dotted((name,)), "unknown section", where=tree.origin((name,)))
    else:
        fault = ConfigError(dotted((name,)), "unknown key", value=table, where=tree.origin((name,)))
    fault.nearest = nearest(name, SECTIONS)
    if fault.nearest is None or not isinstance(table, dict):
        keys = {key: f"{section}.{key}" for section, fields in ENGINE_SECTIONS.items() for key in fields.model_fields}
        key = nearest(name, keys)
        fault.nearest = keys[key] if key else fault.nearest
    if fault.nearest is None:
        fault.allowed = SECTIONS
    return [fault]


def _resolve_set(
    section: str, kind: str, tree: Tree, errors: list[ConfigError], origins: dict[str, str]
) -> tuple[list[Part], list[Part]]:
    on, off = [], []
    tables = tree.values.get(section, {})
    engine_keys = ENGINE_SECTIONS[section].model_fields if section in ENGINE_SECTIONS else {}
    # By name: the order of tables in a file means nothing.
    for name, raw in sorted(tables.items()):
        if name in engine_keys:
            continue
        key = (section, name)
        if not isinstance(raw, dict):
            if section not in ENGINE_SECTIONS:  # elsewhere the first pass has refused it
                errors.append(
                    ConfigError(
                        dotted(key),
                        f"must be a table, not {type_of(raw)}",
                        value=raw,
                        where=tree.origin(key),
                        allowed="enabled = true or false, and the settings of the component",
                    )
                )
            continue
        enabled = raw.get("enabled", True)
        if not isinstance(enabled, bool):
            hint = str(enabled).lower() if str(enabled).lower() in ("true", "false") else None
            errors.append(
                ConfigError(
                    dotted((*key, "enabled")),
                    f"must be of type bool, not {type_of(enabled)}",
                    value=enabled,
                    where=tree.origin((*key, "enabled")),
                    nearest=hint,
                )
            )
        settings = {k: v for k, v in raw.items() if k != "enabled"}
        part = resolve_part(kind, settings, key, tree, errors, origins, name=name, also=("enabled",))
        if part is not None:
            (on if enabled else off).append(part)
        # On because its table is there.
        origins.setdefault(dotted((*key, "enabled")), tree.introduced.get(key, "default"))
    return on, off


def _check_combinations(transforms: list[Part], errors: list[ConfigError], tree: Tree) -> None:
    present = {part.name for part in transforms}
    for part in transforms:
        where = tree.origin(split_key(part.key))
        for needed in getattr(part.component, "needs", ()):
            if needed not in present:
                errors.append(ConfigError(part.key, f"needs the transform {needed}", where=where))
        for other in getattr(part.component, "conflicts", ()):
            if other in present:
                errors.append(ConfigError(part.key, f"does not work together with {other}", where=where))
        if hasattr(part.component, "check_beside"):
            others = {other.name: other.config for other in transforms if other is not part}
            try:
                part.component.check_beside(part.config, others)
            except ConfigError as error:
                error.under(part.key)
                error.where = error.where or tree.origin(split_key(error.key)) or where
                errors.append(error)


def resolve(tree: Tree, world_size: int = 1) -> Recipe:
    """Check and type a whole recipe.

    Args:
        tree: what `config.load` read.
        world_size: number of ranks that the mesh and batch sizes must fit.

    Raises:
        ConfigErrors: every fault of the first pass that has any.
    """
    _refuse_sweep(tree)
    errors = list(tree.errors)
    sections = _engine_sections(tree, errors)
    if sections.get("parallelism") is not None and sections.get("training") is not None:
        faults: list[ConfigError] = []
        try:
            ranks = data_parallel_size(plan_mesh(sections["parallelism"], world_size))
            global_batch_size(sections["training"], ranks)
        except ConfigErrors as several:
            faults.extend(several.errors)
        except ConfigError as error:
            faults.append(error)
        for fault in faults:
            fault.where = tree.origin(tuple(fault.key.partition(" and ")[0].split(".")))
        errors.extend(faults)
    _refuse_if_any(errors)

    origins = {dotted(key): origin for key, origin in tree.origins.items()}
    load_plugins(tree)

    slots: dict[str, Part] = {}
    for section, kind in SLOTS.items():
        part = resolve_part(kind, tree.values.get(section, {}), (section,), tree, errors, origins)
        if part is not None:
            slots[section] = part
    sets: dict[str, tuple[Part, ...]] = {}
    disabled: dict[str, tuple[Part, ...]] = {}
    for section, kind in SETS.items():
        on, off = _resolve_set(section, kind, tree, errors, origins)
        sets[section], disabled[section] = tuple(on), tuple(off)
    if (
        sections["training"].on_nonfinite == "rewind"
        and "checkpoint" in slots
        and not slots["checkpoint"].config.enabled
    ):
        errors.append(
            ConfigError(
                "training.on_nonfinite",
                "needs checkpoints to go back to, and checkpoint.enabled is false",
                value="rewind",
                allowed="stop, skip",
                where=tree.origin(("training", "on_nonfinite")),
            )
        )
    if "checkpoint" in slots and not slots["checkpoint"].config.enabled:
        if (source := slots["checkpoint"].config.weights_from()) is not None:
            errors.append(
                ConfigError(
                    "checkpoint.enabled",
                    f"the weights are to come from {source}, which takes checkpoints to be on",
                    value=False,
                    allowed="true; checkpoint.interval may be as long as the run",
                    where=tree.origin(("checkpoint", "enabled")),
                )
            )
    elif {"checkpoint", "validation"} <= slots.keys():
        _check_ranking(slots, sections["training"], errors, tree)
    _check_combinations([*sets["transforms"], *sets["parallelism"]], errors, tree)
    _refuse_if_any(errors)
    imports = dict.fromkeys(
        str(registry.plugin_file(entry.reference, entry.folder) or entry.reference) for entry in tree.imports
    )
    return Recipe(**sections, slots=slots, sets=sets, disabled=disabled, origins=origins, imports=tuple(imports))


def _check_ranking(slots: Mapping[str, Part], training: Training, errors: list[ConfigError], tree: Tree) -> None:
    """Refuse to rank checkpoints by a validation loss that none of them, or the last alone, will have."""
    checkpoint, validation = slots["checkpoint"].config, slots["validation"].config
    if (key := checkpoint.needs_validation()) is None:
        return
    common = math.lcm(checkpoint.interval, validation.freq)
    problem = None
    if not validation.enabled:
        problem, allowed = (
            "ranks by validation loss, and validation.enabled is false",
            "0, or validation.enabled = true",
        )
    elif "dataset" in slots and slots["dataset"].config.validation_fraction == 0:
        problem = "ranks by validation loss, and dataset.validation_fraction = 0 holds no text out"
        allowed = "0, or a larger dataset.validation_fraction"
    elif common >= training.steps and checkpoint.interval_minutes is None and training.steps > checkpoint.interval:
        problem = (
            "ranks by validation loss, and no saved step but the last is validated: "
            f"saved every {checkpoint.interval}, validated every {validation.freq}, "
            f"both first in step {common} of {training.steps}"
        )
        allowed = "a checkpoint.interval that validation.freq divides"
    if problem is not None:
        value, where = getattr(checkpoint, key), tree.origin(("checkpoint", key))
        errors.append(ConfigError(f"checkpoint.{key}", problem, value=value, allowed=allowed, where=where))


def _refuse_if_any(errors: list[ConfigError]) -> None:
    """End a pass: raise its faults, each once, if there are any."""
    if errors:
        _use_our_names(errors)
        raise ConfigErrors(list({str(error): error for error in errors}.values()))
