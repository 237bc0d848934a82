"""TOML files and command-line overrides to one tree of values, each with the place it came from.

Also the typed sections (`Section`, `setting`, `slot`) that engine and components declare their keys with. Knows
nothing of torch or of any component by name.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from titan_prores.errors import ConfigError, ConfigErrors, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Key = tuple[str, ...]


# --- Typed sections -----------------------------------------------------------------------------------------------


class Section(BaseModel):
    """Base of every config section: frozen, no unknown keys, no silent conversion (a bool is not an int)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True,
        protected_namespaces=(),
    )  # fmt: skip

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Values for keys that are not `given`, and what to call their origin; a model's flavors work this way.

        Raises:
            ConfigError: a key that selects the preset has no such preset.
        """
        return {}, ""


def setting(
    default: Any = ...,
    help: str = "",
    *,
    unit: str | None = None,
    on_resume: Literal["same", "free"] | None = None,
    **constraints: Any,
) -> Any:
    """Declare one key of a `Section`.

    Args:
        default: value when the recipe has none; leave out for a key that must be given.
        help: what the key means, shown by `--help <kind>.<name>`.
        unit: of a number, such as "steps" or "seconds".
        on_resume: whether a resumed run must have the `same` value or is `free` to change it; None takes what the
            kind of component says.
        constraints: pydantic's `gt`, `ge`, `lt`, `le`, `min_length`, `pattern` ...
    """
    extra = {"unit": unit, "on_resume": on_resume}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


def slot(kind: str, default: str, help: str = "") -> Any:
    """Declare a key of a `Section` that holds another component of `kind`: a table with `name` and its settings."""
    return Field({"name": default}, description=help, json_schema_extra={"slot": kind}, validate_default=False)


def one_of(value: str, choices: Iterable[str]) -> str:
    """For a pydantic validator: `value` if it is one of the choices, else ValueError that names them.

    For choices that live in a table; fixed ones are a `Literal`.
    """
    choices = list(choices)
    if value not in choices:
        hint = nearest(value, choices)
        raise ValueError(
            f"is none of the choices (allowed: {', '.join(choices)})" + (f"; did you mean {hint}?" if hint else "")
        )
    return value


def slot_kind(info: FieldInfo) -> str | None:
    """Kind of component that a field declared with `slot` takes; None for an ordinary setting."""
    return (info.json_schema_extra or {}).get("slot")


def type_name(annotation: Any) -> str:
    """A field's type as a recipe's author would say it: `int`, `"a" | "b"`, `list of string`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(a) for a in arguments if a is not type(None))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is not Ellipsis:
            return f"[{type_name(arguments[0])}, {type_name(arguments[1])}]"
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"table of {type_name(arguments[1])}"
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "table"
    return {str: "string", bool: "bool", int: "int", float: "float"}.get(
        annotation, getattr(annotation, "__name__", "?")
    )


# --- Values and where they came from ------------------------------------------------------------------------------


@dataclass
class Tree:
    """Merged values of a recipe before anything is typed.

    Attributes:
        values: nested tables, as TOML gives them.
        origins: dotted key as a tuple -> "file:line" or the command-line argument it came from.
        imports: plug-in references with the folder each is relative to.
        outdated: keys given for a component that a later file or override replaced by another; they are dropped
            where the new component has no such key.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    imports: list[tuple[str, Path]] = field(default_factory=list)
    outdated: set[Key] = field(default_factory=set)

    def origin(self, key: Key) -> str | None:
        """Place of the key, or of the nearest table around it that was written somewhere."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return None

    def merge(self, other: Tree) -> None:
        """Put `other` over this tree: tables merge, everything else is replaced.

        Raises:
            ConfigErrors: a table would replace a value or a value a table.
        """
        errors: list[ConfigError] = []
        self._merge_table(self.values, other.values, (), other, errors)
        if errors:
            raise ConfigErrors(errors)
        self.imports.extend(other.imports)
        self.outdated |= other.outdated

    def _merge_table(self, mine: dict, theirs: dict, key: Key, other: Tree, errors: list[ConfigError]) -> None:
        for name, value in theirs.items():
            here = (*key, name)
            origin = other.origins.get(here)
            if isinstance(value, dict) and isinstance(mine.get(name, {}), dict):
                table = mine.setdefault(name, {})
                # Another component is named: settings of the one before stay only where the new one has them too.
                if "name" in value and "name" in table and value["name"] != table["name"]:
                    self.outdated.update((*here, *k) for k in _flatten(table))
                if origin:
                    self.origins.setdefault(here, origin)
                self._merge_table(table, value, here, other, errors)
            elif isinstance(value, dict) != isinstance(mine.get(name, value), dict):
                kind = "a table" if isinstance(mine[name], dict) else "a value"
                errors.append(
                    ConfigError(".".join(here), f"is {kind} elsewhere in this recipe", value=value, where=origin)
                )
            else:
                mine[name] = value
                self.outdated.discard(here)
                if origin:
                    self.origins[here] = origin


