"""Writing one rank's files. Another process that does it gets a part of a plan and the memory with the tensors."""

from __future__ import annotations

import functools
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from titan_prores.components.checkpoint._staging import Place


class Writer(FileSystemWriter):
    """DCP's, which gets everything onto the disk, and says what the disk said."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save closes its archive when a write has failed, and then complains about the archive.
            behind = error.__context__
            if isinstance(behind, OSError):
                raise behind from error
            raise


@functools.lru_cache(1)  # mapped anew, each page would have to be found again
def _memory(file: int, size_bytes: int) -> mmap.mmap:
    return mmap.mmap(file, size_bytes)


def write(
    folder: Path, plan: SavePlan, places: dict[MetadataIndex, Place], file: int, size_bytes: int
) -> list[WriteResult]:
    """Write one rank's files of a checkpoint and get them onto the disk.

    Args:
        folder: to write into.
        plan: what DCP has planned for the rank.
        places: where in memory each tensor of the plan lies.
        file: descriptor of that memory.
        size_bytes: its size.
    """
    memory = _memory(file, size_bytes)
    planner = SimpleNamespace(resolve_data=lambda item: places[item.index].tensor(memory))
    return Writer(folder).write_data(plan, planner).wait()
