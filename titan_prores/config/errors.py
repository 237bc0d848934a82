"""What goes wrong in a recipe, said in one line each. Knows nothing else of the package."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LONGEST = 200


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate spelled most like `name`, or None when none is close; case does not count, nor - against _."""
    folded: dict[str, str] = {}
    for candidate in candidates:
        folded.setdefault(_fold(candidate), candidate)
    wanted = _fold(name)
    if matches := difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6):
        return folded[matches[0]]
    # A long right answer (linear_schedule) for a short question (linear) scores low by ratio alone.
    inside = [f for f in folded if min(len(f), len(wanted)) >= 3 and (wanted in f or f in wanted)]
    return folded[min(inside, key=len)] if inside else None


def _fold(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, like TOML, and no longer than anybody reads."""
    if value is None:
        text = "not set"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name} = {shown(inner)}" for name, inner in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print very long ones
        text = f"an int of {value.bit_length()} bits"
    elif isinstance(value, (datetime.date, datetime.time)):
        text = str(value)
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it is not 1: "1 rank", "2,048 ranks", "2 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """A length of time in the unit that fits it: "0.4 seconds", "12 seconds", "3.5 minutes", "26.3 hours"."""
    if seconds < 60:
        return f"{seconds:.1f} seconds" if seconds < 9.95 else f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:,.1f} hours"


class ConfigError(Exception):
    """One fault in a recipe or on the command line. It cannot be changed: `at`, `under` and `but` return another.

    Args:
        key: dotted path of the setting, such as `training.steps`; empty when there is none.
        problem: what is wrong, as a clause ("unknown key", "must be greater than 0").
        value: the value found; `...` leaves it out of the message.
        allowed: what would be right: a sentence, or the valid values.
        nearest: the right spelling closest to what was written.
        where: file and line, or the command-line argument, that the value came from.
    """

    def __init__(
        self,
        key: str,
        problem: str,
        *,
        value: Any = ...,
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise AttributeError(f"{name} of a {type(self).__name__} cannot be changed")
        super().__setattr__(name, value)  # here first, or one that Python keeps, such as __traceback__

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self._details())  # other ranks get it pickled

    def _details(self) -> dict[str, Any]:
        names = ("key", "problem", "value", "allowed", "nearest", "where")
        return {name: getattr(self, name) for name in names}

    def but(self, **details: Any) -> ConfigError:
        """The same fault with other `details`, named as the parameters of the class are."""
        fault = _rebuilt(type(self), {**self._details(), **details})
        fault.__cause__ = self.__cause__
        return fault

    def at(self, where: str | None) -> ConfigError:
        """The same fault with the place that it came from, unless it has one."""
        return self if self.where else self.but(where=where)

    def under(self, prefix: str) -> ConfigError:
        """The same fault with `prefix` put before its key; used by the engine for a component's own errors."""
        return self.but(key=".".join(filter(None, (prefix, self.key))))

    def __str__(self) -> str:
        text = f"{self.where}: " if self.where else ""
        text += self.key
        if self.value is not ...:
            text += f" = {shown(self.value)}" if self.key else shown(self.value)
        text = f"{text}: {self.problem}" if text and not text.endswith(": ") else text + self.problem
        if self.allowed is not None:
            allowed = self.allowed if isinstance(self.allowed, str) else ", ".join(str(a) for a in self.allowed)
            text += f" (allowed: {allowed})"
        if self.nearest is not None:
            text += f"; did you mean {self.nearest}?"
        return text


def _rebuilt(kind: type[ConfigError], details: Mapping[str, Any]) -> ConfigError:
    return kind(**details)


class MissingError(ConfigError):
    """The recipe is right, but this machine lacks a file or a package that a run needs."""


class ConfigErrors(Exception):
    """All faults that one pass over a recipe found."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__(*self.errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)
