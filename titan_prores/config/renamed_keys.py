"""Keys that earlier versions had under another name.

Serves the errors for recipes that still have an old key, and the reading of recipes that checkpoints and results hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Old key -> the key that has its meaning now.
RENAMED_KEYS: dict[str, str] = {"checkpoint.keep_every": "checkpoint.keep_every_steps"}


def with_new_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe (nested tables) with every old key under its new name; one that has both keeps the new one."""
    found = _copied(tables)
    for old, new in RENAMED_KEYS.items():
        *above, name = old.split(".")
        table = _table(found, above)
        if table is not None and name in table:
            value = table.pop(name)
            *above, name = new.split(".")
            _table(found, above, make=True).setdefault(name, value)
    return found


def _copied(value: Any) -> Any:
    return {name: _copied(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _table(tables: dict[str, Any], key: list[str], *, make: bool = False) -> Any:
    for name in key:
        if not isinstance(tables, dict) or (name not in tables and not make):
            return None
        tables = tables.setdefault(name, {})
    return tables
