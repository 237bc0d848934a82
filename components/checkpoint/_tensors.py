"""Model and optimizer state through torch.distributed.checkpoint. Apart from dcp.py because it takes long to load."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_prores import logger
from titan_prores.checkpoint.folder import FileRecord, records_of
from titan_prores.checkpoint.reader import TensorReader
from titan_prores.components.checkpoint._process import WriterProcess
from titan_prores.components.checkpoint._staging import Stager, State
from titan_prores.components.checkpoint._writing import Writer, write

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Tensors alone, sharing the run's storage; the optimizer's group settings come from the recipe. Collective."""
    flat = {}
    if optimizer.state:  # asked for a state it has not, torch would make one by a step, which is no step of the run
        flat = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    tensors = {key: value for key, value in flat.items() if not key.startswith("param_groups.")}
    return {"model": _weights(model), "optimizer": tensors}


def save(folder: Path, tensors: State, group: dist.ProcessGroup | None = None) -> None:
    """Write what `state` gave and get it onto the disk. Collective over `group`.

    Raises:
        RuntimeError: with the error of the first rank that had one, in one line.
    """
    _save(Writer(folder), tensors, group)


def _save(writer: Writer, tensors: State, group: dist.ProcessGroup | None) -> None:
    with _in_one_line():
        dcp.save(tensors, storage_writer=writer, process_group=group)


class Beside:
    """Saves while training goes on: copies a state, and writes the copy from a thread or from another process.

    Args:
        group: of the thread that calls `save`.
        own_process: whether another process writes; it starts with the first save.
    """

    def __init__(self, group: dist.ProcessGroup, *, own_process: bool) -> None:
        self._group = group
        self._file = os.memfd_create("checkpoint") if own_process else None
        self._stager = Stager(self._file)
        self._process: WriterProcess | None = None

    def start(self) -> None:
        """Have the writing process ready; one that has ended while it had nothing to do is replaced."""
        if self._file is None or (self._process is not None and self._process.alive):
            return
        if self._process is not None:
            logger.warning("the process that writes checkpoints has ended; starting another")
        self._process = WriterProcess([self._file])

    def stage(self, state: State) -> concurrent.futures.Future[State]:
        """As `Stager.stage`."""
        return self._stager.stage(state)

    def save(self, folder: Path, tensors: State) -> None:
        """As the function `save`, of what `stage` has copied."""
        if self._process is None:
            save(folder, tensors, self._group)
        else:
            _save(_WriterBeside(folder, self._stager, self._file, self._process), tensors, self._group)

    def records_of(self, folder: Path, rank: int) -> dict[str, FileRecord]:
        """As the function `records_of`. Raises RuntimeError where the other process cannot."""
        return records_of(folder, rank) if self._process is None else self._process.call(records_of, folder, rank)


class _WriterBeside(Writer):
    """DCP plans here, with the other ranks; the other process needs to know of neither ranks nor meshes.

    Args:
        folder: to write into.
        stager: with the tensors, in the memory of
        file: a descriptor that
        process: has as well.
    """

    def __init__(self, folder: Path, stager: Stager, file: int, process: WriterProcess) -> None:
        super().__init__(folder)
        self._folder, self._stager, self._file, self._process = folder, stager, file, process

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        places = {item.index: self._stager.place(planner.resolve_data(item)) for item in plan.items}
        plan = dataclasses.replace(plan, planner_data=None)
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._process.call(write, self._folder, plan, places, self._file, self._stager.bytes))
        return written


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill a model and a new optimizer in place. Collective.

    Raises:
        RuntimeError: with the error of the first rank that had one, in one line.
    """
    flat = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)  # of a new optimizer: makes its state
    groups = {key: value for key, value in flat.items() if key.startswith("param_groups.")}
    tensors = {key: value for key, value in flat.items() if key not in groups}
    with _in_one_line():
        reader = TensorReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        state = {
            "model": _weights(model),
            "optimizer": {key: value for key, value in tensors.items() if f"optimizer.{key}" in saved},
        }
        dcp.load(state, storage_reader=reader)
    for key in tensors.keys() - state["optimizer"].keys():
        tensors[key].zero_()  # of a parameter that had no gradient yet
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, tensors | groups, options=_OPTIONS)


def load_weights(folder: Path, model: nn.Module, may_lack: Sequence[str]) -> None:
    """Fill a model's weights from a checkpoint of any layout. Collective.

    Args:
        folder: of the checkpoint.
        model: with its weights drawn.
        may_lack: shell-style patterns of names that the checkpoint need not have.

    Raises:
        RuntimeError: the checkpoint lacks other weights, has more, or has them in other shapes.
    """
    reader, weights = TensorReader(folder), _weights(model)
    saved = {
        key.removeprefix("model."): entry
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith("model.")
    }
    lacking = [n for n in weights if n not in saved and not any(fnmatchcase(n, pattern) for pattern in may_lack)]
    unused = [pattern for pattern in may_lack if not any(fnmatchcase(name, pattern) for name in weights)]
    other = [n for n in weights.keys() & saved.keys() if weights[n].shape != saved[n].size]
    for what, names in (
        ("it lacks", lacking),
        ("the model has no", sorted(saved.keys() - weights.keys())),
        ("other shapes of", sorted(other)),
        ("init_from_missing matches no weight:", unused),
    ):
        if names:
            raise RuntimeError(f"{what} {', '.join(names[:3])}")
    with _in_one_line():
        dcp.load({"model": {name: weights[name] for name in saved}}, storage_reader=reader)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, sharing its storage, without what a transform has wrapped around weights.

    torchao's float8 all-gather makes them tensors of a class of its own, with which no run without it could read them.
    """
    return {name: _unwrapped(tensor) for name, tensor in get_model_state_dict(model).items()}


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        part = tensor.to_local()
        if (inner := _unwrapped(part)) is part:
            return tensor
        return DTensor.from_local(
            inner, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return next((part for part in inner if part.shape == tensor.shape and part.dtype == tensor.dtype), tensor)
    return tensor


@contextmanager
def _in_one_line() -> Iterator[None]:
    """DCP's errors say on which rank which error came up, but in whole tracebacks."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise RuntimeError(f"on rank {rank} {text}") from None
