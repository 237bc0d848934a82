"""torch's parallel styles for the words of a tensor-parallel plan.

Apart from tensor_parallel.py because DTensor takes half a second to load: a recipe with a fault need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

SEQUENCE = Shard(1)  # of activations [B, S, D]


class GatherSequence(ParallelStyle):
    """The module's first input, a local part of the sequence, is gathered once for all the linears inside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            part = DTensor.from_local(inputs[0], device_mesh, (SEQUENCE,), run_check=False)
            return part.redistribute(placements=(Replicate(),)), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class VocabularyEmbedding(RowwiseParallel):
    """Each rank looks up its own rows; the sum over ranks arrives split over the sequence."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=SEQUENCE)

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):  # torch counts the arguments
        # What comes out is still on its way (an AsyncCollectiveTensor). Fed so to a compiled block under FSDP2, it
        # gives the embedding a gradient of exactly 0 while the loss is right; a copy waits for it.
        return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh).clone()


# Word of a plan -> the style, and how the weight of such a module is placed; None = it has none of its own.
STYLES: dict[str, tuple[Callable[[], ParallelStyle], Placement | None]] = {
    "vocabulary": (VocabularyEmbedding, Shard(0)),
    "sequence": (lambda: SequenceParallel(use_local_output=True), Replicate()),
    "gather": (GatherSequence, None),
    "column": (ColwiseParallel, Shard(0)),
    "row": (lambda: RowwiseParallel(output_layouts=SEQUENCE), Shard(1)),
    "logits": (lambda: ColwiseParallel(input_layouts=SEQUENCE, use_local_output=False), Shard(0)),
}
