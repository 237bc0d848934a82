"""What a model must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from titan_prores.config.contracts import optional
from titan_prores.config.sections import Section

if TYPE_CHECKING:
    import torch
    from torch import nn


# Fills a full fp32 tensor in place, drawing from the generator.
Distribution = Callable[["torch.Tensor", "torch.Generator"], None]


@dataclass(frozen=True)
class InitRule:
    """How parameters whose name matches a shell-style pattern are drawn."""

    pattern: str
    distribution: Distribution


@dataclass(frozen=True)
class TensorParallelPlan:
    """How the layers of a model are split over the ranks of a tensor-parallel group.

    Between blocks each rank holds its part of the sequence. Every weight of the model belongs to a module of the plan.

    Attributes:
        modules: pattern of module names, * standing for one part of a dotted name -> how such a module is split:
            "vocabulary", an embedding, by rows; its output is split over the sequence;
            "sequence", a norm: whole weights, applied to a part of the sequence;
            "gather", a module whose first input is the whole sequence;
            "column" and "row", a linear inside of a gathered module, over its outputs or over its inputs; the sum of a
            row is split over the sequence again;
            "logits", the output projection, gathered, over the vocabulary.
        divisible: what the degree must divide, under the name that a message gives it.
        spread: what need not be divisible, but must leave every rank a share.
    """

    modules: Mapping[str, str]
    divisible: Mapping[str, int]
    spread: Mapping[str, int]


class Model(Protocol):
    """An nn.Module from tokens_BS (int64) to logits_BSV, built under the meta device.

    Every residual add in it is a `titan_prores.prores.ResidualAdd`.
    """

    layers: nn.ModuleList  # the blocks, shallowest first; each is sharded, compiled and warmed up as one

    def __init__(self, config: Section, *, vocab_size: int, seq_len: int) -> None: ...

    def init_rules(self) -> Sequence[InitRule]:
        """Ordered (pattern, distribution) rules; the first whose pattern matches a parameter's name draws it."""

    def fill_buffers(self) -> None:
        """Compute every buffer, persistent ones too: allocating the model's storage has lost them."""

    def flops_per_token(self) -> int:
        """Floating point operations of forward and backward for one token of a seq_len sequence."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape [batch, sequence, vocabulary], of token ids, shape [batch, sequence].

        A parameter more, of a name that a transform has in its `batch_extras`, lets that transform be used with it.
        """

    @optional
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """How the model is split by tensor parallelism, where it can be."""


def tensor_parallel_plan(model: nn.Module) -> TensorParallelPlan | None:
    """The plan of a model; None where it has none."""
    plan = getattr(model, "tensor_parallel_plan", None)
    return None if plan is None else plan()
