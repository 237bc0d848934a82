"""From raw tables to typed sections and `Part`s: a component's class together with its validated settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from titan_prores import registry
from titan_prores.config import Key, Section, Tree, slot_kind, type_name
from titan_prores.errors import ConfigError, nearest


@dataclass(frozen=True)
class Part:
    """A component chosen by a recipe, not yet built.

    Attributes:
        kind: kind of component.
        name: name it was asked for by.
        component: its class.
        config: its own typed, frozen settings.
        key: dotted path of its table in the recipe, put before the key of errors that it raises.
    """

    kind: str
    name: str
    component: type
    config: Section
    key: str = field(compare=False, default="")

    def build(self, **context: Any) -> Any:
        """An instance: the class called with its config and the context that its kind's protocol lists.

        Raises:
            ConfigError: a setting that only proves wrong now, under its full key.
        """
        try:
            return self.component(self.config, **context)
        except ConfigError as error:
            raise error.under(self.key) from error


def resolve_section(
    section: type[Section], raw: Mapping[str, Any], key: Key, tree: Tree, errors: list[ConfigError],
    origins: dict[str, str] | None = None,
) -> Section | None:  # fmt: skip
    """Validate one table. Faults are added to `errors`; returns None when there were any.

    Args:
        section: the typed section.
        raw: the table as written.
        key: its path in the recipe.
        tree: where values came from.
        errors: list that faults are appended to.
        origins: filled with dotted key -> origin for values that come from a preset.
    """
    fields = section.model_fields
    values = {n: v for n, v in raw.items() if n in fields or (*key, n) not in tree.outdated}
    try:
        preset, preset_origin = section.presets(values)
    except ConfigError as error:
        error.where = tree.origin((*key, *error.key.split(".")))
        errors.append(error.under(".".join(key)))
        return None
    for name, value in preset.items():
        if name not in values:
            values[name] = value
            if origins is not None:
                origins[".".join((*key, name))] = preset_origin

    found = len(errors)
    for name, info in fields.items():
        if kind := slot_kind(info):
            table = values.get(name, info.default)
            values[name] = resolve_part(kind, table, (*key, name), tree, errors, origins)
    if len(errors) > found:
        # Look at the other keys too, so that one pass reports every fault of the table.
        broken = {name for name, info in fields.items() if slot_kind(info) and values[name] is None}
        for name in broken:
            values[name] = Part.__new__(Part)
    try:
        typed = section.model_validate(_freeze(values))
    except ValidationError as error:
        errors.extend(_config_error(section, fault, key, tree) for fault in error.errors())
    return typed if len(errors) == found else None


def resolve_part(
    kind: str, raw: Any, key: Key, tree: Tree, errors: list[ConfigError], origins: dict[str, str] | None = None,
    name: str | None = None,
) -> Part | None:  # fmt: skip
    """The component that a table names, with its typed settings; None after adding to `errors`."""
    dotted = ".".join(key)
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, Mapping):
        errors.append(ConfigError(dotted, "must be a table", value=raw, where=tree.origin(key)))
        return None
    name = raw.get("name") if name is None else name
    if not isinstance(name, str):
        problem = "must be a string" if "name" in raw else "is required"
        errors.append(ConfigError(f"{dotted}.name", problem, allowed=registry.names(kind), where=tree.origin(key)))
        return None
    try:
        component = registry.lookup(kind, name)
    except ConfigError as error:
        error.where = error.where or tree.origin((*key, "name"))
        errors.append(error.under(dotted))
        return None
    settings = {n: v for n, v in raw.items() if n != "name"}
    config = resolve_section(component.Config, settings, key, tree, errors, origins)
    return None if config is None else Part(kind, name, component, config, dotted)


def _freeze(value: Any) -> Any:
    """Lists as tuples, so that a frozen section cannot be changed through them."""
    if isinstance(value, Mapping):
        return {name: _freeze(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(inner) for inner in value)
    return value


def _config_error(section: type[Section], fault: Mapping[str, Any], key: Key, tree: Tree) -> ConfigError:
    """A pydantic fault in our own words."""
    location = tuple(str(part) for part in fault["loc"])
    full = (*key, *location)
    dotted, where = ".".join(full), tree.origin(full)
    if fault["type"] == "extra_forbidden":
        known = _section_at(section, location[:-1]).model_fields
        hint = nearest(location[-1], known)
        return ConfigError(
            dotted, "unknown key", value=fault["input"], where=where,
            nearest=".".join((*full[:-1], hint)) if hint else None,
            allowed=None if hint else sorted(known),
        )  # fmt: skip
    if fault["type"] == "missing":
        return ConfigError(dotted, "is required", where=where)
    if fault["type"] == "value_error":
        value = {} if not location else {"value": fault["input"]}  # of one key, not of the whole table
        return ConfigError(dotted, str(fault["ctx"]["error"]), where=where, **value)
    if fault["type"] == "literal_error":
        info = section.model_fields.get(location[0]) if len(location) == 1 else None
        allowed = type_name(info.annotation).replace(" | ", ", ") if info else fault["ctx"]["expected"]
        choices = [word.strip('"') for word in allowed.split(", ")]
        hint = nearest(fault["input"], choices) if isinstance(fault["input"], str) else None
        return ConfigError(
            dotted, "is none of the choices", value=fault["input"], allowed=allowed, nearest=hint, where=where
        )
    message = fault["msg"]
    info = section.model_fields.get(location[0]) if location else None
    wanted = type_name(info.annotation) if info and len(location) == 1 else None
    if fault["type"].endswith("_type") and wanted:
        message = f"must be of type {wanted}, not {_toml_type(fault['input'])}"
    else:
        message = message.replace("Input should", "must").replace("must be a valid", "must be a")
    return ConfigError(dotted, message, value=fault["input"], where=where)


def _toml_type(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "string", dict: "table", tuple: "list", list: "list"}
    return names.get(type(value), type(value).__name__)


def _section_at(section: type[Section], location: tuple[str, ...]) -> type[Section]:
    """The nested section that a fault's location lies in: through tuples and tables of sections."""
    import typing

    for part in location:
        if part.isdigit() or part not in section.model_fields:
            continue
        annotation = section.model_fields[part].annotation
        inner = [a for a in (annotation, *typing.get_args(annotation)) if inspect.isclass(a) and issubclass(a, Section)]
        if inner:
            section = inner[0]
    return section


def dump(section: Section) -> dict[str, Any]:
    """A section as plain TOML-ready values; keys that are None are left out, parts become tables with `name`."""
    table: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = _plain(getattr(section, name))
        if value is not None:
            table[name] = value
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return {"name": value.name, **dump(value.config)}
    if isinstance(value, Section):
        return dump(value)
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


def resume_rules(section: Section, default: str) -> dict[str, str]:
    """Dotted key -> "same" | "free" for every leaf of a section, parts inside included."""
    rules: dict[str, str] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Part):
            inner = registry.KINDS[value.kind].on_resume
            rules[f"{name}.name"] = inner
            rules |= {f"{name}.{k}": r for k, r in resume_rules(value.config, inner).items()}
        else:
            rules[name] = (info.json_schema_extra or {}).get("on_resume") or default
    return rules
