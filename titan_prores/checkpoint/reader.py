"""Reading DCP's files without trusting them: they are pickles, and a hash beside them is no defense."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# All that the metadata of tensors is made of. None of it does anything but hold values.
_ALLOWED = {
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "torch": ("Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}


class UntrustedError(RuntimeError):
    """A checkpoint holds what no save of this package writes."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise UntrustedError(f".metadata asks for {module}.{name}, which has no place in the metadata of tensors")
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """DCP's reader for folders that hold tensors alone.

    Raises:
        UntrustedError: on reading metadata that would run code, files outside of the folder, or entries that are no
            tensors, which DCP would unpickle.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = Path(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (self.folder / ".metadata").open("rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except UntrustedError:
                raise
            except Exception as error:  # a pickle that is cut or altered fails in any way at all
                raise RuntimeError(f".metadata is damaged ({type(error).__name__}: {error})") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise UntrustedError(".metadata is not the metadata of a checkpoint")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise UntrustedError(f"the entry {key} is not a tensor")
        own = {entry.name for entry in self.folder.iterdir() if entry.is_file() and not entry.is_symlink()}
        for info in metadata.storage_data.values():
            name = info.relative_path if isinstance(info, _StorageInfo) else None
            if name not in own:
                raise UntrustedError(f"the file {name!r} is none of the checkpoint's own")
            if info.transform_descriptors:
                raise UntrustedError(f"the file {name} is encoded by {info.transform_descriptors}")
        return metadata
