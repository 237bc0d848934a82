"""Activation checkpointing: less of the forward pass is kept for the backward pass, which computes the rest again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import torch
from pydantic import field_validator, model_validator
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titan_prores import (
    Capability,
    ConfigError,
    Phase,
    Section,
    Transform,
    TransformContext,
    counted,
    one_of,
    register,
    setting,
)

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
# What selective checkpointing keeps, by name: results that are dear to compute, or to communicate, for their size. Much
# the list of torchtitan v0.2. aten.max is there for the scale of a float8 tensor, a scalar that costs a pass over it;
# aten.bmm is not, since with attention written out its result is [B, H, S, S].
OPS: dict[str, tuple[torch._ops.OpOverload, ...]] = {
    "matmul": (_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default, _aten.max.default),
    "attention": (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    ),
    "communication": (
        _collectives.reduce_scatter_tensor.default,
        _collectives.all_reduce.default,
        _collectives.all_to_all_single.default,
    ),
}

Forward = Callable[..., Any]


@register("transform", "activation_checkpoint")
class ActivationCheckpoint(Transform):
    """Activation checkpointing of the layers: memory for a second forward pass, or for part of one."""

    class Config(Section):
        mode: Literal["full", "selective", "every_k", "memory_budget"] = setting(
            "selective",
            "full = keep the input of a layer only; selective = keep results of the operations in `save` too; "
            "every_k = full for each k-th layer; memory_budget = the compiler chooses",
        )
        save: tuple[str, ...] = setting(
            tuple(OPS), f"with selective: whose results are kept: {', '.join(OPS)}", min_length=1
        )
        every_k: int = setting(2, "with every_k: layers k, 2k, 3k, ... are checkpointed", unit="layers", ge=1)
        memory_budget: float = setting(
            0.5, "with memory_budget: share of the activations to keep; 0 = as full, 1 = as none", ge=0, le=1
        )

        @field_validator("save")
        @classmethod
        def _known_ops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(one_of(name, OPS) for name in value))

        @model_validator(mode="after")
        def _settings_of_this_mode(self) -> ActivationCheckpoint.Config:
            owners = {"save": "selective", "every_k": "every_k", "memory_budget": "memory_budget"}
            for key, mode in owners.items():
                if self.mode != mode and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is a setting of mode = {mode}, and mode is {self.mode}")
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Inside of the compiled code the policy of `selective` is seen by the partitioner; outside it would meet no
        # operation at all, and everything would be computed again. The other modes need no look inside, and full
        # checkpointing inside of the compiled code fails under tensor parallelism.
        self.phase = Phase.CHECKPOINT_INSIDE if config.mode == "selective" else Phase.CHECKPOINT_OUTSIDE

    @classmethod
    def check_combination(cls, config: Config, others: Collection[Capability]) -> None:
        if config.mode != "memory_budget":
            return
        if Capability.COMPILES_LAYERS not in others:
            problem = "needs the transform compile, whose partitioner keeps to the budget"
        elif Capability.KEEPS_MEMORY_BUDGET not in others:
            problem = "needs transforms.compile.backend = inductor, whose partitioner keeps to the budget"
        else:
            return
        raise ConfigError("mode", problem, value=config.mode)

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        n_layers = len(model.layers)
        if self.config.mode == "every_k" and self.config.every_k > n_layers:
            layers = counted(n_layers, "layer")
            raise ConfigError(
                "every_k", f"the model has {layers}: none would be checkpointed", value=self.config.every_k
            )

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        config = self.config
        step = config.every_k if config.mode == "every_k" else 1
        self.layers = list(model.layers)[step - 1 :: step]
        self.n_layers = len(model.layers)
        if config.mode == "selective":
            ops = [op for name in config.save for op in OPS[name]]
            wrap = partial(_recomputed, context_fn=partial(create_selective_checkpoint_contexts, ops))
        elif config.mode == "memory_budget":
            wrap = partial(_budgeted, settings=self._compiler_settings(context))
        else:
            wrap = _recomputed
        for layer in self.layers:
            layer.forward = wrap(layer.forward)

    def _compiler_settings(self, context: TransformContext) -> dict[str, Any]:
        """What the partitioner is to be told.

        Raises:
            ConfigError: under tensor parallelism, where this torch has no way to.
        """
        settings: dict[str, Any] = {"activation_memory_budget": self.config.memory_budget}
        if context.mesh.degrees.get("tp", 1) > 1:
            # A compiled layer is then handed device meshes, whose bytes the partitioner would refuse to count.
            flag = "unsafe_treat_script_objects_as_zero_size"
            if not hasattr(functorch_config, flag):
                raise ConfigError(
                    "transforms.activation_checkpoint.mode",
                    f"does not work with tensor parallelism on torch {torch.__version__}, which has no {flag}",
                    value="memory_budget",
                )
            settings[flag] = True
        return settings

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        missed = [layer for layer in self.layers if not hasattr(layer.forward, "checkpointed")]
        if missed or not self.layers:
            raise RuntimeError(f"{len(missed) or 'all'} layers are not checkpointed")

    def describe(self) -> str:
        config = self.config
        what = {
            "full": "each computed again but for its input",
            "selective": f"keeping results of {', '.join(config.save)}",
            "every_k": f"every {config.every_k}. layer computed again but for its input",
            "memory_budget": f"the compiler keeping a share of {config.memory_budget:g}",
        }
        return f"{config.mode}, {len(self.layers)} of {self.n_layers} layers, {what[config.mode]}"

    def activations_note(self) -> str:
        share = f"the compiler keeps a share of about {self.config.memory_budget:g}"
        return share if self.config.mode == "memory_budget" else ""


def _recomputed(forward: Forward, **options: Any) -> Forward:
    """`forward` under torch's checkpoint, in the variant that works with FSDP2 and inside of compiled code."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    recomputed.checkpointed = True
    return recomputed


def _budgeted(forward: Forward, settings: Mapping[str, Any]) -> Forward:
    """Compiled `forward` under settings of the partitioner, which it reads whenever it compiles."""

    def budgeted(*args: Any, **kwargs: Any) -> Any:
        # Around each call instead of set once: other compiled code of the process is not to be changed.
        with functorch_config.patch(**settings):
            return forward(*args, **kwargs)

    budgeted.checkpointed = True
    return budgeted
