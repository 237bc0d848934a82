"""From raw tables to typed sections and `Part`s: a component's class together with its validated settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from titan_prores.config import registry
from titan_prores.config.component_spec import Part
from titan_prores.config.errors import ConfigError, ConfigErrors, counted, nearest, shown
from titan_prores.config.keys import Key, dotted
from titan_prores.config.paths import PathRule, located
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


def resolve_section(
    section: type[Section],
    raw: Mapping[str, Any],
    key: Key,
    tree: Tree,
    errors: list[ConfigError],
    origins: dict[str, str] | None = None,
    also: tuple[str, ...] = (),
) -> Section | None:
    """Validate one table. Faults are added to `errors`, all of them; returns None when there were any.

    Args:
        section: the typed section.
        raw: the table as written.
        key: its path in the recipe.
        tree: where values came from.
        errors: list that faults are appended to.
        origins: filled with dotted key -> origin for values that come from a preset.
        also: keys of the table that the caller has taken out, to be named among those there are.
    """
    fields = section.model_fields
    values = {n: v for n, v in raw.items() if n in fields or (*key, n) not in tree.outdated}
    for group in section.alternatives:
        newest = max((tree.layers.get((*key, n), 0) for n in group if n in values), default=0)
        for name in group:
            if name in values and tree.layers.get((*key, name), 0) < newest:
                del values[name]
    found = len(errors)
    reported: set[str] = set()  # first parts of the keys that have their error already

    def locate(text: str, rule: PathRule, inner: Key) -> str:
        place = (*key, *inner)
        try:
            return located(text, tree.folder_of(place), rule)
        except ConfigError as error:
            error.where = tree.origin(place)
            errors.append(error.under(dotted(place)))
            reported.add(inner[0])
            return text

    values = with_paths(values, section, locate)
    try:
        preset = section.presets(values)
    except ConfigError as error:
        faulty = tuple(error.key.split(".")) if error.key else ()
        error.where = error.where or tree.origin((*key, *faulty))
        errors.append(error.under(dotted(key)))
        # What the preset would have filled in is not missing.
        preset = {n: (None, "") for n, info in fields.items() if info.is_required() and n not in values}
        reported |= {*faulty[:1], *preset}
    except Exception as error:
        errors.append(_own_fault(section, error, key, tree))
        return None
    for name, (value, origin) in preset.items():
        if name not in values:
            values[name] = value
            if origins is not None:
                origins[dotted((*key, name))] = origin

    for name, info in fields.items():
        if kind := slot_kind(info):
            table = values.get(name, info.default)
            if isinstance(table, Mapping) and "name" not in table:
                table = {**info.default, **table}
            values[name] = resolve_part(kind, table, (*key, name), tree, errors, origins)
            if values[name] is None:
                reported.add(name)
    try:
        typed = section.model_validate(shaped(values, section))
    except ValidationError as error:
        seen: set[Key] = set()
        for fault in error.errors(include_url=False):
            location, *declaration = _declaration(section, tuple(map(str, fault["loc"])))
            if (location and location[0] in reported) or location in seen:
                continue
            if len(alternatives(declaration[-1])) > 1:  # has a fault for each of the types
                seen.add(location)
                fault = {**fault, "input": _at(values, location)}
            errors.append(_config_error(location, *declaration, fault, key, tree, also))
    except Exception as error:
        errors.append(_own_fault(section, error, key, tree))
    if len(errors) > found:
        return None
    if origins is not None:
        for name, value in values.items():
            if isinstance(value, str) and getattr(typed, name) != value:  # changed by a check of its own
                origin = origins.get(dotted((*key, name))) or tree.origin((*key, name))
                origins[dotted((*key, name))] = f"{origin} has {shown(value)}, which other keys override"
    return typed


def _own_fault(section: type[Section], error: Exception, key: Key, tree: Tree) -> ConfigError:
    """A component's own check of its settings that failed in a way that is none of pydantic's."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    fault = ConfigError(dotted(key), f"the checks of {section.__qualname__} failed: {text}", where=tree.origin(key))
    fault.__cause__ = error
    return fault


