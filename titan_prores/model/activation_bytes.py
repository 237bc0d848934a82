"""What forward and backward of one microbatch hold, in bytes: counted on real tensors and on fake ones alike.

Storages are counted, not what autograd saves: selective activation checkpointing keeps results in a cache of its own,
which hooks on saved tensors never meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from titan_prores.model.loss import as_terms
from titan_prores.model.parameter_groups import trained_parameters
from titan_prores.model.transforms import Transforms
from titan_prores.protocols.batch import Batch

if TYPE_CHECKING:
    from titan_prores.protocols.loss import Loss


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made while it was on, for as long as they live.

    What was there before, such as parameters and their views, is left out, and every storage counts once. A storage
    that is resized later on keeps the size it was made with.

    Args:
        fake: the mode whose fake tensors are counted; None for real ones.

    Attributes:
        bytes: of the storages alive now.
        peak_bytes: the most that were alive at once.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.fake = fake
        self.bytes = self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # a DTensor's own operations come by again, on the tensors inside
        out = func(*args, **(kwargs or {}))
        # DTensor works out the shapes of whole tensors by entering the fake mode again; those take no memory.
        if self.fake is None or len(self.fake.enter_stack) == 1:
            given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(out):
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._alive:
                    self._add(storage)
        return out

    def storages(self) -> list[torch.UntypedStorage]:
        """Those alive now."""
        return [storage for reference in self._alive.values() if (storage := reference()) is not None]

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._alive[id(storage)] = weakref.ref(storage, partial(self._remove, id(storage), size))

    def _remove(self, key: int, size: int, reference: Any) -> None:
        self.bytes -= size
        del self._alive[key]


class LargestGather(TorchDispatchMode):
    """Notes how many elements the largest tensor has that was gathered from other ranks while it was on.

    Attributes:
        elements: of that tensor; 0 where nothing was gathered.
    """

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # as for LiveBytes
        out = func(*args, **(kwargs or {}))
        if "all_gather" in str(func):
            self.elements = max(self.elements, *(tensor.numel() for tensor in _tensors(out)))
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a DTensor, or another wrapper, is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):  # a DTensor names its mesh too
            yield from _parts(part)


def looks_at_values(error: BaseException) -> bool:
    """Whether a run on fake tensors ended because something asked for their values, which they do not have."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    return isinstance(error, kinds) or ".numpy() is not supported" in str(error)


@dataclass(frozen=True)
class ActivationBytes:
    """Of one microbatch on one rank; weights and their gradients left out.

    Attributes:
        kept: alive once the loss is known, for the backward pass.
        peak: the most alive at once during forward and backward, passing results included. Gradients of weights count
            until they are complete.
    """

    kept: int
    peak: int


def step_bytes(
    model: nn.Module, loss: Loss, transforms: Transforms, batch: Batch, fake: FakeTensorMode | None = None
) -> ActivationBytes:
    """Run forward, loss and backward once, as a step does, and count; leaves no gradients behind.

    Args:
        model: transformed and with storage, on real or on fake tensors.
        loss: wrapped by the transforms.
        transforms: of the run.
        batch: as the loader gives it, on the model's device.
        fake: the mode that the tensors are of, if they are fake.
    """
    with ExitStack() as stack:
        for _, parameter in trained_parameters(model):
            # At once, as FSDP sums and frees them: kept, they would count as activations.
            hook = parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            stack.callback(hook.remove)
        stack.enter_context(transforms.computing())
        live = stack.enter_context(LiveBytes(fake))
        batch = transforms.prepare_batch(batch)
        value = as_terms(loss(model(batch.tokens_BS, **batch.extras), batch.labels_BS)).total
        # Weights that FSDP has gathered were made meanwhile too, and those of a layer are resized to nothing after it.
        weights = {id(part.untyped_storage()) for p in model.parameters() for part in _parts(p)}
        kept = sum(storage.nbytes() for storage in live.storages() if id(storage) not in weights)
        value.backward()
        model.zero_grad()  # where FSDP has put them: past the hooks
        return ActivationBytes(kept, live.peak_bytes)
