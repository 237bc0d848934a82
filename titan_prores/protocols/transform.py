"""Transforms: changes of a model that declare their phase, so that a recipe never chooses an order.

Wrong orders fail late or silently: tensor parallelism before the float8 swap raises, compiling before tensor
parallelism shards nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from titan_prores.config.sections import Section

if TYPE_CHECKING:
    from titan_prores.distributed.mesh import Mesh
    from titan_prores.protocols.batch import Batch
    from titan_prores.protocols.loss import Loss
    from titan_prores.protocols.model import InitRule


class Phase(IntEnum):
    """When a transform is applied, first to last.

    The three in the middle wrap `layer.forward`, an attribute of the instance from then on: modules, their names and
    the hooks on them stay what they are, and whatever a later phase hooks on a layer runs outside. Which side of the
    compiled code activation checkpointing belongs on depends on how it works, so there is a phase for each.
    """

    REWRITE = 1  # replaces modules of the model itself: ProRes
    PRECISION = 2  # swaps linears: float8
    TENSOR_PARALLEL = 3  # shards linears over an axis
    CHECKPOINT_INSIDE = 4  # activation checkpointing that looks at single operations: the compiler has to see it
    COMPILE = 5  # torch.compile of each layer
    CHECKPOINT_OUTSIDE = 6  # activation checkpointing that runs a layer again as it is, compiled or not
    DATA_PARALLEL = 7  # FSDP2, HSDP


class Capability(Enum):
    """What one transform asks of others, whatever they are called."""

    COMPILES_LAYERS = auto()
    KEEPS_MEMORY_BUDGET = auto()  # compiles layers with a partitioner that keeps to a share of the activations
    GATHERS_WEIGHTS = auto()  # weights are sharded, and gathered for forward and backward
    OFFLOADS_WEIGHTS = auto()  # weights are kept in the memory of the CPU


@dataclass
class TransformContext:
    """What transforms are told, and what earlier ones leave for later ones.

    Attributes:
        mesh: the device mesh of the run.
        dtype: dtype that weights and optimizer state are kept in.
        param_dtype: dtype of weights in forward and backward.
        reduce_dtype: dtype in which gradients are summed over ranks.
        microbatch_tokens: tokens of a micro-batch of a data-parallel rank; None where unknown.
        parameter_device: where weights and optimizer state are kept; the mesh's device unless a transform says
            otherwise.
        handled_axes: mesh axes that a transform handles. The engine refuses a recipe whose mesh has ranks along
            another one.
        mixed_precision_is_handled: whether a transform casts weights to `param_dtype`. Likewise refused otherwise.
        float8_input_linears: names of the linears whose input may be cast to float8 before it is sent to other ranks.
        gathered_itemsize: parameter name -> bytes per element in which data parallelism gathers it; parameters that are
            not in it are gathered in `param_dtype`.
    """

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    microbatch_tokens: int | None = None
    parameter_device: torch.device | None = None
    handled_axes: set[str] = field(default_factory=set)
    mixed_precision_is_handled: bool = False
    float8_input_linears: set[str] = field(default_factory=set)
    gathered_itemsize: dict[str, int] = field(default_factory=dict)


class StateHooks:
    """What checkpoints save of a transform, besides parameters. Nothing unless overridden."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to remember of this transform besides parameters, JSON-ready; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; an empty one where the checkpoint, or the run that wrote it, knows of none."""

    def after_load(self) -> None:
        """Weights were filled from a checkpoint: drop anything computed from the old weights."""


class MemoryHooks:
    """What `--check` reports about the memory of a transform. Nothing unless overridden."""

    def held_bytes(self, model: nn.Module, microbatches: int) -> dict[str, int]:
        """What this rank holds besides weights, gradients and optimizer state: what it is -> bytes."""
        return {}

    def gathered_bytes(self, model: nn.Module) -> dict[str, int]:
        """Weights that this rank gathers from others for forward and backward: group gathered at once -> bytes."""
        return {}

    def activations_note(self) -> str:
        """Why `--check` reports too many activations, found by running uncompiled code; empty if it does not."""
        return ""


