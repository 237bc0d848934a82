"""metrics.jsonl: every row of a run, for programs to read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, TextIO

from titan_prores import Metric, RunFolder, Section, json_ready, register


@register("metrics", "jsonl")
class JsonLines(Metric):
    """Writes every row to metrics.jsonl in the run folder, one JSON object a line.

    Numbers keep full precision: reading one back gives the very same float. JSON has no numbers that are not finite;
    they are the strings "NaN", "Infinity" and "-Infinity", which `float()` in Python and `Number()` in JavaScript take.
    """

    class Config(Section):
        pass

    _file: TextIO | None = None

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        path = run.metrics_file
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:  # left by a killed writer: our first row must not join it
            self._file.write("\n")

    def write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(json_ready(row), allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error  # it does not say of which file

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
