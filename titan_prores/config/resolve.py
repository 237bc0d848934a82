"""From a tree of values to a typed `Recipe`.

`resolve` works in two passes. The first checks everything that the engine itself owns and needs no torch; the second
imports plug-ins and components and checks their own sections. A pass does not end at its first fault: a `Resolver`
collects them, so that one start of a command names all of them.

Where to look: `sources` reads files into a Tree and knows where each value came from, `sections` and `setting_types`
say what a key may hold, `registry` finds the class that a table names, and `layout` fits batch and mesh to the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from titan_prores.config import registry
from titan_prores.config.component_spec import ComponentSpec
from titan_prores.config.engine_sections import ENGINE_SECTIONS, SECTIONS, Parallelism, Training
from titan_prores.config.errors import ConfigError, ConfigErrors, counted, nearest, shown
from titan_prores.config.keys import Key, dotted, split_key
from titan_prores.config.kinds import KINDS, SETS, SLOTS
from titan_prores.config.layout import data_parallel_size, global_batch_size, plan_mesh
from titan_prores.config.paths import PathRule, located
from titan_prores.config.recipe import Recipe
from titan_prores.config.sections import Section, slot_kind
from titan_prores.config.setting_types import (
    alternatives,
    choices,
    inner_type,
    is_enum,
    is_section,
    plain,
    shaped,
    type_name,
    type_of,
    with_paths,
)
from titan_prores.config.sources import Tree
from titan_prores.config.torchtitan_keys import TORCHTITAN_KEYS, with_our_name


def resolve(tree: Tree, world_size: int = 1) -> Recipe:
    """Check and type a whole recipe.

    Args:
        tree: what `sources.load` read.
        world_size: number of ranks that the mesh and batch sizes must fit.

    Raises:
        ConfigErrors: every fault of the first pass that has any.
    """
    return Resolver(tree).recipe(world_size)


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
            errors.append(error.at(entry.where))
    if errors:
        raise ConfigErrors(errors)


class Resolver:
    """Types the tables of one tree and collects their faults.

    Attributes:
        tree: the values, and where each came from.
        errors: faults found so far, each under its full key and with its place.
        origins: dotted key -> where its value came from; besides what the tree knows, what presets and checks did.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.errors: list[ConfigError] = list(tree.errors)
        self.origins: dict[str, str] = {dotted(key): origin for key, origin in tree.origins.items()}

    def add(self, key: Key, error: ConfigError) -> None:
        """Collect a fault of what is at `key`; the error's own key, where it has one, lies below that."""
        inner = split_key(error.key) or tuple(error.key.split(".")) if error.key else ()
        self.errors.append(error.under(dotted(key)).at(self.tree.origin((*key, *inner))))

    def refuse(self) -> None:
        """End a pass: raise its faults, each once, if there are any."""
        if self.errors:
            raise ConfigErrors(list({str(error): error for error in map(with_our_name, self.errors)}.values()))

    def section(
        self, section: type[Section], raw: Mapping[str, Any], key: Key, also: tuple[str, ...] = ()
    ) -> Section | None:
        """Validate one table; None after adding all its faults to `errors`.

        Args:
            section: the typed section.
            raw: the table as written.
            key: its path in the recipe.
            also: keys of the table that the caller has taken out, to be named among those that it may have.
        """
        return _Table(self, section, key, also).typed(raw)

    def component(self, kind: str, raw: Any, key: Key) -> ComponentSpec | None:
        """The component that a table names, with its typed settings; None after adding to `errors`.

        Args:
            kind: kind of component.
            raw: the table as written, without `enabled`; or only the component's name.
            key: its path in the recipe.
        """
        if isinstance(raw, str):
            raw = {"name": raw}
        if not isinstance(raw, Mapping):
            allowed = 'name = "...", and the settings of that component'
            self.add(key, ConfigError("", f"must be a table, not {type_of(raw)}", value=raw, allowed=allowed))
            return None
        name = raw.get("name")
        try:
            component = _lookup(kind, name)
        except ConfigErrors as several:
            self.errors.extend(several.errors)
            return None
        except ConfigError as error:
            if error.key == "name":
                self.add(key, error)
            else:  # it went wrong while components were imported
                self.errors.append(error)
            return None
        settings = {setting: value for setting, value in raw.items() if setting != "name"}
        also = ("name", "enabled") if KINDS[kind].many else ("name",)
        config = self.section(component.Config, settings, key, also)
        return None if config is None else ComponentSpec(kind, name, component, config, dotted(key))

    def recipe(self, world_size: int) -> Recipe:
        """As `resolve`."""
        sections = self._first_pass(world_size)
        load_plugins(self.tree)
        slots, sets, disabled = self._second_pass(sections["training"])
        imports = dict.fromkeys(
            str(registry.plugin_file(entry.reference, entry.folder) or entry.reference) for entry in self.tree.imports
        )
        return Recipe(
            **sections, slots=slots, sets=sets, disabled=disabled, origins=self.origins, imports=tuple(imports)
        )

    # --- First pass: what the engine itself owns ----------------------------------------------------------------------

    def _first_pass(self, world_size: int) -> dict[str, Section]:
        self._refuse_sweep()
        for name, table in self.tree.values.items():
            if name not in SECTIONS:
                self._add_unknown(name, table)
            elif not isinstance(table, dict):
                problem, allowed = f"must be a table, not {type_of(table)}", f"[{name}] and its keys below"
                self.add((name,), ConfigError("", problem, value=table, allowed=allowed))
        sections = {name: self._engine_section(name) for name in ENGINE_SECTIONS}
        if sections["parallelism"] is not None and sections["training"] is not None:
            self._check_layout(sections["parallelism"], sections["training"], world_size)
        self.refuse()
        return sections

    def _refuse_sweep(self) -> None:
        """One error for a sweep file, which has the keys of a recipe nowhere, instead of one for each of its keys."""
        recipe = self.tree.values.get("recipe")
        if isinstance(recipe, str) and self.tree.values.keys() & {"folder", "axes", "grids"}:
            where = self.tree.origin(("recipe",)) or ""
            allowed = f"titan-prores sweep {where.rpartition(':')[0]}, or the recipe that it names, {recipe}"
            problem = "this file is a sweep, not a recipe"
            raise ConfigErrors([ConfigError("", problem, where=where, allowed=allowed)])

    def _engine_section(self, name: str) -> Section | None:
        section, raw = ENGINE_SECTIONS[name], self.tree.values.get(name, {})
        if not isinstance(raw, dict):
            return None
        if name not in SETS:
            return self.section(section, raw, (name,))
        # Tables in it name components and belong to the second pass.
        raw = {key: value for key, value in raw.items() if not isinstance(value, dict) or key in section.model_fields}
        found = len(self.errors)
        typed = self.section(section, raw, (name,))
        allowed = f"{', '.join(sorted(section.model_fields))}, or a table [{name}.<component>]"
        self.errors[found:] = [
            error.but(allowed=allowed) if error.problem == "unknown key" and error.nearest is None else error
            for error in self.errors[found:]
        ]
        return typed

    def _add_unknown(self, name: str, table: Any) -> None:
        """Errors for what stands at the top level and is not a section of ours."""
        is_table = isinstance(table, dict)
        if theirs := [key for key in table if f"{name}.{key}" in TORCHTITAN_KEYS] if is_table else []:
            for key in theirs:
                self.add((name, key), ConfigError("", "unknown key", value=table[key]))
            return
        hint = nearest(name, SECTIONS)
        if hint is None or not is_table:
            keys = {key: f"{known}.{key}" for known, section in ENGINE_SECTIONS.items() for key in section.model_fields}
            hint = keys.get(nearest(name, keys) or "", hint)
        problem, value = ("unknown section", ...) if is_table else ("unknown key", table)
        self.add((name,), ConfigError("", problem, value=value, nearest=hint, allowed=None if hint else SECTIONS))

    def _check_layout(self, parallelism: Parallelism, training: Training, world_size: int) -> None:
        try:
            global_batch_size(training, data_parallel_size(plan_mesh(parallelism, world_size)))
        except (ConfigError, ConfigErrors) as found:
            for error in getattr(found, "errors", [found]):
                first = error.key.partition(" and ")[0]
                self.errors.append(error.at(self.tree.origin(tuple(first.split(".")))))

    # --- Second pass: components --------------------------------------------------------------------------------------

    def _second_pass(
        self, training: Training
    ) -> tuple[dict[str, ComponentSpec], dict[str, tuple[ComponentSpec, ...]], dict[str, tuple[ComponentSpec, ...]]]:
        """Section -> its component; its components that are on; those that are off."""
        slots = {
            section: spec
            for section, kind in SLOTS.items()
            if (spec := self.component(kind, self.tree.values.get(section, {}), (section,))) is not None
        }
        found = {section: self._set(section, kind) for section, kind in SETS.items()}
        sets, disabled = ({section: each[which] for section, each in found.items()} for which in (0, 1))
        if "checkpoint" in slots:
            self._check_checkpoint(slots, training)
        self._check_combinations((*sets["transforms"], *sets["parallelism"]))
        self.refuse()
        return slots, sets, disabled

    def _set(self, section: str, kind: str) -> tuple[tuple[ComponentSpec, ...], tuple[ComponentSpec, ...]]:
        """Components of a section that has a table for each: those that are on, and those that are off."""
        on, off = [], []
        engine_keys = ENGINE_SECTIONS[section].model_fields if section in ENGINE_SECTIONS else {}
        # By name: the order of tables in a file means nothing.
        for name, raw in sorted(self.tree.values.get(section, {}).items()):
            key = (section, name)
            if name in engine_keys:
                continue
            if not isinstance(raw, dict):
                if section not in ENGINE_SECTIONS:  # elsewhere the first pass has refused it
                    problem = f"must be a table, not {type_of(raw)}"
                    allowed = "enabled = true or false, and the settings of the component"
                    self.add(key, ConfigError("", problem, value=raw, allowed=allowed))
                continue
            enabled = self._enabled(raw.get("enabled", True), key)
            settings = {"name": name, **{setting: value for setting, value in raw.items() if setting != "enabled"}}
            if (spec := self.component(kind, settings, key)) is not None:
                (on if enabled else off).append(spec)
            # On because its table is there.
            self.origins.setdefault(dotted((*key, "enabled")), self.tree.introduced.get(key, "default"))
        return tuple(on), tuple(off)

    def _enabled(self, value: Any, key: Key) -> bool:
        if not isinstance(value, bool):
            hint = str(value).lower() if str(value).lower() in ("true", "false") else None
            problem = f"must be of type bool, not {type_of(value)}"
            self.add(key, ConfigError("enabled", problem, value=value, nearest=hint))
        return bool(value)

    def _check_combinations(self, transforms: tuple[ComponentSpec, ...]) -> None:
        """Let each transform check its settings against what the others do."""
        for spec in transforms:
            others = [
                each for other in transforms if other is not spec for each in other.component.capabilities(other.config)
            ]
            try:
                spec.component.check_combination(spec.config, others)
            except ConfigError as error:
                self.add(split_key(spec.key), error)

    def _check_checkpoint(self, slots: Mapping[str, ComponentSpec], training: Training) -> None:
        """Refuse what needs checkpoints where they are off, and to rank them where that cannot be done."""
        checkpoint = slots["checkpoint"].config
        if checkpoint.enabled:
            if "validation" in slots:
                self._check_ranking(slots, training)
            return
        if training.on_nonfinite == "rewind":
            problem = "needs checkpoints to go back to, and checkpoint.enabled is false"
            self.add(("training", "on_nonfinite"), ConfigError("", problem, value="rewind", allowed="stop, skip"))
        if (source := checkpoint.weights_from()) is not None:
            problem = f"the weights are to come from {source}, which takes checkpoints to be on"
            allowed = "true; checkpoint.interval may be as long as the run"
            self.add(("checkpoint", "enabled"), ConfigError("", problem, value=False, allowed=allowed))

    def _check_ranking(self, slots: Mapping[str, ComponentSpec], training: Training) -> None:
        """Refuse to rank checkpoints by a validation loss that none of them, or the last alone, will have."""
        checkpoint, validation = slots["checkpoint"].config, slots["validation"].config
        if (key := checkpoint.needs_validation()) is None:
            return
        common = math.lcm(checkpoint.interval, validation.freq)
        if not validation.enabled:
            problem = "ranks by validation loss, and validation.enabled is false"
            allowed = "0, or validation.enabled = true"
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
        else:
            return
        value = getattr(checkpoint, key)
        self.add(("checkpoint", key), ConfigError("", problem, value=value, allowed=allowed))


