"""What goes wrong in a recipe, said in one line each. Knows nothing else of the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_ABSENT = object()


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate spelled most like `name`, or None when none is close."""
    candidates = list(candidates)
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if matches:
        return matches[0]
    # A long right answer (llama_350M) for a short question (350m) scores low by ratio alone.
    lowered = name.lower()
    inside = [c for c in candidates if len(name) >= 3 and (lowered in c.lower() or c.lower() in lowered)]
    return min(inside, key=len) if inside else None


class ConfigError(Exception):
    """One fault in a recipe or on the command line.

    Args:
        key: dotted path of the setting, such as `training.steps`; empty when there is none.
        problem: what is wrong, as a clause ("unknown key", "must be greater than 0").
        value: the value found, left out of the message when not given.
        allowed: what would be right: a sentence, or the valid values.
        nearest: the right spelling closest to what was written.
        where: file and line, or the command-line argument, that the value came from.
    """

    def __init__(
        self,
        key: str,
        problem: str,
        *,
        value: Any = _ABSENT,
        allowed: str | Sequence[Any] | None = None,
        nearest: str | None = None,
        where: str | None = None,
    ) -> None:
        self.key = key
        self.problem = problem
        self.value = value
        self.allowed = allowed
        self.nearest = nearest
        self.where = where
        super().__init__(key, problem)

    def under(self, prefix: str) -> ConfigError:
        """The same fault with `prefix` put before its key; used by the engine for a component's own errors."""
        self.key = ".".join(part for part in (prefix, self.key) if part)
        return self

    def __str__(self) -> str:
        text = f"{self.where}: " if self.where else ""
        text += self.key
        if self.value is not _ABSENT:
            text += f" = {self.value!r}"
        text = f"{text}: {self.problem}" if text and not text.endswith(": ") else text + self.problem
        if self.allowed is not None:
            allowed = self.allowed if isinstance(self.allowed, str) else ", ".join(str(a) for a in self.allowed)
            text += f" (allowed: {allowed})"
        if self.nearest is not None:
            text += f"; did you mean {self.nearest}?"
        return text


class ConfigErrors(Exception):
    """All faults that one pass over a recipe found."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__(*self.errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)
