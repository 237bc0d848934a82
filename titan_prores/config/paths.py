"""Paths in a recipe: the types to declare them with, what they count from, and which cannot be what they say.

A path that begins with ./ or ../ counts from the folder of the file that it is written in, any other relative path from
the working directory. On the command line both are the working directory.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from titan_prores.config.errors import ConfigError


@dataclass(frozen=True)
class PathRule:
    """Marks a string as a path.

    Attributes:
        read: it must be there, so that one that is found beside the file alone is a mistake that can be named.
        glob: it may have wildcards.
        below: it counts from the run folder, whatever it begins with.
        url: it may be a URL as well.
    """

    read: bool = False
    glob: bool = False
    below: bool = False
    url: bool = False


# For the fields of a Section. A field of type `pathlib.Path` is a WritePath.
ReadPath = Annotated[str, PathRule(read=True)]
ReadGlob = Annotated[str, PathRule(read=True, glob=True)]
WritePath = Annotated[str, PathRule()]
PathInRun = Annotated[str, PathRule(below=True)]

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):/")
_HOME = re.compile(r"(^|/)~(/|$)|^~[\w.-]*/")
_VARIABLE = re.compile(r"\$(\w|\{)")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # what Python makes of bytes in a file name that are not UTF-8


def refuse_impossible(text: str, key: str = "") -> None:
    """Raise ConfigError for what would silently become an odd folder: a URL, ~, or a variable of the shell."""
    if found := _URL.match(text):
        problem = f"is a URL, and nothing is read from or written to {found[1]}: here"
        raise ConfigError(key, problem, value=text, allowed="a path of this machine's file system")
    if _HOME.search(text):
        hint = f"{Path.home()}{text[1:]}" if text == "~" or text.startswith("~/") else None
        raise ConfigError(key, "~ is not expanded here", value=text, allowed="the folder written out", nearest=hint)
    if _VARIABLE.search(text):
        raise ConfigError(key, "variables are not expanded here", value=text, allowed="the folder written out")


def refuse_not_utf8(folder: Path, text: str) -> None:
    """Raise ConfigError where a path that was written as `text` counts from a folder that no recipe can name."""
    if _NOT_UTF8.search(str(folder)):
        problem = "counts from a folder whose name is not UTF-8 text, which a recipe cannot hold"
        raise ConfigError("", problem, value=text)


def located(text: str, folder: Path | None, rule: PathRule) -> str:
    """A path as the rest of the program takes it: as it is written, or absolute where it counts from a file's folder.

    Args:
        text: as written.
        folder: of the file that it is written in; None on the command line.
        rule: what kind of path it is.

    Raises:
        ConfigError: it cannot be a path, lies in a folder whose name a recipe cannot hold, or is found beside the file
            alone.
    """
    if rule.url and _URL.match(text):
        return text
    refuse_impossible(text)
    if rule.below or not text:
        return text
    if text in (".", "..") or text.startswith(("./", "../")):
        here = folder or Path.cwd()
        start, rest = here, text
        while rest in (".", "..") or rest.startswith(("./", "../")):
            first, _, rest = rest.partition("/")
            rest = rest.lstrip("/")
            start = start.parent if first == ".." else start
        if folder is None and start == here and rest:
            return rest  # which counts from the working directory as well
        refuse_not_utf8(start, text)
        base = glob.escape(str(start)) if rule.glob and glob.has_magic(rest) else str(start)
        return os.path.join(base, rest) if rest else base
    if rule.read and folder is not None and not _found(text, rule) and _found(os.path.join(folder, text), rule):
        raise ConfigError(
            "",
            "is not there: it counts from the working directory, and lies beside this file",
            value=text,
            nearest=f"./{text}",
        )
    return text


def _found(text: str, rule: PathRule) -> bool:
    try:
        return os.path.lexists(text) or (rule.glob and any(True for _ in glob.iglob(text)))
    except (OSError, ValueError):
        return False
