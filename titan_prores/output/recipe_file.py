"""The resolved recipe as the text of recipe.toml."""

from __future__ import annotations

import re

import tomli_w

from titan_prores.config.keys import one_line
from titan_prores.config.recipe import Recipe

_TABLE = re.compile(r"^\[(?P<array>\[?)(?P<name>.+?)\]+$")


_KEY = re.compile(r"^(?P<name>[\w-]+|\"(?:[^\"\\]|\\.)*\") = ")


def annotated_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML, every value followed by a comment that says where it came from."""
    lines, table, array = [], "", None
    for line in tomli_w.dumps(recipe.to_dict()).split("\n")[:-1]:
        # tomli_w starts keys and headers in the first column and indents what continues a value.
        origin = None
        if found := _TABLE.match(line):
            table = found["name"]
            if found["array"]:
                array = table
                origin = recipe.origins.get(table, "default")
            elif array and not table.startswith(f"{array}."):
                array = None
        elif (found := _KEY.match(line)) and array is None:
            name = found["name"]
            origin = recipe.origins.get(f"{table}.{name}" if table else name, "default")
        lines.append(f"{line}  # {one_line(origin)}" if origin else line)
    return "\n".join(lines) + "\n"
