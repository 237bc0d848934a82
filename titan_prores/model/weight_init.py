"""Weights by parameter name: the same on every mesh.

Each full tensor is drawn on the training device from a generator seeded by (seed, name), then every rank keeps its own
part. Nothing depends on the order of parameters or on the number of ranks. (Drawing a sharded DTensor in place gives
every rank of a CPU mesh the same shard.)
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from titan_prores.protocols.model import Distribution, InitRule


def constant(value: float) -> Distribution:
    """The same value everywhere; for norm weights."""
    return lambda tensor, generator: tensor.fill_(value)


def ones(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """All ones; for norm weights."""
    tensor.fill_(1.0)


def zeros(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """All zeros; for biases."""
    tensor.zero_()


def normal(std: float) -> Distribution:
    """Normal with mean 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def trunc_normal(std: float, cut: float = 3.0) -> Distribution:
    """Normal with mean 0, redrawn outside `cut` standard deviations; at 3 the resulting std is 0.9866 of `std`."""
    # The bounds of torch's trunc_normal_ are absolute.
    return lambda tensor, generator: nn.init.trunc_normal_(tensor, 0.0, std, -cut * std, cut * std, generator=generator)


def fan_in_normal(gain: float = 1.0) -> Distribution:
    """Normal with mean 0 and std gain / sqrt(columns): inputs of variance 1 give outputs of variance gain^2."""
    return lambda tensor, generator: tensor.normal_(0.0, gain * tensor.shape[1] ** -0.5, generator=generator)


def xavier_normal(gain: float = 1.0) -> Distribution:
    """Normal with mean 0 and std gain * sqrt(2 / (rows + columns))."""
    return lambda tensor, generator: nn.init.xavier_normal_(tensor, gain, generator=generator)


def match_rules(rules: Sequence[InitRule], names: Iterable[str]) -> dict[str, InitRule]:
    """Parameter name -> the first rule whose pattern matches it.

    Raises:
        ValueError: a name that no rule matches, or a rule that matches no name and is not shadowed by earlier ones.
    """
    names = list(names)
    matched: dict[str, InitRule] = {}
    for name in names:
        rule = next((r for r in rules if fnmatch.fnmatchcase(name, r.pattern)), None)
        if rule is None:
            raise ValueError(f"no init rule matches the parameter {name}")
        matched[name] = rule
    for rule in rules:
        if not any(fnmatch.fnmatchcase(name, rule.pattern) for name in names):
            raise ValueError(f"the init rule for {rule.pattern} matches no parameter")
    return matched


def name_seed(seed: int, name: str) -> int:
    """Seed of one parameter's generator."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device, parameter_device: torch.device | None = None) -> None:
    """Give a meta model storage, every element unset: buffers hold NaN, or the lowest integer, until they are filled.

    A parameter that stands under several names stays one.

    Args:
        model: on the meta device.
        device: of buffers.
        parameter_device: of parameters; default as of buffers.
    """
    names = list(model.named_parameters(remove_duplicate=False))
    shared: dict[int, list[str]] = {}
    for name, parameter in names:
        shared.setdefault(id(parameter), []).append(name)
    model.to_empty(device=parameter_device or device)
    for first, *others in shared.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            if model.get_parameter(name) is not model.get_parameter(first):
                setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    if parameter_device is not None and parameter_device != device:
        _move_the_rest(model, device)
    for buffer in model.buffers():
        if (unset := _unset(buffer)) is not None:
            buffer.fill_(unset)


def _move_the_rest(model: nn.Module, device: torch.device) -> None:
    """Everything but parameters to `device`: buffers, and what modules move in an `_apply` of their own."""
    for module in model.modules():
        if not list(module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def unfilled_buffers(model: nn.Module) -> list[str]:
    """Names of buffers that still hold nothing but what `allocate` left in them."""
    return [
        name
        for name, buffer in model.named_buffers()
        if buffer.numel()
        and (unset := _unset(buffer)) is not None
        and bool((buffer.isnan() if unset != unset else buffer == unset).all())
    ]


def _unset(buffer: torch.Tensor) -> float | int | None:
    """A value that no filled buffer is likely to be full of; None where the dtype has none, as bool."""
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return float("nan")
    return None if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min


@torch.no_grad()
def init_weights(model: nn.Module, rules: Sequence[InitRule], seed: int) -> None:
    """Draw every parameter of a materialised, possibly sharded model.

    Args:
        model: parameters may be plain tensors or DTensors of any placement and dtype.
        rules: the model's `init_rules()`.
        seed: the run's seed.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = dict(model.named_parameters())
    for name, rule in match_rules(rules, parameters).items():
        parameter = parameters[name]
        generator = torch.Generator(device=parameter.device).manual_seed(name_seed(seed, name))
        # fp32 whatever the training dtype, so that bf16 weights are rounded fp32 weights.
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        rule.distribution(full, generator)
        full = full.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(full)
