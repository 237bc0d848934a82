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
        dcp.save({"model": get_model_state_dict(model), "optimizer": tensors}, checkpoint_id=folder)


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
            "model": get_model_state_dict(model),
            "optimizer": {key: value for key, value in tensors.items() if f"optimizer.{key}" in saved},
        }
        dcp.load(state, checkpoint_id=folder)
    for key in tensors.keys() - state["optimizer"].keys():
        tensors[key].zero_()  # of a parameter that had no gradient yet
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, tensors | groups, options=_OPTIONS)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """DCP's errors say on which rank which error came up, but in whole tracebacks."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise RuntimeError(f"on rank {rank} {text}") from None
