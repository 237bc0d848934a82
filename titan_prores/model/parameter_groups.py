"""Optimizer parameter groups from ordered name patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from titan_prores.config.errors import ConfigError
from titan_prores.config.sections import Section, setting


class ParameterGroup(Section):
    """Parameters whose name matches one of the patterns, and what is different for them."""

    patterns: tuple[str, ...] = setting(
        help="shell-style patterns of parameter names; each must match at least one", min_length=1
    )
    weight_decay: float | None = setting(None, "weight decay of the group; default the optimizer's", ge=0)
    lr_scale: float = setting(1.0, "factor of the learning rate", ge=0)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The named parameters that are trained; frozen ones, whose `requires_grad` is False, are left out."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


NO_DECAY = ("*norm.weight", "*.bias", "tok_embeddings.weight")


def split_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    groups: Sequence[ParameterGroup] | None,
    lr: float,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Torch parameter groups: one for each of `groups` in order, a parameter going to the first that matches it.

    The last group takes the rest. `groups = None` is the usual pair: no decay on what `NO_DECAY` matches, where a model
    need not have all of it.

    Raises:
        ConfigError: a pattern that matches none of the parameters; key `groups`.
    """
    left = dict(named_parameters)
    names = list(left)
    if groups is None:
        present = tuple(pattern for pattern in NO_DECAY if fnmatch.filter(names, pattern))
        groups = [ParameterGroup(patterns=present, weight_decay=0.0)] if present else []
    result = []
    for number, group in enumerate(groups):
        for pattern in group.patterns:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"groups[{number}].patterns",
                    "matches no trained parameter",
                    value=pattern,
                    allowed=f"shell-style patterns of names such as {', '.join(names[:3])}",
                )
        mine = [name for name in left if any(fnmatch.fnmatchcase(name, p) for p in group.patterns)]
        decay = weight_decay if group.weight_decay is None else group.weight_decay
        result.append(_group(left, mine, lr * group.lr_scale, decay))
    result.append(_group(left, list(left), lr, weight_decay))
    return [group for group in result if group["params"]]


def _group(left: dict[str, nn.Parameter], names: list[str], lr: float, weight_decay: float) -> dict[str, Any]:
    parameters = [left.pop(name) for name in names]
    return {"params": parameters, "lr": lr, "weight_decay": weight_decay}
