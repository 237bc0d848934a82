"""Dotted keys, and values as TOML on one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


Key = tuple[str, ...]


def split_key(text: str) -> Key | None:
    """`a."b.c"` as ("a", "b.c"), read by the TOML parser; None where it is not a TOML key."""
    try:
        table = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        return None
    key: Key = ()
    while isinstance(table, dict):
        if len(table) != 1:
            return None
        [(name, table)] = table.items()
        key = (*key, name)
    return key


def dotted(key: Sequence[str]) -> str:
    """The reverse of `split_key`: parts that are not bare words are quoted as TOML wants it."""
    return ".".join(part if _BARE.fullmatch(part) else inline(part) for part in key)


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def inline(value: Any) -> str:
    """A value as TOML on one line: what `key = ` or `--section.key=` is followed by."""
    if isinstance(value, str):
        # TOML is stricter than JSON in one character. The line breaks of Unicode are valid in both, yet read badly.
        quoted = json.dumps(value, ensure_ascii=False)
        return _UNREADABLE.sub(lambda found: _escaped(found[0]), quoted)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted((str(name),))} = {inline(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def one_line(text: str) -> str:
    """`text` for a message or a comment: on one line, without characters that TOML or a terminal cannot show."""
    return _UNREADABLE.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04X}"


_UNREADABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
