"""A checkpoint is data from somewhere: reading one runs no code, reads no other file, and takes tensors alone."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titan_prores.checkpoint.reader import TensorReader, UntrustedError


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"weight": torch.arange(6.0), "bias": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder: Path, content: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def load(folder: Path) -> dict[str, torch.Tensor]:
    state = {"weight": torch.zeros(6), "bias": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=TensorReader(folder))
    return state


def test_reads_what_dcp_wrote(folder: Path) -> None:
    state = load(folder)
    assert torch.equal(state["weight"], torch.arange(6.0))
    assert torch.equal(state["bias"], torch.ones(2, dtype=torch.bfloat16))


def test_crafted_metadata_runs_nothing(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    write(folder, Touch(victim))
    pickle.loads((folder / ".metadata").read_bytes())
    assert victim.exists()  # it is what it is meant to be
    victim.unlink()
    with pytest.raises(CheckpointException, match=r"asks for pathlib\.Path\.touch|asks for builtins\.getattr"):
        load(folder)
    assert not victim.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "pathlib.Path.unlink"])
def test_functions_have_no_place_in_metadata(folder: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (folder / ".metadata").write_bytes(b"c" + f"{module}\n{attribute}\n".encode() + b"(tR.")
    with pytest.raises(UntrustedError, match="has no place in the metadata"):
        TensorReader(folder).read_metadata()


def test_crafted_entry_is_not_unpickled(folder: Path, tmp_path: Path) -> None:
    """An entry that says it is bytes is one that DCP hands to pickle."""
    victim = tmp_path / "victim"
    content = io.BytesIO()
    torch.save(Touch(victim), content)
    crafted = metadata(folder)
    (index,) = [index for index in crafted.storage_data if index.fqn == "weight"]
    info = crafted.storage_data[index]
    (folder / "__0_9.distcp").write_bytes(content.getvalue())
    info.relative_path, info.offset, info.length = "__0_9.distcp", 0, len(content.getvalue())
    crafted.state_dict_metadata["weight"] = dcp.metadata.BytesStorageMetadata()
    crafted.storage_data[dcp.metadata.MetadataIndex("weight")] = crafted.storage_data.pop(index)
    write(folder, crafted)
    with pytest.raises(CheckpointException, match="the entry weight is not a tensor"):
        load(folder)
    assert not victim.exists()
    with suppress(CheckpointException):
        dcp.load({"weight": "an object"}, checkpoint_id=folder)
    assert victim.exists()  # as DCP alone reads it


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/file", ".."])
def test_files_outside_of_the_folder_are_not_read(folder: Path, name: str) -> None:
    crafted = metadata(folder)
    next(iter(crafted.storage_data.values())).relative_path = name
    write(folder, crafted)
    with pytest.raises(UntrustedError, match="is none of the checkpoint's own"):
        TensorReader(folder).read_metadata()


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError, match="is none of the checkpoint's own"):
        TensorReader(folder).read_metadata()


@pytest.mark.parametrize("length", [0, 1, 40, 200])
def test_cut_metadata_is_called_damaged(folder: Path, length: int) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RuntimeError, match=r"\.metadata is damaged"):
        TensorReader(folder).read_metadata()


def test_other_objects_are_no_metadata(folder: Path) -> None:
    write(folder, {"weight": 1})
    with pytest.raises(UntrustedError, match="is not the metadata of a checkpoint"):
        TensorReader(folder).read_metadata()
