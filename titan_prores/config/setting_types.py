"""Types of settings: what a recipe's author calls them, TOML values to them and back, and which ones a recipe can hold.

TOML has lists, tables, strings and numbers; a Config may ask for tuples, sets, paths or enums made of them.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import pathlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from titan_prores.config.keys import Key, inline
from titan_prores.config.paths import PathRule
from titan_prores.config.sections import Section, slot_kind

_WORDS = {str: "string", bool: "bool", int: "int", float: "float", dict: "table", list: "list", tuple: "list"}
_WORDS |= {set: "list", frozenset: "list", pathlib.Path: "path", type(None): "nothing"}

# What a list of TOML becomes where the type is one of these; an abstract one takes a tuple, which cannot be changed.
_COLLECTIONS = {list: list, tuple: tuple, set: set, frozenset: frozenset}
_COLLECTIONS |= {abstract: tuple for abstract in (collections.abc.Sequence, collections.abc.Collection)}
_TABLES = (dict, collections.abc.Mapping)


def declared(info: FieldInfo) -> Any:
    """A field's type with what `Annotated` said about it, which pydantic keeps apart."""
    return typing.Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, Section)


def is_enum(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, enum.Enum)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a value may have, without None: one unless it is a union."""
    return tuple(map(_bare, _members(annotation)))


def _members(annotation: Any) -> tuple[Any, ...]:
    """The same with what `Annotated` says about each."""
    if typing.get_origin(_bare(annotation)) in (typing.Union, types.UnionType):
        inside = typing.get_args(_bare(annotation))
        return tuple(member for inner in inside if inner is not type(None) for member in _members(inner))
    return (annotation,)


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def path_rule(annotation: Any) -> PathRule | None:
    """What kind of path a type stands for; None where it is something else."""
    if typing.get_origin(annotation) is typing.Annotated:
        return next((each for each in annotation.__metadata__ if isinstance(each, PathRule)), None)
    return PathRule() if annotation is pathlib.Path else None


def inner_type(annotation: Any, part: str) -> Any:
    """Type of the entry `part` of a list or table type; None where there is no such thing."""
    annotation = _bare(annotation)
    outer, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if outer in _TABLES and len(inside) == 2:
        return inside[1]
    if outer is tuple and Ellipsis not in inside:
        return inside[int(part)] if part.isdecimal() and int(part) < len(inside) else None
    return inside[0] if outer in _COLLECTIONS and inside else None


def choices(annotation: Any) -> list[str]:
    """The words among the values of a Literal or an Enum, also of one in a union."""
    if typing.get_origin(annotation) is Literal:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    if is_enum(annotation):
        return [member.value for member in annotation if isinstance(member.value, str)]
    return [choice for inner in typing.get_args(annotation) for choice in choices(inner)]


def type_name(annotation: Any) -> str:
    """A field's type as a recipe's author would say it: `int`, `"a" | "b"`, `list of string`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal or is_enum(annotation):
        values = arguments if origin is Literal else [member.value for member in annotation]
        return " | ".join(inline(value) for value in values)
    if origin is typing.Annotated:
        return "path" if path_rule(annotation) else type_name(arguments[0])
    if len(arguments) > 0 and origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(inner) for inner in _members(annotation))
    if origin is tuple and arguments[1:] != (Ellipsis,):
        return f"[{', '.join(map(type_name, arguments))}]"
    if origin in _COLLECTIONS:
        return f"list of {type_name(arguments[0])}"
    if origin in _TABLES:
        return f"table of {type_name(arguments[1])}"
    if is_section(annotation):
        return "table"
    return _WORDS.get(annotation, getattr(annotation, "__name__", "?"))


def type_of(value: Any) -> str:
    """The type of a value as a recipe's author would say it."""
    return _WORDS.get(type(value), type(value).__name__)


