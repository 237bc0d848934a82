"""The one way to write a file durably."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path


def disk_is_full(error: OSError) -> bool:
    """Whether a write failed for lack of room, on the disk or within a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomically(file: Path, content: bytes) -> None:
    """Leave either the old file or the new one whole on disk, wherever the machine stops, with any number of writers.

    Its folder is made where there is none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