_HEADER = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def _split_key(text: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", text))


def _key_lines(text: str) -> dict[Key, int]:
    """Line number of each table header and key, found by plain search; a key on an unusual line is just not found."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _split_key(header.group(1))
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_split_key(assignment.group(1))), number)
    return lines


def _flatten(values: Mapping[str, Any], key: Key = ()) -> list[Key]:
    keys = []
    for name, value in values.items():
        keys.append((*key, name))
        if isinstance(value, dict):
            keys.extend(_flatten(value, (*key, name)))
    return keys


def _shown_path(path: Path) -> str:
    """The path relative to the working directory where that is shorter and does not climb out of it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_file(path: Path, *, chain: tuple[Path, ...] = (), named_by: str | None = None) -> Tree:
    """Read one TOML file and, below it, the files its `base` names.

    Args:
        path: the file.
        chain: files being read above this one; a file that inherits from itself is refused.
        named_by: where the path was written, for the message when it does not exist.

    Raises:
        ConfigErrors: no such file, no valid TOML, an inheritance loop, or tables that contradict values.
    """
    shown = _shown_path(path)
    path = path.resolve()
    key = "base" if chain else "--config"

    def fail(problem: str, *, where: str | None = named_by, hint: str | None = None) -> ConfigErrors:
        return ConfigErrors([ConfigError(key, problem, value=shown, where=where, nearest=hint)])

    if path in chain:
        raise fail("inherits from itself: " + " -> ".join(p.name for p in (*chain, path)))
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        kind = "is a folder, not a TOML file" if path.is_dir() else "no such file"
        raise fail(kind, hint=nearest(path.name, siblings))
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise fail(f"is not UTF-8 text: {error}") from error
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigErrors([ConfigError("", f"not valid TOML: {error}", where=shown)]) from error

    lines = _key_lines(text)
    bases = values.pop("base", [])
    imports = values.pop("import", [])
    where = {name: f"{shown}:{lines[(name,)]}" if (name,) in lines else shown for name in ("base", "import")}
    errors = []
    for name, entries in (("base", bases), ("import", imports)):
        if not isinstance(entries, (list, str)) or not all(isinstance(e, str) for e in entries):
            errors.append(ConfigError(name, "must be a string or a list of strings", value=entries, where=where[name]))
    if errors:
        raise ConfigErrors(errors)

    tree = Tree()
    for base in [bases] if isinstance(bases, str) else bases:
        tree.merge(read_file(path.parent / base, chain=(*chain, path), named_by=where["base"]))
    own = Tree(values=values)
    for found in _flatten(values):
        own.origins[found] = f"{shown}:{lines[found]}" if found in lines else shown
    own.imports = [(entry, path.parent) for entry in ([imports] if isinstance(imports, str) else imports)]
    tree.merge(own)
    return tree


def parse_override(argument: str) -> Tree:
    """`--section.key=value` as a tree of one value.

    The value is TOML; a bare word that is not (`--model.flavor=debug`) is taken as a string.

    Raises:
        ConfigError: the argument is not of that form.
    """
    name, equals, text = argument.removeprefix("--").partition("=")
    key = _split_key(name) if name else ()
    if not argument.startswith("--") or not equals or len(key) < 1 or not all(key):
        raise ConfigError(argument, "is not an override", allowed="--section.key=value, the value as in TOML")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if set(parsed) == {"value"} else text
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(name, "the value is not valid TOML", value=text, where=f"--{name}") from None
        value = text
    tree = Tree(values={key[-1]: value})
    for part in reversed(key[:-1]):
        tree.values = {part: tree.values}
    for length in range(1, len(key) + 1):
        tree.origins[key[:length]] = f"--{name}"
    for inner in _flatten(value) if isinstance(value, dict) else []:
        tree.origins[(*key, *inner)] = f"--{name}"
    return tree


def load(path: Path | None, overrides: Sequence[str] = (), defaults: Path | None = None) -> Tree:
    """Defaults, then the recipe with its bases, then the overrides in order; later wins.

    Raises:
        ConfigErrors: every fault of the overrides, or the first file that cannot be read.
    """
    tree = Tree()
    if defaults is not None:
        tree.merge(read_file(defaults))
    if path is not None:
        tree.merge(read_file(path))
    errors: list[ConfigError] = []
    for argument in overrides:
        try:
            override = parse_override(argument)
            if ("base",) in override.origins:
                raise ConfigError("base", "belongs in a file, not on the command line", where="--base")
            entries = override.values.pop("import", [])
            entries = [entries] if isinstance(entries, str) else entries
            override.imports = [(str(entry), Path.cwd()) for entry in entries]
            tree.merge(override)
        except ConfigError as error:
            errors.append(error)
        except ConfigErrors as several:
            errors.extend(several.errors)
    if errors:
        raise ConfigErrors(errors)
    return tree
