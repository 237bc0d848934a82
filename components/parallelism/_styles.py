"""torch's parallel styles for the words of a tensor-parallel plan.

Apart from tensor_parallel.py because DTensor takes half a second to load: a recipe with a fault need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

SEQUENCE = Shard(1)  # of activations [B, S, D]


class GatherSequence(ParallelStyle):
    """The module's first input, a local part of the sequence, is gathered once for all the linears inside."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare = self._prepare(module)

        def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            part = DTensor.from_local(inputs[0], device_mesh, (SEQUENCE,), run_check=False)
            return prepare(part).redistribute(placements=(Replicate(),)), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module

    def _prepare(self, module: nn.Module) -> Callable[[DTensor], DTensor]:
        """What is done to the input before it goes to the other ranks."""
        return lambda part: part


class Float8GatherSequence(GatherSequence):
    """The input is cast to float8 first, once for all the linears inside, and gathered in a byte an element."""

    def _prepare(self, module: nn.Module) -> Callable[[DTensor], DTensor]:
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        linear = next(m for m in module.modules() if isinstance(m, Float8Linear))  # all of them are alike
        return lambda part: hp_tensor_to_float8_dynamic(
            part,
            linear.config.cast_config_input.target_dtype,
            linear.linear_mm_config,
            gemm_input_role=GemmInputRole.INPUT,
        )


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


def float8_styles(device: str) -> dict[str, Callable[[], ParallelStyle]]:
    """Word of a plan -> torchao's style in its place, which casts to float8 before it communicates.

    For linears with one scale a tensor: the largest absolute value is that of the whole tensor, over all ranks.

    Args:
        device: device type of the mesh.
    """
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    if device == "cpu":
        _gather_float8_as_bytes()
    return {
        "gather": Float8GatherSequence,
        "column": Float8ColwiseParallel,
        "row": lambda: Float8RowwiseParallel(output_layouts=SEQUENCE),
        "logits": lambda: Float8ColwiseParallel(input_layouts=SEQUENCE, use_local_output=False),
    }


def _gather_float8_as_bytes() -> None:
    """Have torchao's float8 tensors gathered as uint8: gloo knows no float8."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    ops = torch.ops._c10d_functional

    def gather(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Float8TrainingTensor:
        part, *rest = args
        whole = ops.wait_tensor(op(part._data.contiguous().view(torch.uint8), *rest, **kwargs or {}))
        return Float8TrainingTensor(
            whole.view(part._data.dtype), part._scale, part._orig_dtype, part._linear_mm_config, part._gemm_input_role
        )

    FLOAT8_OPS_TABLE[ops.all_gather_into_tensor.default] = gather