def resolve_part(
    kind: str,
    raw: Any,
    key: Key,
    tree: Tree,
    errors: list[ConfigError],
    origins: dict[str, str] | None = None,
    name: Any = None,
    also: tuple[str, ...] = (),
) -> Part | None:
    """The component that a table names, with its typed settings; None after adding to `errors`.

    Args:
        kind: kind of component.
        raw: the table as written, or only the component's name.
        key: its path in the recipe.
        tree: where values came from.
        errors: list that faults are appended to.
        origins: filled with dotted key -> origin for values that come from a preset.
        name: name of the component where the table has none.
        also: keys of the table besides `name` that the caller has taken out.
    """
    where = tree.origin(key)
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, Mapping):
        errors.append(
            ConfigError(
                dotted(key),
                f"must be a table, not {type_of(raw)}",
                value=raw,
                where=where,
                allowed='name = "...", and the settings of that component',
            )
        )
        return None
    name = raw.get("name", name)
    try:
        if name is None:
            raise ConfigError("name", "is required", allowed=registry.names(kind))
        if not isinstance(name, str):
            raise ConfigError(
                "name", f"must be of type string, not {type_of(name)}", value=name, allowed=registry.names(kind)
            )
        component = registry.lookup(kind, name)
    except ConfigErrors as several:
        errors.extend(several.errors)
        return None
    except ConfigError as error:
        if error.key == "name":  # and not what went wrong while components were imported
            error.where = error.where or tree.origin((*key, "name"))
            error.under(dotted(key))
        errors.append(error)
        return None
    settings = {n: v for n, v in raw.items() if n != "name"}
    config = resolve_section(component.Config, settings, key, tree, errors, origins, ("name", *also))
    return None if config is None else Part(kind, name, component, config, dotted(key))


def _config_error(
    location: Key,
    owner: type[Section],
    info: FieldInfo | None,
    annotation: Any,
    fault: Mapping[str, Any],
    key: Key,
    tree: Tree,
    also: tuple[str, ...],
) -> ConfigError:
    """A pydantic fault in our own words; the first four are what `_declaration` found."""
    full = (*key, *location)
    name, where, value, kind = dotted(full), tree.origin(full), plain(fault["input"]), fault["type"]
    wanted = type_name(annotation) if annotation is not None else None
    if kind == "extra_forbidden":
        known = [*owner.model_fields, *(also if len(location) == 1 else ())]
        hint = nearest(location[-1], known)
        return ConfigError(
            name,
            "unknown key",
            value=value,
            where=where,
            nearest=dotted((*full[:-1], hint)) if hint else None,
            allowed=None if hint else sorted(known) or "no keys at all",
        )
    if kind == "missing":
        about = f"{wanted}: {info.description}" if info and info.description else wanted
        return ConfigError(name, "is required", where=where, allowed=about)
    if kind in ("value_error", "assertion_error"):
        shown = {} if not location else {"value": value}  # of one key, not of the whole table
        return ConfigError(name, str(fault["ctx"]["error"]) or "is refused", where=where, **shown)
    words = choices(annotation)
    if kind == "literal_error" or is_enum(annotation):
        hint = nearest(value, words) if isinstance(value, str) else None
        allowed = wanted.replace(" | ", ", ") if wanted else fault["ctx"]["expected"]
        return ConfigError(name, "not one of the choices", value=value, allowed=allowed, nearest=hint, where=where)
    if len(alternatives(annotation)) > 1:
        hint = nearest(value, words) if isinstance(value, str) and words else None
        return ConfigError(name, f"must be of type {wanted}", value=value, nearest=hint, where=where)
    if (kind.endswith("_type") or kind in ("is_instance_of", "sequence_str")) and wanted:
        hint = value.lower() if wanted == "bool" and str(value).lower() in ("true", "false") else None
        problem = f"must be of type {wanted}, not {type_of(value)}"
        return ConfigError(name, problem, value=value, nearest=hint, where=where)
    message = fault["msg"].replace("Input should", "must").replace("must be a valid", "must be of type")
    if kind in ("too_short", "string_too_short"):
        message = f"must have at least {fault['ctx']['min_length']} {'entry' if kind == 'too_short' else 'character'}"
    if kind == "too_long":
        message = f"must have at most {counted(fault['ctx']['max_length'], 'value')}"
    return ConfigError(name, message, value=value, where=where)


def _declaration(section: type[Section], location: Key) -> tuple[Key, type[Section], FieldInfo | None, Any]:
    """What is declared for a fault's location: where it is, the section it lies in, its field, and its type there.

    Walks through nested sections, lists and tables. The location ends at a choice of types, of which pydantic has a
    fault for each; field and type are None where the walk ends before the location.
    """
    info, annotation = None, None
    for depth, part in enumerate(location):
        if depth == 0 or is_section(annotation):
            section = annotation if depth else section
            info = section.model_fields.get(part)
            annotation = info.annotation if info else None
        else:
            annotation = inner_type(annotation, part)
            if annotation is None:
                return location, section, None, None
        options = alternatives(annotation)
        if len(options) > 1:
            return location[: depth + 1], section, info, annotation
        (annotation,) = options
    return location, section, info, annotation


def _at(values: Any, location: Key) -> Any:
    """The value at a location of nested tables and lists."""
    for part in location:
        values = values[int(part)] if isinstance(values, (list, tuple)) else values[part]
    return values
