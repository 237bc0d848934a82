"""Model and optimizer state through torch.distributed.checkpoint. Apart from dcp.py because it takes long to load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write tensors alone; the optimizer's group settings come from the recipe. Collective.

    Raises:
        RuntimeError: with the error of the first rank that had one, in one line.
    """
    flat = {}
    if optimizer.state:  # asked for a state it has not, torch would make one by a step, which is no step of the run
        flat = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    tensors = {key: value for key, value in flat.items() if not key.startswith("param_groups.")}
    with _in_one_line():
        dcp.save({"model": _weights(model), "optimizer": tensors}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill a model and a new optimizer in place. Collective.

    Raises:
        RuntimeError: with the error of the first rank that had one, in one line.
    """
    flat = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)  # of a new optimizer: makes its state
    groups = {key: value for key, value in flat.items() if key.startswith("param_groups.")}
    tensors = {key: value for key, value in flat.items() if key not in groups}
    with _in_one_line():
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {
            "model": _weights(model),
            "optimizer": {key: value for key, value in tensors.items() if f"optimizer.{key}" in saved},
        }
        dcp.load(state, checkpoint_id=folder)
    for key in tensors.keys() - state["optimizer"].keys():
        tensors[key].zero_()  # of a parameter that had no gradient yet
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, tensors | groups, options=_OPTIONS)


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
