"""Transforms: changes of a model that declare their phase, so that a recipe never chooses an order.

Wrong orders fail late or silently: tensor parallelism before the float8 swap raises, compiling before tensor
parallelism shards nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from titan_prores.config import Section
from titan_prores.errors import ConfigError
from titan_prores.failures import own_fault
from titan_prores.recipe import AXES

if TYPE_CHECKING:
    from titan_prores.init import InitRule
    from titan_prores.mesh import Mesh
    from titan_prores.protocols import Loss


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


@dataclass
class Facts:
    """What transforms are told, and what the ones before have left for them.

    Attributes:
        mesh: the device mesh of the run.
        dtype: dtype that weights and optimizer state are kept in.
        param_dtype: dtype of weights in forward and backward.
        reduce_dtype: dtype in which gradients are summed over ranks.
        microbatch_tokens: tokens that a data-parallel rank takes through the model at once; None where nobody knows.
        parameter_device: where weights and optimizer state are kept; the mesh's device unless a transform says
            otherwise.
        applied: names of the transforms applied so far, in order.
        handled: what a transform has taken care of: a mesh axis, or "mixed_precision". The engine refuses a model
            on which something it needs is left over.
        notes: anything else that a transform leaves for later ones, by name.
    """

    mesh: Mesh
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    microbatch_tokens: int | None = None
    parameter_device: torch.device | None = None
    applied: list[str] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)
    notes: dict[str, Any] = field(default_factory=dict)


class Transform:
    """Base of transforms and parallelisms. Hooks do nothing unless overridden.

    Attributes:
        phase: place in the order; may be set per instance where it depends on the settings.
        needs: names of transforms that must be on as well.
        conflicts: names of transforms that must not.
        changes_model: whether the model computes something else with it, rounding aside, so that it may not be switched
            on or off where a run resumes; None = where its phase is REWRITE.
        start_key: its setting that says where a schedule of its own starts; None = it has no such setting. A run that
            takes its weights from elsewhere has to set it (see `start_matters`).
    """

    phase: Phase
    needs: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    changes_model: ClassVar[bool | None] = None
    start_key: ClassVar[str | None] = None

    def __init__(self, config: Section) -> None:
        self.config = config

    @classmethod
    def check_beside(cls, config: Section, others: Mapping[str, Section]) -> None:
        """Look at the other transforms of a recipe, where `needs` and `conflicts` depend on the settings.

        Args:
            config: settings of this transform.
            others: settings of every other transform and parallelism that is on, by name.

        Raises:
            ConfigError: they do not work together; its key is relative to this transform's section.
        """

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        """Look at the untransformed model on the meta device, before any process group exists.

        Args:
            model: the whole model.
            degrees: mesh axis -> ranks along it.

        Raises:
            ConfigError: the settings do not fit the model or the mesh; its key is the full one, or
                relative to the transform's section.
        """

    def start_matters(self) -> bool:
        """Whether the choice that `start_key` offers makes a difference; asked after `check`."""
        return True

    def leaves_model_as_it_is(self, step: int) -> bool:
        """Whether the model computes the same without it, in the update after `step` completed ones and later.

        Asked after `check`, where a run resumes with it that was without, and at every save.
        """
        return False

    @abstractmethod
    def apply(self, model: nn.Module, facts: Facts) -> None:
        """Change the model, which is on the meta device, in place."""

    def verify(self, model: nn.Module, facts: Facts) -> None:
        """Raise RuntimeError unless the change took effect. A transform that matched nothing is an error."""

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

        A term that is added belongs into `titan_prores.losses.LossTerms`.
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

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to remember of this transform besides parameters, JSON-ready; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; an empty one where the checkpoint, or the run that wrote it, knows of none."""

    def after_load(self) -> None:
        """Weights were filled from a checkpoint: forget what was reckoned from others."""

    def before_step(self, step: int) -> None:
        """Before the first microbatch of the update after `step` completed ones."""

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

    def held_bytes(self, model: nn.Module, microbatches: int) -> dict[str, int]:
        """What this rank holds besides weights, gradients and optimizer state: what it is -> bytes. For `--check`."""
        return {}

    def gathered_bytes(self, model: nn.Module) -> dict[str, int]:
        """Weights that this rank gathers from others for forward and backward: group gathered at once -> bytes."""
        return {}

    def activations_note(self) -> str:
        """Why the activations that `--check` finds by running uncompiled code are too many; empty where they are not.

        For `--check`, as both above.
        """
        return ""

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


