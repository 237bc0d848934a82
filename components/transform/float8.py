"""Float8 training of linears with torchao: matmuls in 8 bits, weights and optimizer state as they were."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import nn

from titan_prores import (
    FLOAT8_CAPABILITIES,
    Capability,
    ConfigError,
    Phase,
    Section,
    Transform,
    TransformContext,
    has_float8_matmul,
    quiet,
    register,
    setting,
    tensor_parallel_plan,
)

# torch._scaled_mm takes no other sizes, so a smaller or odd linear would end a run at its first step on a device.
MULTIPLE = 16
SCALE_PER = {"tensorwise": "tensor", "rowwise": "row", "rowwise_with_gw_hp": "row"}


@dataclass(frozen=True)
class _Linear:
    """A linear of the model and what becomes of it.

    Attributes:
        kept: why it is not converted; empty where it is.
    """

    name: str
    out_features: int
    in_features: int
    kept: str


@register("transform", "float8")
class Float8(Transform):
    """Linears whose three matmuls are computed in float8, scaled dynamically (torchao.float8; arXiv 2209.05433)."""

    class Config(Section):
        recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = setting(
            "tensorwise",
            "tensorwise = one scale a tensor, the fastest; rowwise = one a row; "
            "rowwise_with_gw_hp = one a row, gradients of weights in high precision",
        )
        filter_fqns: tuple[str, ...] | None = setting(
            None,
            "linears to keep as they are: consecutive parts of dotted names, * within a part, such as attention.wk; "
            "default the output projection, named output",
        )
        min_features: int = setting(MULTIPLE, "smallest number of inputs and outputs of a converted linear", ge=1)
        enable_fsdp_float8_all_gather: bool = setting(
            False, "FSDP2 gathers converted weights in float8, half the bytes of bfloat16; with tensorwise only"
        )
        precompute_float8_dynamic_scale_for_fsdp: bool = setting(
            False, "with float8 all-gather: scales of all weights in one collective after each update, not one each"
        )
        emulate: bool | Literal["auto"] = setting(
            "auto", "compute in high precision what float8 would give; auto = where the device has no float8 matmul"
        )

        @model_validator(mode="after")
        def _all_gather_fits(self) -> Float8.Config:
            if self.enable_fsdp_float8_all_gather and self.recipe_name != "tensorwise":
                raise ValueError(
                    f"enable_fsdp_float8_all_gather needs recipe_name = tensorwise, not {self.recipe_name}: "
                    "a weight travels with one scale"
                )
            if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
                raise ValueError("precompute_float8_dynamic_scale_for_fsdp needs enable_fsdp_float8_all_gather = true")
            return self

    phase = Phase.PRECISION

    @classmethod
    def check_combination(cls, config: Config, others: Collection[Capability]) -> None:
        if not config.enable_fsdp_float8_all_gather:
            return
        if Capability.GATHERS_WEIGHTS not in others:
            raise ConfigError("enable_fsdp_float8_all_gather", "needs parallelism.fsdp, which is off", value=True)
        if Capability.OFFLOADS_WEIGHTS in others:
            problem = "does not work with parallelism.fsdp.cpu_offload: the scales would be where the weights are not"
            raise ConfigError("enable_fsdp_float8_all_gather", problem, value=True)

    def prepare(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        self._choose(model)

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        if (degree := degrees.get("tp", 1)) == 1:
            return
        if self.config.enable_fsdp_float8_all_gather and not self.config.precompute_float8_dynamic_scale_for_fsdp:
            raise ConfigError(
                "precompute_float8_dynamic_scale_for_fsdp",
                "must be true where float8 all-gather meets tensor parallelism: without it the ranks of tp would scale "
                "their parts of a weight each by its own",
                value=False,
            )
        if self.config.emulate is not True:
            self._check_shards(model, degree)

    def _check_shards(self, model: nn.Module, degree: int) -> None:
        """Refuse a linear whose part on a rank of tp has a size that the matmul does not take; here as on the device.

        Raises:
            ConfigError: with the linears that would have to be kept.
        """
        plan = tensor_parallel_plan(model)
        words = plan.modules if plan else {}
        odd = {}
        for linear in self.linears:
            word = next((word for pattern, word in words.items() if _matches(linear.name, pattern)), None)
            split = linear.in_features if word == "row" else linear.out_features
            if not linear.kept and split % (degree * MULTIPLE):
                odd[_starred(linear.name)] = split
        if odd:
            parts = ", ".join(f"{name} {size} / {degree}" for name, size in odd.items())
            raise ConfigError(
                "filter_fqns",
                f"on a rank of tp the sizes of some linears are not multiples of {MULTIPLE}: {parts}",
                allowed="with them kept in filter_fqns, another tensor_parallel_degree, or emulate = true",
            )

    def _choose(self, model: nn.Module) -> None:
        """Decide for each linear, by name and size.

        Raises:
            ConfigError: a filter that matches nothing, or no linear that is left.
        """
        config = self.config
        filters = ("output",) if config.filter_fqns is None else config.filter_fqns
        unused = set(config.filter_fqns or ())  # and not the default: a model may have no output projection of its own
        self.linears: list[_Linear] = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            matched = [pattern for pattern in filters if _has_part(name, pattern)]
            unused -= set(matched)
            sizes = (module.out_features, module.in_features)
            if matched:
                kept = f"filter_fqns has {matched[0]}"
            elif min(sizes) < config.min_features:
                kept = f"fewer than min_features = {config.min_features}"
            elif any(size % MULTIPLE for size in sizes):
                kept = f"not multiples of {MULTIPLE}"
            else:
                kept = ""
            self.linears.append(_Linear(name, *sizes, kept))
        if unused:
            names = ", ".join(dict.fromkeys(_starred(linear.name) for linear in self.linears))
            raise ConfigError("filter_fqns", "matches no linear", value=sorted(unused)[0], allowed=f"parts of {names}")
        if all(linear.kept for linear in self.linears):
            reasons = "; ".join(_table(self.linears)) or "the model has none"
            raise ConfigError("", f"no linear is left to convert ({reasons})")

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        with quiet("torchao", "torch.utils._pytree"):  # about kernels for chips that this one is not
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        self.emulated = self._emulate(context.mesh.device)
        self.padded = bool((context.microbatch_tokens or 0) % MULTIPLE)
        settings = replace(
            Float8LinearConfig.from_recipe_name(self.config.recipe_name),
            emulate=self.emulated,
            # Gradients of weights are sums over tokens: with zeros where their number is not what the matmul takes.
            pad_inner_dim=self.padded,
            enable_fsdp_float8_all_gather=self.config.enable_fsdp_float8_all_gather,
        )
        self.converted = {linear.name for linear in self.linears if not linear.kept}
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in self.converted, config=settings)
        # With one scale per tensor, what goes to other ranks can be cast before it goes.
        if self.config.recipe_name == "tensorwise":
            context.float8_input_linears = self.converted
        if self.config.enable_fsdp_float8_all_gather:
            context.gathered_itemsize = {f"{name}.weight": 1 for name in self.converted}
        self.model = model
        self.scales_are_current = False

    def _emulate(self, device: torch.device) -> bool:
        """What `emulate` comes to on this device.

        Raises:
            ConfigError: emulate = false and the device has no such matmul.
        """
        scale_per = SCALE_PER[self.config.recipe_name]
        available = has_float8_matmul(device, scale_per)
        if self.config.emulate == "auto":
            return not available
        if not self.config.emulate and not available:
            needs = "compute capability {}.{}".format(*FLOAT8_CAPABILITIES[scale_per])
            raise ConfigError(
                "transforms.float8.emulate",
                f"{device.type} has no {self.config.recipe_name} float8 matmul ({needs})",
                value=False,
                allowed="auto, true",
            )
        return self.config.emulate

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        from torchao.float8.float8_linear import Float8Linear

        found = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
        if found != self.converted or not found:
            raise RuntimeError(f"float8 linears are not those chosen: {sorted(found ^ self.converted)[:3]}")

    def describe(self) -> str:
        config = self.config
        how = [config.recipe_name, f"{len(self.converted)} of {len(self.linears)} linears"]
        how += ["float8 all-gather"] * config.enable_fsdp_float8_all_gather
        how += ["precomputed scales"] * config.precompute_float8_dynamic_scale_for_fsdp
        how += [f"tokens padded to a multiple of {MULTIPLE}"] * self.padded
        how.append("emulated: this device has no such matmul" if self.emulated else "by the device's own matmul")
        return "\n".join([", ".join(how), *_table(self.linears)])

    # --- Scales of weights that FSDP2 gathers in float8 -------------------------------------------------------------

    def after_load(self) -> None:
        self.scales_are_current = False

    def before_step(self, step: int) -> None:
        if not self.scales_are_current:  # of a new or a loaded run, whose optimizer has not stepped yet
            self._precompute()

    def after_step(self, step: int) -> None:
        self._precompute()

    def _precompute(self) -> None:
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        self.scales_are_current = True


def _matches(name: str, pattern: str) -> bool:
    """Whether a dotted name matches part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _has_part(name: str, pattern: str) -> bool:
    """Whether consecutive parts of a dotted name match `pattern`."""
    parts, length = name.split("."), pattern.count(".") + 1
    return any(_matches(".".join(parts[i : i + length]), pattern) for i in range(len(parts) - length + 1))


def _starred(name: str) -> str:
    """A dotted name with * for numbers, the same for every layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _table(linears: list[_Linear]) -> list[str]:
    """A line for linears of the same kind, in the order of the model."""
    groups: dict[tuple[Any, ...], int] = {}
    for linear in linears:
        key = (_starred(linear.name), linear.out_features, linear.in_features, linear.kept)
        groups[key] = groups.get(key, 0) + 1
    width = max((len(name) for name, *_ in groups), default=0)
    return [
        f"{name:<{width}}  {count:>3} x  {rows:>6} x {columns:<6}  {f'kept: {kept}' if kept else 'float8'}"
        for (name, rows, columns, kept), count in groups.items()
    ]