def with_paths(value: Any, annotation: Any, locate: Callable[[str, PathRule, Key], str], key: Key = ()) -> Any:
    """A value of TOML with each string that its type calls a path replaced by what `locate` makes of it and its key."""
    for option in _members(annotation):
        bare = typing.get_origin(_bare(option)) or _bare(option)
        if isinstance(value, str):
            if value in choices(option):
                return value
            if rule := path_rule(option):
                return locate(value, rule, key)
        elif isinstance(value, Mapping) and (is_section(bare) or bare in _TABLES):
            fields = bare.model_fields if is_section(bare) else {}
            return {
                name: with_paths(
                    inner, declared(fields[name]) if name in fields else inner_type(option, name), locate, (*key, name)
                )
                for name, inner in value.items()
            }
        elif isinstance(value, (list, tuple)) and bare in _COLLECTIONS:
            parts = map(str, range(len(value)))
            return [
                with_paths(inner, inner_type(option, part), locate, (*key, part))
                for part, inner in zip(parts, value, strict=True)
            ]
    return value


def shaped(value: Any, annotation: Any) -> Any:
    """A value of TOML as the type wants it: lists as tuples or sets, strings as paths and enums, tables inside too.

    What does not fit is left for the validation to refuse. Where the type does not say, lists become tuples, so that a
    frozen section cannot be changed through them.
    """
    options = alternatives(annotation)
    if len(options) != 1:
        converted = [(shaped(value, option), option) for option in options]
        return next((each for each, option in converted if _fits(each, option)), shaped(value, Any))
    (annotation,) = options
    bare = typing.get_origin(annotation) or annotation
    if isinstance(value, (list, tuple)):
        entries = [shaped(entry, inner_type(annotation, str(index)) or Any) for index, entry in enumerate(value)]
        try:
            return _COLLECTIONS.get(bare, tuple)(entries)
        except TypeError:  # what cannot be in a set
            return tuple(entries)
    if isinstance(value, Mapping):
        fields = annotation.model_fields if is_section(annotation) else {}
        return {
            name: shaped(inner, declared(fields[name]) if name in fields else inner_type(annotation, name) or Any)
            for name, inner in value.items()
        }
    if bare is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if is_enum(annotation) and type(value) in (str, int):
        return next((member for member in annotation if plain(member) == value), value)
    return value


def _fits(value: Any, annotation: Any) -> bool:
    try:
        _holding(annotation)(value=value)
    except ValidationError:
        return False
    return True


@functools.lru_cache(maxsize=256)
def _holding(annotation: Any) -> type[Section]:
    return create_model("Holding", __base__=Section, value=(annotation, ...))


def plain(value: Any) -> Any:
    """The reverse of `shaped`: what TOML and JSON can hold."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=lambda entry: (str(type(entry)), entry))
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, pathlib.PurePath) else value


def unusable(section: type[Section]) -> str | None:
    """Which field of a section no recipe could ever set or record, and why; None where there is none."""
    try:
        section.model_rebuild()
    except Exception as error:  # whatever evaluating the annotations raises
        return f"types that cannot be read: {' '.join(str(error).split())}"
    for name, info in section.model_fields.items():
        if slot_kind(info):
            continue
        if info.alias is not None or info.validation_alias is not None:
            return f"{name} with an alias: a key has the name of its field"
        if wrong := _unusable(info.annotation):
            return f"{name} of a type that a recipe cannot hold: {wrong}"
    return None


_LEAVES = (str, bool, int, float, pathlib.Path, type(None), Any, *_TABLES, *_COLLECTIONS)
USABLE = "str, bool, int, float, Literal, Enum, Path, Section, and list, tuple, set, dict[str, ...] and unions of them"


def _unusable(annotation: Any) -> str | None:
    """The part of a type that TOML or JSON has nothing for."""
    outer, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if outer is typing.Annotated:
        return _unusable(inside[0])
    if outer is Literal or is_enum(annotation):
        values = inside if outer is Literal else [member.value for member in annotation]
        return next((repr(value) for value in values if type(value) not in (str, int, bool, type(None))), None)
    if is_section(annotation):
        wrong = unusable(annotation)
        return wrong and f"{annotation.__qualname__} has {wrong}"
    if outer in _TABLES:
        if typing.get_origin(inside[0]) is not Literal and inside[0] is not str:
            return f"a table with keys of type {getattr(inside[0], '__name__', inside[0])}"
        return _unusable(inside[1])
    if outer in (typing.Union, types.UnionType) or outer in _COLLECTIONS:
        return next(filter(None, map(_unusable, (inner for inner in inside if inner is not Ellipsis))), None)
    return None if annotation in _LEAVES else getattr(annotation, "__name__", str(annotation))
