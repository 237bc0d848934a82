"""What every command has in common: output that never ends it, faults in a line each, an exit status."""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_prores.config.errors import ConfigError, ConfigErrors, counted

SPEAKER_SECONDS = 2.0  # what the rank that speaks for all is given


def run_command(command: Callable[[], int]) -> int:
    """Run a command on settled streams; returns its exit status, or 2 after printing what was wrong with its input.

    A file that cannot be read or written is a fault of the input as well. Ctrl-C gives 130, as a shell has it.
    """
    settle_streams()
    try:
        return command()
    except ConfigError as error:
        return refuse([error])
    except ConfigErrors as several:
        return refuse(several.errors)
    except OSError as error:
        if error.filename is None:
            raise
        return refuse([ConfigError("", f"{os.fsdecode(error.filename)}: {error.strerror}")])
    except KeyboardInterrupt:
        return 130


def refuse(errors: Sequence[ConfigError], say: bool | None = None) -> int:
    """Print faults of the input and return the exit status.

    Args:
        errors: the faults.
        say: whether this rank prints them. None where it does not know whether rank 0 has met them too: rank 0 prints
            at once, and any other rank once it is clear that rank 0, whose end would have ended it, has not.
    """
    rank = os.environ.get("RANK", "0")
    speaks = say if say is not None else rank == "0"
    if not speaks and "TORCHELASTIC_RUN_ID" in os.environ:
        # The launcher ends the rank that says it as soon as it has seen the end of this one.
        time.sleep(SPEAKER_SECONDS)
        speaks = say is None
    if speaks:
        mark = "" if rank == "0" or say else f"rank {rank}: "
        for error in errors:
            print(f"error: {mark}{error}", file=sys.stderr)
        if len(errors) > 1:
            print(counted(len(errors), "error"), file=sys.stderr)
        tell_torchrun("\n".join(map(str, errors)))
    return 2


def settle_streams() -> None:
    """Make this process's stdout and stderr take everything: call it first in every command.

    A closed stream, a pipe whose reader is gone and a full disk swallow what they cannot take. Characters that the
    stream's encoding lacks are written as escapes. Streams that a caller has put in place of Python's stay as they are.
    """
    _occupy_standard_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed when Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                stream.flush()
            setattr(sys, name, _forgiving(stream))


def _occupy_standard_descriptors() -> None:
    """Open the null device where a standard stream is closed, or the next file would get its number, and its output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _forgiving(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream to where `stream` goes, buffered as that is."""
    raw = _ForgivingFile(stream.fileno())
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _ForgivingFile(io.RawIOBase):
    """A descriptor that takes every write; what the system refuses is lost."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: object) -> int:
        left = view = memoryview(data).cast("B")
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # the other end of a terminal or pipe may have made it so
                with suppress(OSError):
                    select.select([], [self._descriptor], [])
            except OSError:
                break
        return len(view)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def environment_of_children(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environment` for a Python process that is to import this package too, from a checkout that is not installed too.

    An installed package is found anyhow, and its folder on PYTHONPATH would come before the standard library.
    """
    root = Path(__file__).resolve().parents[2]
    found = dict(environment)
    if (root / "pyproject.toml").exists():
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), found.get("PYTHONPATH")]))
    return found


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tell_torchrun(text: str) -> None:
    """Leave `text` as what torchrun's summary of a rank shows, where it would explain how to enable tracebacks."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")
