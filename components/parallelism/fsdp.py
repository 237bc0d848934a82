"""FSDP2 and HSDP: torch's fully_shard over every block and the root."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import nn

from titan_prores import Capability, ConfigError, Parallelism, Phase, Section, TransformContext, register, setting


@register("parallelism", "fsdp")
class FullyShardedDataParallel(Parallelism):
    """FSDP2 over dp_shard, HSDP where dp_replicate is more than 1; also carries mixed precision."""

    class Config(Section):
        reshard_after_forward: Literal["default", "always", "never"] = setting(
            "default", "free a block's gathered weights after forward; default frees all but the root's"
        )
        accumulate_gradients: Literal["unsharded", "sharded"] = setting(
            "unsharded",
            "with gradient accumulation: unsharded keeps unsharded gradients and reduces them once, in the last "
            "micro-batch; sharded reduces in each micro-batch, with less memory and more communication",
        )
        cpu_offload: bool = setting(
            False, "keep weights, gradients and optimizer state in CPU memory and run the optimizer there"
        )
        forward_prefetch: int = setting(
            0, "number of layers to prefetch; 0 gathers the next layer when this one starts", unit="layers", ge=0
        )
        backward_prefetch: int = setting(1, "number of layers to prefetch in the backward pass", unit="layers", ge=1)

    phase = Phase.DATA_PARALLEL
    axes = ("dp_replicate", "dp_shard")

    @classmethod
    def capabilities(cls, config: Config) -> Collection[Capability]:
        return [Capability.GATHERS_WEIGHTS] + [Capability.OFFLOADS_WEIGHTS] * config.cpu_offload

    # FSDP and DTensor take most of a second to load, which a recipe with a fault need not wait for.

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )
        from torch.distributed.tensor import Shard

        # A block that ends in a norm or a view returns a view; residual adds change nothing in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

        mesh = context.mesh.device_mesh
        sharding = mesh["dp_replicate", "dp_shard"] if context.mesh.degrees["dp_replicate"] > 1 else mesh["dp_shard"]
        # None leaves the dtype alone; naming the one they have would only add copies.
        policy = MixedPrecisionPolicy(
            param_dtype=context.param_dtype if context.param_dtype != context.dtype else None,
            reduce_dtype=context.reduce_dtype,
        )
        reshard = self.config.reshard_after_forward
        columns = _split_by_columns(model, context.mesh.degrees["dp_shard"])
        placed = {parameter for parameter in model.parameters() if _is_placed(parameter)}
        on_cuda = context.mesh.device.type == "cuda"
        if self.config.cpu_offload:
            context.parameter_device = torch.device("cpu")
        how = {
            "mesh": sharding,
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy(pin_memory=on_cuda) if self.config.cpu_offload else OffloadPolicy(),
            "shard_placement_fn": lambda parameter: Shard(1) if parameter in columns else None,
            "ignored_params": placed,
        }
        for layer in model.layers:
            fully_shard(layer, **how, reshard_after_forward=reshard != "never")
        fully_shard(model, **how, reshard_after_forward=reshard == "always")
        self._prefetch(list(model.layers))
        # The loss is divided by the global number of labels, so gradients are summed over ranks, not averaged.
        # gloo has no scaled sum, hence the second call.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.model, self.mesh = model, context.mesh
        self.placed = {name for name, parameter in model.named_parameters() if parameter in placed}
        self.param_dtype, self.reduce_dtype = context.param_dtype, context.reduce_dtype
        self.itemsizes: dict[str, int] = context.gathered_itemsize
        context.handled_axes |= set(self.axes)
        context.mixed_precision_is_handled = True

    def _prefetch(self, layers: list[nn.Module]) -> None:
        """Say which layers to gather early, where it is not what FSDP2 does by itself."""
        ahead, back = self.config.forward_prefetch, self.config.backward_prefetch
        for i, layer in enumerate(layers):
            if ahead:
                layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
            if back > 1:
                layer.set_modules_to_backward_prefetch(layers[max(0, i - back) : i][::-1])

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        from torch.distributed.tensor import DTensor

        plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if plain:
            raise RuntimeError(f"parameters that were not sharded: {', '.join(plain[:3])}")

    def describe(self) -> str:
        degrees = self.mesh.degrees
        kind = f"HSDP, {degrees['dp_replicate']} replicas of" if degrees["dp_replicate"] > 1 else "FSDP2,"
        offloaded = ", offloaded to the CPU" if self.config.cpu_offload else ""
        return f"{kind} {degrees['dp_shard']} shard{'s' if degrees['dp_shard'] > 1 else ''}{offloaded}"

    def after_evaluation(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        # What a backward pass would have freed: until then the model's parameters are not those of the optimizer.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _groups(self, model: nn.Module, itemsize: Callable[[str], int]) -> dict[str, int]:
        """Bytes, padding included, of each group of parameters that is gathered and summed at once."""
        groups = {f"layers.{n}": 0 for n in range(len(model.layers))}
        group_of = {p: f"layers.{n}" for n, layer in enumerate(model.layers) for p in layer.parameters()}
        for name, parameter in model.named_parameters():
            if name in self.placed:
                continue
            group = group_of.get(parameter, "all outside of the layers")
            size = parameter.to_local().numel() * self.mesh.degrees["dp_shard"] * itemsize(name)
            groups[group] = groups.get(group, 0) + size
        return groups

    def _gathered_itemsize(self, name: str) -> int:
        return self.itemsizes.get(name, self.param_dtype.itemsize)

    def gathered_bytes(self, model: nn.Module) -> dict[str, int]:
        return self._groups(model, self._gathered_itemsize) if self.mesh.degrees["dp_shard"] > 1 else {}

    def held_bytes(self, model: nn.Module, microbatches: int) -> dict[str, int]:
        groups = self._groups(model, self._gathered_itemsize)
        layers = [groups.pop(f"layers.{n}") for n in range(len(model.layers))]
        gathered = sum(groups.values()) + (sum(layers) if self.config.reshard_after_forward == "never" else max(layers))
        if self.mesh.degrees["dp_shard"] > 1:
            # What arrived for the layer in use, and what arrives meanwhile for the next ones.
            gathered += (1 + max(1, self.config.forward_prefetch, self.config.backward_prefetch)) * max(layers)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        summed = self._groups(
            model, lambda name: 0 if name in frozen else self.param_dtype.itemsize + self.reduce_dtype.itemsize
        )
        held = {
            "weights gathered: all outside of the layers, of the layer in use, and buffers": gathered,
            f"gradients on their way to be summed over ranks in {_name(self.reduce_dtype)}": max(summed.values()),
        }
        if microbatches > 1 and self.config.accumulate_gradients == "unsharded":
            unsharded = self._groups(model, lambda name: 0 if name in frozen else self.reduce_dtype.itemsize)
            count = sum(unsharded.values())
            held[f"{_name(self.reduce_dtype)} gradients, unsharded until the last microbatch sums them"] = count
        return held

    def before_microbatch(self, *, last: bool) -> None:
        self.model.set_requires_gradient_sync(last or self.config.accumulate_gradients == "sharded")


def _is_placed(parameter: nn.Parameter) -> bool:
    """Whether a transform before has placed it over the data axes itself, and so sees to its gradient too."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) and "dp_shard" in parameter.device_mesh.mesh_dim_names


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _split_by_columns(model: nn.Module, degree: int) -> set[nn.Parameter]:
    """Parameters whose rows another axis has split unevenly, such as an embedding of 257 ids over two ranks.

    Their shards of shards would not be where torch's placements say, beyond two by two ranks: neither weights by name
    nor checkpoints could find them. Columns are free.

    Raises:
        ConfigError: a parameter without columns that `degree` divides.
    """
    from torch.distributed.tensor import DTensor, Shard

    found = set()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        ranks = [parameter.device_mesh.size(axis) for axis, p in enumerate(parameter.placements) if p == Shard(0)]
        if any(len(parameter) % size for size in ranks):
            columns = parameter.shape[1] if parameter.ndim > 1 else 1
            if columns % degree:
                raise ConfigError(
                    "parallelism.data_parallel_shard_degree",
                    f"does not divide the {columns} columns of {name}, whose {len(parameter)} rows are split unevenly "
                    "over tp",
                    value=degree,
                    allowed=[n for n in range(1, columns + 1) if columns % n == 0],
                )
            found.add(parameter)
    return found
