"""A copy of a state in the CPU's memory, taken beside training, that another process can read without a copy."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor

State = dict[str, dict[str, torch.Tensor]]

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Place:
    """Where in the stager's memory a tensor lies, for other processes that map that memory."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, memory: mmap.mmap) -> torch.Tensor:
        """The tensor itself, contiguous, with a storage of its own size."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=prod(self.shape), offset=self.offset_bytes)
        return flat.view(self.shape)


class Stager:
    """Copies a state from a thread of its own into memory that is kept: memory is dear to get.

    Args:
        file: descriptor of a file in memory that holds the copies; None = memory of this process alone.
    """

    def __init__(self, file: int | None = None) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._places: dict[tuple[str, str], Place] = {}
        self._memory: mmap.mmap | None = None
        self._stream: torch.cuda.Stream | None = None

    def stage(self, state: State) -> Future[State]:
        """Begin to copy; until the future is done nothing may change `state`. One at a time.

        Args:
            state: part -> name -> tensor, plain or DTensor, of which this rank's share is copied.

        Returns:
            Of the same structure, on the CPU, valid until the next call.
        """
        ready = None
        if torch.cuda.is_available():
            self._stream = self._stream or torch.cuda.Stream()
            ready = torch.cuda.current_stream().record_event()  # kernels before this call are still to write the state
        return self._thread.submit(self._copy, state, ready)

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a staged tensor lies. Raises ValueError for any other."""
        if 0 in tensor.shape:
            return Place(0, tuple(tensor.shape), tensor.dtype)
        offset = tensor.data_ptr() - _address(self._memory)
        if not 0 <= offset < len(self._memory) or not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is none of those that were staged")
        return Place(offset, tuple(tensor.shape), tensor.dtype)

    @property
    def bytes(self) -> int:
        """Size of the memory."""
        return len(self._memory)

    def _copy(self, state: State, ready: torch.cuda.Event | None) -> State:
        mine = {
            (part, name): _local(tensor).detach() for part, tensors in state.items() for name, tensor in tensors.items()
        }
        self._lay_out(mine)
        copies = {key: place.tensor(self._memory) for key, place in self._places.items()}
        if ready is None:
            for key, tensor in mine.items():
                copies[key].copy_(tensor)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                for key, tensor in mine.items():
                    copies[key].copy_(tensor, non_blocking=True)
                self._stream.synchronize()
        return {
            part: {name: _like(tensor, copies[part, name]) for name, tensor in tensors.items()}
            for part, tensors in state.items()
        }

    def _lay_out(self, tensors: dict[tuple[str, str], torch.Tensor]) -> None:
        """Give every tensor a place, and get memory where there is not enough: a new optimizer has no state yet."""
        places, end = {}, 0
        for key, tensor in tensors.items():
            places[key] = Place(end, tuple(tensor.shape), tensor.dtype)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._places = places
        if self._memory is None or end > len(self._memory):
            _unpin(self._memory)
            self._memory = _allocate(self._file, max(end, 1))


def _allocate(file: int | None, size_bytes: int) -> mmap.mmap:
    if file is None:
        memory = mmap.mmap(-1, size_bytes)
    else:
        os.ftruncate(file, size_bytes)
        memory = mmap.mmap(file, size_bytes)
    if torch.cuda.is_available():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(_address(memory), size_bytes, 0))
    return memory


def _unpin(memory: mmap.mmap | None) -> None:
    if memory is not None and torch.cuda.is_available():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(_address(memory)))


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The copy of this rank's share, as the whole that `tensor` stands for."""
    if not isinstance(tensor, DTensor):
        return copy
    return DTensor(copy, tensor._spec, requires_grad=False)  # from_local would move it to the mesh's device
