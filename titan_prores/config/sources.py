"""TOML files and command-line overrides to one tree of values, each with the place it came from."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_prores.config.errors import ConfigError, ConfigErrors, nearest
from titan_prores.config.keys import Key, dotted, one_line, split_key
from titan_prores.config.paths import PathRule, located, refuse_impossible

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Recipes that come with the package. A link in a checkout, a folder where it is installed.
SHIPPED = Path(__file__).parents[1] / "train_configs"

# What a recipe says of itself alone: a recipe that inherits from it is another one.
NOT_INHERITED: tuple[Key, ...] = (("job", "description"),)


class Import(NamedTuple):
    """One entry of an `import` list."""

    reference: str
    folder: Path | None  # of the file that names it; None on the command line
    where: str


@dataclass
class Tree:
    """Merged values of a recipe before anything is typed.

    Attributes:
        values: nested tables, as TOML gives them.
        origins: key -> "file:line" or the command-line argument it came from; of a table, the latest that wrote in it.
        introduced: table -> the first that did.
        imports: plug-ins.
        outdated: keys given for a component that a later file or override replaced by another; they are dropped
            where the new component has no such key.
        layers: key -> number of the merge that brought it, ascending.
        folder: of the file that this was read from; None for the command line and for what was merged.
        folders: key -> folder of the file that brought it.
        errors: faults that do not stop the reading; `resolve` reports them with its own.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    introduced: dict[Key, str] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    outdated: set[Key] = field(default_factory=set)
    layers: dict[Key, int] = field(default_factory=dict)
    folder: Path | None = None
    folders: dict[Key, Path] = field(default_factory=dict)
    merges: int = 0
    errors: list[ConfigError] = field(default_factory=list)

    def origin(self, key: Key) -> str | None:
        """Place of the key, or of the nearest table around it that was written somewhere."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return None

    def drop(self, keys: Iterable[Key]) -> None:
        """Take single values out, where they are there."""
        for *tables, name in keys:
            table: Any = self.values
            for part in tables:
                table = table.get(part) if isinstance(table, dict) else None
            if isinstance(table, dict) and not isinstance(table.get(name), dict):
                table.pop(name, None)
                self.origins.pop((*tables, name), None)

    def folder_of(self, key: Key) -> Path | None:
        """Folder of the file that brought a key, or the list around it; None where it is of no file."""
        return next((self.folders[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.folders), None)

    def merge(self, other: Tree) -> None:
        """Put `other` over this tree: tables merge, everything else is replaced.

        A table that would replace a value, or a value a table, is left out and noted in `errors`.
        """
        self.merges += 1
        self._merge_table(self.values, other.values, (), other)
        self.imports.extend(entry for entry in other.imports if entry not in self.imports)
        self.outdated |= other.outdated
        self.errors.extend(other.errors)

    def _merge_table(self, mine: dict, theirs: dict, key: Key, other: Tree) -> None:
        for name, value in theirs.items():
            here = (*key, name)
            origin = other.origins.get(here)
            if isinstance(value, dict) and isinstance(mine.get(name, {}), dict):
                table = mine.setdefault(name, {})
                self.outdated.discard(here)
                # Another component is named: settings of the one before stay only where the new one has them too.
                if "name" in value and "name" in table and value["name"] != table["name"]:
                    self.outdated.update((*here, *k) for k in _flatten(table))
                if origin:
                    self.origins[here] = origin
                    self.introduced.setdefault(here, other.introduced.get(here, origin))
                self._merge_table(table, value, here, other)
            elif isinstance(value, dict) != isinstance(mine.get(name, value), dict):
                self.errors.append(self._conflict(here, mine[name], value, origin))
            else:
                mine[name] = value
                self.layers[here] = self.merges
                self.folders.pop(here, None)
                if folder := other.folders.get(here, other.folder):
                    self.folders[here] = folder
                self.outdated.discard(here)
                for old in [k for k in self.origins if len(k) > len(here) and k[: len(here)] == here]:
                    del self.origins[old]  # of the entries of a list that is no more
                self.origins |= {k: o for k, o in other.origins.items() if k[: len(here)] == here}

    def _conflict(self, key: Key, mine: Any, value: Any, origin: str | None) -> ConfigError:
        """Two places disagree on whether a key is a table."""
        what = {dict: "a table", list: "a list"}.get(type(mine), "a single value")
        allowed = None
        if isinstance(mine, list):
            allowed = "the whole list, which replaces it"
        elif isinstance(mine, dict) and isinstance(value, str) and "name" in mine:
            allowed = f"{dotted(key)}.name = {json.dumps(value)}"
        elif isinstance(mine, dict):
            allowed = f"{dotted(key)}.<key> = <value>"
        there = self.origin(key)
        return ConfigError(
            dotted(key), f"is {what} in {there}" if there else f"is {what}", value=value, where=origin, allowed=allowed
        )


def _parse(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none; whatever the standard parser raises on the way.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own limit on the digits of an int
        raise ValueError("an int of thousands of digits") from None


def _impossible_values(values: Mapping[str, Any]) -> list[tuple[Key, Any, str]]:
    """Key, value and problem of what TOML can spell and no setting can hold."""
    found: list[tuple[Key, Any, str]] = []
    left: list[tuple[Key, Any]] = [((name,), value) for name, value in values.items()]
    while left:
        key, value = left.pop()
        if len(key) > _DEEPEST:
            return [((key[0],), _ABSENT, "nested too deeply")]
        if _SURROGATE.search(key[-1]):
            found.append((key, _ABSENT, "has bytes in its name that are not UTF-8 text"))
        if isinstance(value, dict):
            left.extend(((*key, name), inner) for name, inner in value.items())
        elif isinstance(value, list):
            left.extend(((*key, str(index)), inner) for index, inner in enumerate(value))
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            found.append((key, value, "does not fit in the 64 bits of a TOML int"))
        elif isinstance(value, str) and "\0" in value:
            found.append((key, value, "has a NUL character in it"))
        elif isinstance(value, str) and _SURROGATE.search(value):
            found.append((key, value, "has bytes in it that are not UTF-8 text, which a recipe file cannot hold"))
    return found[::-1]


_SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of such bytes on a command line


_DEEPEST = 20
_ABSENT = object()


def _impossible(values: Mapping[str, Any], place: Callable[[Key], str]) -> list[ConfigError]:
    errors = []
    for key, value, problem in _impossible_values(values):
        shown = {} if value is _ABSENT else {"value": value}
        errors.append(ConfigError(dotted(key), problem, where=place(key), **shown))
    return errors


_LONG_QUOTES = ('"""', "'''")
_QUOTED = re.compile(r"""\"{3}|'{3}|"(?:[^"\\]|\\.)*"|'[^']*'|#.*""")
_HEADER = re.compile(r"^\s*(\[\[?)(.+?)\]\]?\s*(?:#.*)?$")
_NAME = r"""(?:[\w-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_ASSIGNMENT = re.compile(rf"^\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


def _key_lines(text: str, values: Mapping[str, Any]) -> dict[Key, int]:
    """Line of each key and table, found by plain search; one on an unusual line is just not found.

    Entries of an array of tables have their number in the key. `values` is what the text parses to: what looks like a
    key but is not one, such as a line of a string, is skipped.
    """
    lines: dict[Key, int] = {}
    last: dict[Key, int] = {}  # array of tables -> number of its newest entry
    table: Key = ()

    def in_newest(key: Key) -> Key:
        full: Key = ()
        for part in key:
            full = (*full, part)
            if full in last:
                full = (*full, str(last[full]))
        return full

    def note(key: Key, number: int) -> bool:
        known = _has(values, key)
        for length in range(1, len(key) + 1 if known else 0):
            lines.setdefault(key[:length], number)
        return known

    inside = ""  # the quotes of a string of several lines
    for number, line in enumerate(text.split("\n"), 1):
        if inside:
            if inside in line:
                inside = ""
            continue
        inside = next((q for q in _QUOTED.findall(line) if q in _LONG_QUOTES and line.count(q) % 2), "")
        if (header := _HEADER.match(line)) and (key := split_key(header[2])):
            if header[1] == "[[":
                array = (*in_newest(key[:-1]), key[-1])
                entry = last.get(array, -1) + 1
                if note((*array, str(entry)), number):
                    table, last[array] = (*array, str(entry)), entry
            elif note(in_newest(key), number):
                table = in_newest(key)
        elif (assignment := _ASSIGNMENT.match(line)) and (key := split_key(assignment[1])):
            note((*table, *key), number)
    return lines


def _has(values: Any, key: Key) -> bool:
    for part in key:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return False
    return True


def _flatten(values: Mapping[str, Any] | list, key: Key = ()) -> list[Key]:
    """Every key below a table, those of the tables in a list with their number."""
    keys = []
    for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        here = (*key, str(name))
        if isinstance(values, Mapping) or isinstance(value, dict):
            keys.append(here)
        if isinstance(value, (dict, list)):
            keys.extend(_flatten(value, here))
    return keys


def _shown_path(path: Path) -> str:
    """The path relative to the working directory where that is shorter and does not climb out of it."""
    try:
        return one_line(str(path.resolve().relative_to(Path.cwd())))
    except (ValueError, OSError, RuntimeError):
        return one_line(os.path.normpath(path))


def _layers(
    path: Path, *, chain: tuple[Path, ...] = (), named_by: str | None = None, written: str = ""
) -> list[tuple[Path, Tree]]:
    """A TOML file and, before it, the files that its `base` names, each as a tree of its own.

    Args:
        path: the file.
        chain: files being read above this one; a file that inherits from itself is refused.
        named_by: where the path was written, for the message when it does not exist.
        written: the path as it was written there.

    Raises:
        ConfigErrors: a file that cannot be read, no valid TOML, or an inheritance loop.
    """
    shown = _shown_path(path)
    key = "base" if chain else "--config"
    try:
        refuse_impossible(str(path), key)
    except ConfigError as error:
        raise ConfigErrors([error]) from error

    def fail(problem: str, hint: str | None = None) -> ConfigErrors:
        return ConfigErrors([ConfigError(key, problem, value=shown, where=named_by, nearest=hint)])

    try:
        path = path.resolve()
        if path in chain:
            raise fail("inherits from itself: " + " -> ".join(p.name for p in (*chain, path)))
        if path.is_dir():
            raise fail("is a folder, not a TOML file")
        if not path.exists():
            siblings = [p.name for p in path.parent.glob("*.toml") if p not in chain] if path.parent.is_dir() else []
            hint = nearest(path.name, siblings)
            hint = hint and os.path.join(os.path.dirname(written), hint)
            raise fail("no such file", hint or (None if chain else nearest(shown, _shipped_names())))
        if not path.is_file():
            raise fail("is not a regular file")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fail(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (OSError, ValueError, RuntimeError) as error:  # also a loop of links, or a NUL in the name
        raise fail(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        values = _parse(text)
    except ValueError as error:
        raise ConfigErrors([_syntax_error(error, text, shown)]) from error

    lines = _key_lines(text, values)

    def place(key: Key) -> str:
        """File and line of a key, or of the nearest table or inline table around it."""
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        return f"{shown}:{line}" if line else shown

    own = Tree(values=values, errors=_impossible(values, place), folder=path.parent)
    if own.errors:
        raise ConfigErrors(own.errors)
    bases, errors = _strings(values, "base", place(("base",)))
    imports, more = _strings(values, "import", place(("import",)))
    if errors + more:
        raise ConfigErrors(errors + more)
    own.imports = [Import(reference, path.parent, place(("import",))) for reference in imports]
    own.origins = {found: place(found) for found in _flatten(values)}

    layers: list[tuple[Path, Tree]] = []
    for base in bases:
        try:
            try:
                file = Path(located(base, path.parent, PathRule(read=True)))
                if not os.path.exists(file) and (shipped := _shipped(Path(base))) != Path(base):
                    file = shipped
            except ConfigError as error:
                raise ConfigErrors([error.under("base").at(place(("base",)))]) from error
            for layer in _layers(file, chain=(*chain, path), named_by=place(("base",)), written=base):
                if layer[0] not in [known for known, _ in layers]:  # a base of two bases counts once
                    layers.append(layer)
                    layer[1].drop(NOT_INHERITED)
        except ConfigErrors as several:
            errors.extend(several.errors)
    if errors:
        raise ConfigErrors(errors)
    return [*layers, (path, own)]


def _strings(values: dict[str, Any], name: str, where: str) -> tuple[list[str], list[ConfigError]]:
    """Take a list of strings, or one, out of the top level."""
    entries = values.pop(name, [])
    listed = [entries] if isinstance(entries, str) else entries
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        return [], [ConfigError(name, "must be a string or a list of strings", value=entries, where=where)]
    return listed, []


def _syntax_error(error: ValueError, text: str, shown: str) -> ConfigError:
    where, line = shown, ""
    if found := re.search(r" \(at line (\d+), column \d+\)", str(error)):
        where = f"{shown}:{found[1]}"
        line = text.split("\n")[int(found[1]) - 1].strip()
    problem = f"not valid TOML: {error}"
    hint = "strings in quotes, true and false in lower case" if "Invalid value" in problem else None
    return ConfigError("", f"{problem}: {line[:100]}" if line else problem, where=where, allowed=hint)


def parse_override(argument: str) -> Tree:
    """`--section.key=value` as a tree of one value.

    The value is TOML; a bare word that is not (`--model.flavor=debug`) is taken as a string.

    Raises:
        ConfigError: the argument is not of that form.
    """
    name, equals, text = argument.removeprefix("--").partition("=")
    key = split_key(name) or tuple(name.split("."))
    if not argument.startswith("--") or not equals or not all(key):
        raise ConfigError(argument, "is not an override", allowed="--section.key=value, the value as in TOML")
    where = one_line(f"--{name}")
    try:
        parsed = _parse(f"value = {text}")
        value = parsed["value"] if set(parsed) == {"value"} else text
    except ValueError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(name, f"the value is not valid TOML: {error}", value=text, where=where) from None
        value = text
    tree = Tree(values={key[-1]: value})
    for part in reversed(key[:-1]):
        tree.values = {part: tree.values}
    if errors := _impossible(tree.values, lambda _: where):
        raise errors[0]
    tree.origins = {found: where for found in _flatten(tree.values)}
    if key[0] == "base":
        raise ConfigError("base", "belongs in a file, not on the command line", value=value, where=where)
    imports, errors = _strings(tree.values, "import", where)
    if errors:
        raise errors[0]
    tree.imports = [Import(reference, None, where) for reference in imports]
    return tree


def _shipped_names() -> list[str]:
    return [path.relative_to(SHIPPED).with_suffix("").as_posix() for path in sorted(SHIPPED.glob("**/*.toml"))]


def _shipped(path: Path) -> Path:
    """The recipe of the package that is named without its suffix, such as quickstart; else `path` as it is."""
    shipped = SHIPPED / f"{path}.toml"
    return shipped if path.suffix == "" and not os.path.exists(path) and os.path.isfile(shipped) else path


def load(path: Path | None, overrides: Sequence[str] = (), defaults: Path | None = None) -> Tree:
    """Defaults, then the recipe with its bases, then the overrides in order; later wins.

    Faults after which reading can go on are kept in the tree's `errors`.

    Raises:
        ConfigErrors: a file cannot be read; with it every fault of the overrides.
    """
    given = Tree()
    for argument in overrides:
        try:
            given.merge(parse_override(argument))
        except ConfigError as error:
            given.errors.append(error)
    tree = Tree()
    try:
        for file in (defaults, path and _shipped(path)):
            for _, layer in _layers(file) if file is not None else ():
                tree.merge(layer)
    except ConfigErrors as several:
        raise ConfigErrors([*several.errors, *given.errors]) from several
    tree.merge(given)
    return tree