def _names(model: nn.Module) -> list[str]:
    """What weights are drawn, grouped and saved by."""
    return [*model.state_dict(), *(name for name, _ in model.named_parameters(remove_duplicate=False))]


class Transforms:
    """The transforms of a run, in the order of their phases; every hook runs in that order.

    Those of one phase stay in the order given. Iterating gives the transforms.

    Args:
        named: (name, transform) pairs.

    Attributes:
        named: the same pairs, sorted.
    """

    def __init__(self, named: Iterable[tuple[str, Transform]]) -> None:
        self.named = tuple(sorted(named, key=lambda pair: pair[1].phase))

    def __iter__(self) -> Iterator[Transform]:
        return (transform for _, transform in self.named)

    def before(self, phase: Phase) -> Transforms:
        """Those of earlier phases."""
        return Transforms((name, transform) for name, transform in self.named if transform.phase < phase)

    def since(self, phase: Phase) -> Transforms:
        """Those of this phase and later ones."""
        return Transforms((name, transform) for name, transform in self.named if transform.phase >= phase)

    # --- Building a run -------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module, facts: Facts) -> list[str]:
        """Apply and verify each.

        Returns:
            A line for each that did something: "name: what it did".

        Raises:
            ConfigError: a transform failed, had no effect or changed the names of weights, or the recipe needs
                something of the model that no transform provides.
        """
        lines = []
        for name, transform in self.named:
            names = _names(model)
            try:
                transform.apply(model, facts)
                transform.verify(model, facts)
            except (ConfigError, AssertionError):
                raise
            except Exception as error:
                raise own_fault(name, error) from error
            patterns = [rule.pattern for rule in transform.init_rules()]
            found = [each for each in _names(model) if not any(fnmatchcase(each, pattern) for pattern in patterns)]
            if found != names:
                changed = sorted(set(names) ^ set(found))[:3]
                raise ConfigError(
                    name,
                    f"changes the names of weights, which are initialized and saved by them: {changed}",
                    allowed="weights that keep their names, and new ones whose names init_rules() has",
                )
            facts.applied.append(name)
            if what := transform.describe():
                lines.append(f"{name}: {what}")
        for axis, degree in facts.mesh.degrees.items():
            if degree > 1 and axis not in facts.handled:
                raise ConfigError(
                    f"parallelism.{AXES[axis]}", "no parallelism that is on handles this axis of the mesh", value=degree
                )
        if facts.param_dtype != facts.dtype and "mixed_precision" not in facts.handled:
            dtype = str(facts.param_dtype).removeprefix("torch.")
            raise ConfigError("training.mixed_precision_param", "no parallelism that is on handles it", value=dtype)
        return lines

    def wrap_loss(self, loss: Loss) -> Loss:
        """The loss with every wrapper around it, that of the last phase outermost."""
        for transform in self:
            loss = transform.wrap_loss(loss)
        return loss

    def wrap_validation_loss(self, loss: Loss) -> Loss:
        """The same for the loss of validation."""
        for transform in self:
            loss = transform.wrap_validation_loss(loss)
        return loss

    def init_rules(self) -> list[InitRule]:
        """Rules of all parameters that transforms have added."""
        return [rule for transform in self for rule in transform.init_rules()]

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Those parameters as groups of an optimizer."""
        return [group for transform in self for group in transform.parameter_groups(model)]

    def on_materialize(self, model: nn.Module) -> None:
        for transform in self:
            transform.on_materialize(model)

    # --- Steps ----------------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        for transform in self:
            transform.before_step(step)

    def before_microbatch(self, *, last: bool) -> None:
        for transform in self:
            transform.before_microbatch(last=last)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Every transform's `computing` at once, that of the first phase outermost."""
        with ExitStack() as stack:
            for transform in self:
                stack.enter_context(transform.computing())
            yield

    def after_backward(self) -> None:
        for transform in self:
            transform.after_backward()

    def after_step(self, step: int) -> None:
        for transform in self:
            transform.after_step(step)

    def after_evaluation(self) -> None:
        for transform in self:
            transform.after_evaluation()

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        """Name -> its `state`, of those that have one."""
        return {name: state for name, transform in self.named if (state := transform.state())}

    def load_states(self, saved: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Weights of `step` updates were loaded: give every transform what `states` had of it, and tell it.

        Until the next update begins they stand as they did in the last one: alpha is what an evaluation after it had.
        """
        for name, transform in self.named:
            transform.load_state(saved.get(name, {}))
            transform.after_load()
            transform.before_step(step - 1)
