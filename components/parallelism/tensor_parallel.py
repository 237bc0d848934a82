"""Tensor and sequence parallelism over DTensor: a model's own plan, turned into torch's parallel styles.

The residual stream is split over the sequence, linears over their rows or columns, embedding and logits over the
vocabulary (arXiv 1909.08053, 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from titan_prores import (
    Capability,
    ConfigError,
    Parallelism,
    Phase,
    Section,
    TensorParallelPlan,
    TransformContext,
    register,
    setting,
    tensor_parallel_plan,
    trained_parameters,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@register("parallelism", "tensor_parallel")
class TensorParallel(Parallelism):
    """Splits every layer over tp by the model's own plan, with sequence-parallel residual stream and loss parallel."""

    class Config(Section):
        async_tp: bool = setting(
            False, "overlap communication with matmuls inside compiled blocks; needs CUDA with symmetric memory"
        )

    phase = Phase.TENSOR_PARALLEL
    axes = ("tp",)

    @classmethod
    def check_combination(cls, config: Config, others: Collection[Capability]) -> None:
        if config.async_tp and Capability.COMPILES_LAYERS not in others:
            raise ConfigError("async_tp", "needs the transform compile, in whose code it works", value=True)

    def prepare(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        self.degree = degrees["tp"]

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        if self.degree == 1:
            if self.config.async_tp:
                problem = "needs parallelism.tensor_parallel_degree of more than 1"
                raise ConfigError("parallelism.tensor_parallel.async_tp", problem, value=True)
            return
        key = "parallelism.tensor_parallel_degree"
        plan = tensor_parallel_plan(model)
        if plan is None:
            problem = f"the model {type(model).__name__} has no tensor_parallel_plan() that says how to split it"
            raise ConfigError(key, problem, value=self.degree, allowed="1")
        if not isinstance(plan, TensorParallelPlan):
            problem = f"{type(model).__name__}.tensor_parallel_plan() returns a {type(plan).__name__}"
            raise ConfigError(
                key, problem, value=self.degree, allowed="a titan_prores.protocols.model.TensorParallelPlan"
            )
        uneven = [f"{name} {size}" for name, size in plan.divisible.items() if size % self.degree]
        scarce = [f"{name} {size}" for name, size in plan.spread.items() if not _all_have_a_share(size, self.degree)]
        reasons = [f"does not divide {', '.join(uneven)}"] if uneven else []
        reasons += [f"leaves a rank nothing of {', '.join(scarce)}"] if scarce else []
        if reasons:
            common = math.gcd(*plan.divisible.values())
            valid = [
                degree
                for degree in range(1, common + 1)
                if common % degree == 0 and all(_all_have_a_share(size, degree) for size in plan.spread.values())
            ]
            raise ConfigError(key, "; ".join(reasons), value=self.degree, allowed=valid)
        if self.config.async_tp and not torch.cuda.is_available():
            raise ConfigError("parallelism.tensor_parallel.async_tp", "needs CUDA", value=True, allowed="false")

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        context.handled_axes |= set(self.axes)
        if self.degree == 1:
            return
        from titan_prores.components.parallelism._styles import STYLES, float8_styles

        self.mesh = context.mesh.device_mesh["tp"]
        self.plan: TensorParallelPlan = model.tensor_parallel_plan()
        float8 = context.float8_input_linears
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        float8_makers = float8_styles(self.mesh.device_type) if float8 else {}
        for pattern, word in self.plan.modules.items():
            if word not in STYLES:
                raise ValueError(f"the plan has {word} for {pattern} (allowed: {', '.join(STYLES)})")
            for name, module in matching(model, pattern):
                # One input for several linears is cast only where all of them want it so.
                linears = {name} if word != "gather" else self._columns_below(model, name)
                cast = word in float8_makers and linears and linears <= float8
                make_style = float8_makers[word] if cast else STYLES[word][0]
                try:
                    self._split(module, make_style(), with_weights=STYLES[word][1] is not None)
                except NotImplementedError as error:  # such as a module that a transform has put in a linear's place
                    problem = f'{name} is a {type(module).__name__}, which cannot be split as "{word}": {error}'
                    key = "parallelism.tensor_parallel_degree"
                    raise ConfigError(key, problem, value=self.degree, allowed="1") from error
        for name in frozen:  # torch's style of norms makes new parameters, which are trained
            model.get_parameter(name).requires_grad_(False)

    def _split(self, module: nn.Module, style: ParallelStyle, *, with_weights: bool) -> None:
        """Apply a style to a module. What another transform has put inside one with weights, such as adapters, is kept
        whole on every rank: it takes and gives DTensors, which are redistributed as its operations need."""
        from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
        from torch.distributed.tensor.parallel import parallelize_module

        inside = module._modules
        if with_weights:
            module._modules = {}  # torch's styles would split the weights inside as well
        # The weights are on the meta device: there is nothing to send to other ranks.
        parallelize_module(module, self.mesh, style, src_data_rank=None)
        module._modules = inside
        for owner in module.modules() if with_weights else ():
            for name, parameter in owner.named_parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    whole = distribute_tensor(parameter, self.mesh, [Replicate()], src_data_rank=None)
                    setattr(owner, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

    def _columns_below(self, model: nn.Module, name: str) -> set[str]:
        """Names of the linears that take a gathered module's input."""
        columns = [pattern for pattern, word in self.plan.modules.items() if word == "column"]
        return {found for pattern in columns for found, _ in matching(model, pattern) if found.startswith(f"{name}.")}

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        if self.degree == 1:
            return
        from torch.distributed.tensor import DTensor

        from titan_prores.components.parallelism._styles import STYLES

        for pattern, word in self.plan.modules.items():
            modules = list(matching(model, pattern))
            if not modules:
                raise RuntimeError(f"{pattern} of the tensor-parallel plan matches no module")
            _, placement = STYLES[word]
            # A bias of a row is not split; that it is placed at all is checked below.
            placed = [
                module.weight for _, module in modules if isinstance(getattr(module, "weight", None), nn.Parameter)
            ]
            if placement is not None and not placed:
                raise RuntimeError(f"no module that {pattern} of the tensor-parallel plan matches has a weight")
            if placement is not None and any(getattr(p, "placements", None) != (placement,) for p in placed):
                raise RuntimeError(f"weights of {pattern} are not placed as its {word} in the plan says")
        # One parameter on another mesh would end the run at its first clipping of gradients.
        left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if left:
            raise RuntimeError(f"parameters that the tensor-parallel plan leaves out: {', '.join(left[:3])}")

    def describe(self) -> str:
        if self.degree == 1:
            return ""
        how = ", asynchronous in compiled blocks" if self.config.async_tp else ""
        return f"{self.degree} ranks split every layer, the residual stream by sequence, the vocabulary by rows{how}"

    def on_materialize(self, model: nn.Module) -> None:
        if self.degree == 1:
            return
        if self.config.async_tp:
            self._overlap(next(model.parameters()).device)
        # Not earlier: these parameters are not those that `apply` saw.
        for _, parameter in trained_parameters(model):
            parameter.register_post_accumulate_grad_hook(_finish_sum)

    def _overlap(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError("parallelism.tensor_parallel.async_tp", "needs CUDA", value=True, allowed="false")
        from torch._inductor import config as inductor
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        inductor._micro_pipeline_tp = True
        enable_symm_mem_for_group(self.mesh.get_group().group_name)

    def computing(self) -> AbstractContextManager[None]:
        if self.degree == 1:
            return super().computing()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose name matches a shell-style pattern, where * stands for one part of a dotted name."""
    for name, module in model.named_modules():
        if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
            yield name, module


def _all_have_a_share(size: int, degree: int) -> bool:
    """Whether chunks of ceil(size / degree) leave something for the last of `degree` ranks."""
    return (degree - 1) * -(-size // degree) < size


def _finish_sum(parameter: nn.Parameter) -> None:
    """Sum the gradient of a norm, which saw its part of the sequence only; where FSDP2 is on, it does this itself."""
    from torch.distributed.tensor import DTensor

    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