class Transform(StateHooks, MemoryHooks):
    """Base of transforms and parallelisms: hooks for building a run and for its steps, which do nothing by default.

    Attributes:
        phase: place in the order; may be set per instance where it depends on the settings.
        changes_model: whether the model computes something else with it, rounding aside, so that it may not be switched
            on or off where a run resumes; None = where its phase is REWRITE.
        start_key: its setting that says where a schedule of its own starts; None = it has no such setting. A run that
            takes its weights from elsewhere has to set it (see `start_matters`).
        batch_extras: names of what `prepare_batch` adds to `Batch.extras`; the model's forward must take them.
    """

    phase: Phase
    changes_model: ClassVar[bool | None] = None
    start_key: ClassVar[str | None] = None
    batch_extras: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Section) -> None:
        self.config = config

    @classmethod
    def capabilities(cls, config: Section) -> Collection[Capability]:
        """What other transforms may rely on, or cannot work with, when this one is on with these settings."""
        return ()

    @classmethod
    def check_combination(cls, config: Section, others: Collection[Capability]) -> None:
        """Check the settings against what the other transforms of the recipe do.

        Args:
            config: settings of this transform.
            others: capabilities of every other transform and parallelism that is on.

        Raises:
            ConfigError: they do not work together; its key is relative to this transform's section.
        """

    def prepare(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        """Make what the other methods need, before any of them is called; arguments and errors as of `check`."""

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        """Check settings against the untransformed model on the meta device, before any process group exists.

        Args:
            model: the whole model.
            degrees: mesh axis -> ranks along it.

        Raises:
            ConfigError: the settings do not fit the model or the mesh; its key is the full one, or
                relative to the transform's section.
        """

    def start_matters(self) -> bool:
        """Whether the choice that `start_key` offers makes a difference; asked after `prepare`."""
        return True

    def leaves_model_as_it_is(self, step: int) -> bool:
        """Whether the model computes the same without it, in the update after `step` completed ones and later.

        Asked after `prepare`, where a run resumes with it that was without, and at every save.
        """
        return False

    @abstractmethod
    def apply(self, model: nn.Module, context: TransformContext) -> None:
        """Change the model, which is on the meta device, in place."""

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        """Raise RuntimeError unless the change took effect: nothing matched is an error. Changes nothing itself."""

    def init_rules(self) -> Sequence[InitRule]:
        """How the parameters are drawn that this transform, once applied, has added to the model.

        They come before the model's own rules, which must not match any of them. No other transform may change names.
        Weights that were there keep their names, trained or frozen (`requires_grad`). Parameters put inside of a linear
        that tensor parallelism splits, such as adapters, are whole on every rank and need no entry in the plan.
        """
        return ()

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Those parameters as groups of a torch optimizer, with an `lr` (the peak) and what else is theirs alone.

        They join the run's optimizer as groups of their own. Clipping neither counts nor scales their gradients.
        """
        return []

    def wrap_loss(self, loss: Loss) -> Loss:
        """What training shall call instead of `loss`, any callable; called once, in order of phase.

        A term that is added belongs into `titan_prores.protocols.loss.LossTerms`.
        """
        return loss

    def wrap_validation_loss(self, loss: Loss) -> Loss:
        """What validation shall call instead of the cross-entropy: the same, computed in another way."""
        return loss

    def describe(self) -> str:
        """One line for the log and `--check`: what was done, empty where nothing was; a table may follow it."""
        return ""

    def on_materialize(self, model: nn.Module) -> None:
        """The model's storage was allocated and its weights drawn; refill whatever lives outside of them."""

    def before_step(self, step: int) -> None:
        """Before the first microbatch of the update after `step` completed ones."""

    def prepare_batch(self, batch: Batch) -> Batch:
        """What model and loss shall take instead of a micro-batch: with further extras, other labels, or split.

        Every batch that the model is run on passes through it, those of validation too, on the mesh's device and before
        labels are counted. A parallelism that splits sequences returns this rank's part of every tensor.
        """
        return batch

    def computing(self) -> AbstractContextManager[None]:
        """Held around forward pass, loss and backward pass of a microbatch, and around a whole evaluation."""
        return nullcontext()

    def before_microbatch(self, *, last: bool) -> None:
        """Before each forward pass of an update; `last` is the one whose backward must sum gradients over ranks."""

    def after_backward(self) -> None:
        """After the last backward pass of an update, before anybody looks at gradients."""

    def after_step(self, step: int) -> None:
        """After the optimizer; `step` counts the completed updates, this one included."""

    def after_evaluation(self) -> None:
        """Forward passes that no backward pass follows are over."""

    def row(self, step: int, *, detailed: bool) -> dict[str, Any]:
        """Keys for the metrics row of update `step`; `detailed` asks for per-layer lists too."""
        return {}


def changes_model(transform: Transform | type[Transform]) -> bool:
    """`Transform.changes_model`, with what None stands for filled in."""
    declared = transform.changes_model
    return getattr(transform, "phase", None) == Phase.REWRITE if declared is None else declared


class Parallelism(Transform):
    """A transform that spreads the model over mesh axes.

    Attributes:
        axes: axes that it handles; it is applied to every run that has it on, of degree 1 too.
    """

    axes: ClassVar[tuple[str, ...]] = ()
