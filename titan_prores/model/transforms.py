"""The transforms of a run, as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from titan_prores.config.errors import ConfigError
from titan_prores.config.layout import AXES
from titan_prores.distributed.failures import own_fault
from titan_prores.protocols.transform import Phase, Transform, TransformContext

if TYPE_CHECKING:
    from titan_prores.protocols.batch import Batch
    from titan_prores.protocols.loss import Loss
    from titan_prores.protocols.model import InitRule


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

    def apply(self, model: nn.Module, context: TransformContext) -> list[str]:
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
                transform.apply(model, context)
                transform.verify(model, context)
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
            if what := transform.describe():
                lines.append(f"{name}: {what}")
        for axis, degree in context.mesh.degrees.items():
            if degree > 1 and axis not in context.handled_axes:
                raise ConfigError(
                    f"parallelism.{AXES[axis]}", "no parallelism that is on handles this axis of the mesh", value=degree
                )
        if context.param_dtype != context.dtype and not context.mixed_precision_is_handled:
            dtype = str(context.param_dtype).removeprefix("torch.")
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

    def prepare_batch(self, batch: Batch) -> Batch:
        """The batch as the first transform's `prepare_batch` gives it to the second, and so on."""
        for transform in self:
            batch = transform.prepare_batch(batch)
        return batch

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
