"""Records of a data set: the text in them, the JSON that holds them, and what becomes of those without text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titan_prores import ConfigError, DatasetSection, logger, nearest, setting

_BLANK = re.compile(r"[ \t\n\r]*")
_LONGEST_LITERAL = 16  # characters; more than of a word or an escape of which the end is missing


class RecordsSection(DatasetSection):
    """Base of the Config of a data set that consists of records."""

    max_skipped_records: int = setting(
        0, "number of records without usable text to skip; one more is an error", on_resume="free", ge=0
    )


class SkippedRecords:
    """Counts the records of one reading of a data set that cannot be used, up to a limit.

    Args:
        limit: how many may be skipped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.skipped = 0
        self._first = ""

    def texts(self, records: Iterable[tuple[str, Any]], field: str) -> Iterator[str]:
        """The texts of records that can be used.

        Args:
            records: (where, record); a ConfigError in the place of a record says why there is none.
            field: key of the text in a record.

        Raises:
            ConfigError: one record more than the limit cannot be used.
        """
        for where, record in records:
            try:
                if isinstance(record, ConfigError):
                    raise record
                text = text_of(record, field, where)
            except ConfigError as error:
                self._skip(error)
                continue
            self.used += 1
            yield text

    def _skip(self, error: ConfigError) -> None:
        """Count a record that cannot be used because of `error`. Raises ConfigError where it is one too many."""
        if self.skipped == self.limit:
            if self.limit:
                problem = f"another record cannot be used: {error}"
                raise ConfigError("max_skipped_records", problem, value=self.limit) from error
            if self.used:  # else it is the recipe that is wrong
                problem = f"{error.problem} (record {self.used + 1:,}; dataset.max_skipped_records can allow for some)"
                raise error.but(problem=problem) from error
            raise error
        self.skipped += 1
        self._first = self._first or str(error)

    def report(self) -> None:
        """Log how many were skipped, if any."""
        if self.skipped:
            logger.warning(
                "skipped %s of %s records, which cannot be used; the first: %s",
                f"{self.skipped:,}",
                f"{self.skipped + self.used:,}",
                self._first,
            )


def text_of(record: Any, field: str, where: str | None = None) -> str:
    """The text in a record. A key of the very name `field` comes first; else its dots lead into nested records.

    Raises:
        ConfigError: the record is not one, has no such key, or something else than text there.
    """
    if not isinstance(record, Mapping):
        raise ConfigError("files", f"each record must be a JSON object, not {_json_type(record)}", where=where)
    value = record[field] if field in record else _nested(record, field, where)
    if not isinstance(value, str):
        raise ConfigError("field", f"must hold text, not {_json_type(value)}", value=field, where=where)
    return value


def _nested(record: Mapping[str, Any], field: str, where: str | None) -> Any:
    value: Any = record
    names = field.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, Mapping):
            parent = ".".join(names[:depth])
            problem = f"cannot be found: {parent} is {_json_type(value)}"
            raise ConfigError("field", problem, value=field, where=where)
        if name not in value:
            prefix = "".join(f"{outer}." for outer in names[:depth])
            raise no_field(field, [prefix + key for key in value], where)
        value = value[name]
    return value


def no_field(field: str, present: Iterable[str], where: str | None) -> ConfigError:
    """The error of a record or a file without `field`, with what is `present`."""
    present = list(present)
    return ConfigError(
        "field",
        "is not there",
        value=field,
        allowed=present or "the record is empty",
        where=where,
        nearest=nearest(field, present),
    )


def parse(line: str, where: str) -> Any:
    """A JSON value. Raises ConfigError where the line is none, or more than one."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON: {error}"
        if line.strip() == "{":
            problem = "a record must be on one line, or in an array: [{...}, {...}]"
        raise ConfigError("files", problem, where=where) from error


def array_items(pieces: Iterator[str], path: str) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array, each with the line that it ends in, of which only one is held at a time.

    Args:
        pieces: of the text, in order; the first character but blanks is the opening bracket.
        path: of the file, for messages.

    Raises:
        ConfigError: the text is not one JSON array.
    """
    decoder = json.JSONDecoder()
    text, at, counted, line = "", 0, 0, 1  # lines are counted up to text[counted]

    def line_number() -> int:
        nonlocal counted, line
        line += text.count("\n", counted, at)
        counted = at
        return line

    def more() -> bool:
        """Drop what is done and read on, as much as there still is: an element is tried again log(its size) times."""
        nonlocal text, at, counted
        got = []
        wanted = max(len(text) - at, 1)
        while wanted > 0 and (piece := next(pieces, "")):
            got.append(piece)
            wanted -= len(piece)
        if got:
            line_number()
            text, at, counted = text[at:] + "".join(got), 0, 0
        return bool(got)

    def upcoming() -> str:
        """The next character that is not blank; empty at the end."""
        nonlocal at
        while True:
            at = _BLANK.match(text, at).end()
            if at < len(text) or not more():
                return text[at : at + 1]

    def fault(problem: str) -> ConfigError:
        return ConfigError("files", f"not valid JSON: {problem}", where=f"{path}:{line_number()}")

    def element() -> Any:
        nonlocal at
        while True:
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                message, place = getattr(error, "msg", str(error)), getattr(error, "pos", at)
                cut_off = message.startswith("Unterminated string") or place > len(text) - _LONGEST_LITERAL
                if cut_off and more():
                    continue
                at = min(place, len(text)) if place > at else at
                raise fault(message) from error
            if end > len(text) - _LONGEST_LITERAL and more():  # a number may go on, 1e- as 1e-5
                continue
            at = end
            return value

    upcoming()
    at += 1
    if upcoming() == "]":
        at += 1
    else:
        while True:
            upcoming()
            value = element()
            yield line_number(), value
            separator = upcoming()
            if separator not in (",", "]"):
                raise fault("expecting ',' or ']' after an element of the array")
            at += 1
            if separator == "]":
                break
    if upcoming():
        raise fault("there is more after the end of the array")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a bool", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