def _lookup(kind: str, name: Any) -> type:
    if name is None:
        raise ConfigError("name", "is required", allowed=registry.names(kind))
    if not isinstance(name, str):
        problem = f"must be of type string, not {type_of(name)}"
        raise ConfigError("name", problem, value=name, allowed=registry.names(kind))
    return registry.lookup(kind, name)


class _Table:
    """One table while it is typed.

    Attributes:
        resolver: takes its faults.
        section: what it is to become.
        key: its path in the recipe.
        also: keys that it may have besides the section's.
        reported: its keys that have their error already, so that what pydantic says of them is left out.
    """

    def __init__(self, resolver: Resolver, section: type[Section], key: Key, also: tuple[str, ...]) -> None:
        self.resolver, self.section, self.key, self.also = resolver, section, key, also
        self.reported: set[str] = set()

    def typed(self, raw: Mapping[str, Any]) -> Section | None:
        """The section made of the table as it is written; None after adding to the errors of the resolver."""
        found = len(self.resolver.errors)
        values = with_paths(self._in_force(raw), self.section, self._located)
        try:
            self._fill_in_preset(values)
            self._resolve_slots(values)
            typed = self.section.model_validate(shaped(values, self.section))
        except ValidationError as error:
            self._report(error, values)
        except Exception as error:  # a component's own check that failed in a way that pydantic does not know
            text = " ".join(f"{type(error).__name__}: {error}".split())
            fault = ConfigError("", f"the checks of {self.section.__qualname__} failed: {text}")
            fault.__cause__ = error
            self.resolver.add(self.key, fault)
        if len(self.resolver.errors) > found:
            return None
        self._note_overridden(values, typed)
        return typed

    def _in_force(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The values without those that a later file displaced: of another component, or one of its alternatives."""
        tree, fields = self.resolver.tree, self.section.model_fields
        values = {name: raw[name] for name in raw if name in fields or (*self.key, name) not in tree.outdated}
        for group in self.section.alternatives:
            layers = {name: tree.layers.get((*self.key, name), 0) for name in group if name in values}
            for name, layer in layers.items():
                if layer < max(layers.values()):
                    del values[name]
        return values

    def _located(self, text: str, rule: PathRule, inner: Key) -> str:
        key = (*self.key, *inner)
        try:
            return located(text, self.resolver.tree.folder_of(key), rule)
        except ConfigError as error:
            self.resolver.add(key, error)
            self.reported.add(inner[0])
            return text

    def _fill_in_preset(self, values: dict[str, Any]) -> None:
        try:
            preset = self.section.presets(values)
        except ConfigError as error:
            self.resolver.add(self.key, error)
            # What the preset would have filled in is not missing.
            required = {name for name, info in self.section.model_fields.items() if info.is_required()}
            self.reported |= {error.key.partition(".")[0], *(required - values.keys())}
            return
        for name, (value, origin) in preset.items():
            if name not in values:
                values[name] = value
                self.resolver.origins[dotted((*self.key, name))] = origin

    def _resolve_slots(self, values: dict[str, Any]) -> None:
        for name, info in self.section.model_fields.items():
            if kind := slot_kind(info):
                table = values.get(name, info.default)
                if isinstance(table, Mapping):
                    table = {**info.default, **table}
                values[name] = self.resolver.component(kind, table, (*self.key, name))
                if values[name] is None:
                    self.reported.add(name)

    def _report(self, error: ValidationError, values: Mapping[str, Any]) -> None:
        seen: set[Key] = set()
        for fault in error.errors(include_url=False):
            declaration = _declaration(self.section, tuple(map(str, fault["loc"])))
            place = declaration.place
            if (place and place[0] in self.reported) or place in seen:
                continue
            if len(alternatives(declaration.annotation)) > 1:  # has a fault for each of the types
                seen.add(place)
                fault = {**fault, "input": _at(values, place)}
            also = self.also if len(place) == 1 else ()
            self.resolver.add((*self.key, *place), _in_our_words(fault, declaration, (*self.key, *place), also))

    def _note_overridden(self, values: Mapping[str, Any], typed: Section) -> None:
        """Keep what was written where a check of the section's own has replaced it."""
        for name, value in values.items():
            if isinstance(value, str) and getattr(typed, name) != value:
                key = (*self.key, name)
                origin = self.resolver.origins.get(dotted(key)) or self.resolver.tree.origin(key)
                self.resolver.origins[dotted(key)] = f"{origin} has {shown(value)}, which other keys override"


class _Declaration(NamedTuple):
    """What is declared for a fault's location; field and type are None where nothing is."""

    place: Key
    section: type[Section]  # that it lies in
    info: FieldInfo | None
    annotation: Any


def _declaration(section: type[Section], location: Key) -> _Declaration:
    """Walk through nested sections, lists and tables to a location.

    The place ends at a choice of types, of which pydantic has a fault for each.
    """
    info, annotation = None, None
    for depth, name in enumerate(location):
        if depth == 0 or is_section(annotation):
            section = annotation if depth else section
            info = section.model_fields.get(name)
            annotation = info.annotation if info else None
        else:
            annotation = inner_type(annotation, name)
            if annotation is None:
                return _Declaration(location, section, None, None)
        options = alternatives(annotation)
        if len(options) > 1:
            return _Declaration(location[: depth + 1], section, info, annotation)
        (annotation,) = options
    return _Declaration(location, section, info, annotation)


def _in_our_words(fault: Mapping[str, Any], declared: _Declaration, key: Key, also: tuple[str, ...]) -> ConfigError:
    """A pydantic fault of what is at `key`, as an error without a key; `also` as for `Resolver.section`."""
    info, annotation = declared.info, declared.annotation
    value, kind = plain(fault["input"]), fault["type"]
    wanted = type_name(annotation) if annotation is not None else None
    if kind == "extra_forbidden":
        known = [*declared.section.model_fields, *also]
        hint = nearest(key[-1], known)
        allowed = None if hint else sorted(known) or "no keys at all"
        hint = dotted((*key[:-1], hint)) if hint else None
        return ConfigError("", "unknown key", value=value, nearest=hint, allowed=allowed)
    if kind == "missing":
        about = f"{wanted}: {info.description}" if info and info.description else wanted
        return ConfigError("", "is required", allowed=about)
    if kind in ("value_error", "assertion_error"):
        problem = str(fault["ctx"]["error"]) or "is refused"
        return ConfigError("", problem, value=value if declared.place else ...)  # of one key, not of the whole table
    words = choices(annotation)
    hint = nearest(value, words) if isinstance(value, str) and words else None
    if kind == "literal_error" or is_enum(annotation):
        allowed = wanted.replace(" | ", ", ") if wanted else fault["ctx"]["expected"]
        return ConfigError("", "not one of the choices", value=value, allowed=allowed, nearest=hint)
    if len(alternatives(annotation)) > 1:
        return ConfigError("", f"must be of type {wanted}", value=value, nearest=hint)
    if (kind.endswith("_type") or kind in ("is_instance_of", "sequence_str")) and wanted:
        hint = value.lower() if wanted == "bool" and str(value).lower() in ("true", "false") else None
        return ConfigError("", f"must be of type {wanted}, not {type_of(value)}", value=value, nearest=hint)
    return ConfigError("", _constraint(fault), value=value)


def _constraint(fault: Mapping[str, Any]) -> str:
    """What a value of the right type must be as well."""
    if fault["type"] in ("too_short", "string_too_short"):
        what = "entry" if fault["type"] == "too_short" else "character"
        return f"must have at least {fault['ctx']['min_length']} {what}"
    if fault["type"] == "too_long":
        return f"must have at most {counted(fault['ctx']['max_length'], 'value')}"
    return fault["msg"].replace("Input should", "must").replace("must be a valid", "must be of type")


def _at(values: Any, location: Key) -> Any:
    """The value at a location of nested tables and lists."""
    for name in location:
        values = values[int(name)] if isinstance(values, (list, tuple)) else values[name]
    return values
