"""Progressive Residual Warmup as a transform of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import field_validator
from torch import nn

from titan_prores import (
    ComponentSpec,
    ConfigError,
    InitRule,
    Phase,
    ScaledResidualAdd,
    Section,
    Transform,
    TransformContext,
    register,
    setting,
    slot,
)
from titan_prores.prores import SCHEDULE_NAME, ProRes, as_schedule

WARM = 2**50  # a step after every warmup, and one that float64 still counts

_POWERS = [2**k for k in range(WARM.bit_length())]  # steps at which a schedule is looked at


@register("transform", "prores")
class ProResTransform(Transform):
    """Progressive Residual Warmup: residual branches scaled by alpha(layer, step), from 0 to 1 (arXiv 2603.05369)."""

    class Config(Section):
        residual_schedule: ComponentSpec = slot("residual_schedule", "linear", "alpha(layer, step) and its length")
        start: Literal["fresh", "warm"] | int | None = setting(
            None,
            'where the schedule starts: "fresh" at step 0, the default for new weights; "warm" with every alpha at its '
            "last value; a number at that step (an adaptive schedule starts without measurements). Required with "
            "checkpoint.init_from",
            on_resume="same",
        )
        log_alpha: bool = setting(True, "write alpha of every layer to the detailed metrics rows", on_resume="free")

        @field_validator("start")
        @classmethod
        def _a_step(cls, value: str | int | None) -> str | int | None:
            if isinstance(value, int) and value < 0:
                raise ValueError("is not a step (allowed: fresh, warm, or a step from 0)")
            return value

        @property
        def first_step(self) -> int:
            """Step of the schedule at step 0 of the run."""
            return {None: 0, "fresh": 0, "warm": WARM}.get(self.start, self.start)

    phase = Phase.REWRITE
    start_key = "start"

    def prepare(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        self.schedule = as_schedule(self.config.residual_schedule.build(n_layers=len(model.layers)))

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        # A user's own schedule shows its faults here rather than at its first step.
        values = self.schedule.alpha(0)
        if values.shape != (len(model.layers),):
            raise ValueError(
                f"{self.config.residual_schedule.name}.alpha(0) has shape {values.shape}, not [{len(model.layers)}]"
            )
        if self.schedule.trained and self.config.first_step:
            raise ConfigError(
                "start",
                "alpha of this schedule comes from its logits, and not from a step",
                value=self.config.start,
                allowed="fresh",
            )
        if self.config.start == "warm":
            self.schedule.alpha(WARM)

    def start_matters(self) -> bool:
        # The logits of a learned one are weights: they come with the others, or init_from_missing names them.
        if self.schedule.trained:
            return False
        first, *later = (self._alpha(step) for step in (0, *range(1, 100), *_POWERS))
        return first is None or any(alpha is None or not np.array_equal(first, alpha) for alpha in later)

    def leaves_model_as_it_is(self, step: int) -> bool:
        if self.schedule.trained:
            return False
        step += self.config.first_step
        later = (self._alpha(step + after) for after in (0, *_POWERS))
        return all(alpha is not None and (alpha == 1).all() for alpha in later)

    def _alpha(self, step: int) -> np.ndarray | None:
        """None where a schedule of a user's own has none so late."""
        try:
            return self.schedule.alpha(step)
        except Exception:
            return None

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        self.prores = ProRes(model, self.schedule, mesh=context.mesh.device_mesh)

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        scaled = sum(isinstance(module, ScaledResidualAdd) for module in model.modules())
        if scaled != self.prores.n_adds or scaled < len(model.layers):
            raise RuntimeError(f"{scaled} residual adds are scaled, {self.prores.n_adds} were replaced")

    def describe(self) -> str:
        schedule = self.config.residual_schedule
        settings = schedule.config.model_dump().items()
        length = self.schedule.describe() or ", ".join(
            f"{key} = {value:g}" for key, value in settings if isinstance(value, (int, float))
        )
        start = {None: "", "fresh": "", "warm": ", warm from the start"}.get(
            self.config.start, f", from step {self.config.start} on"
        )
        return f"{self.prores.n_adds} residual adds scaled, {schedule.name}{f' ({length})' if length else ''}{start}"

    def init_rules(self) -> Sequence[InitRule]:
        trained = self.prores.trained
        return [] if trained is None else [InitRule(f"{SCHEDULE_NAME}.logits", trained.fill)]

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        if self.prores.trained is None:
            return []
        return [{"params": [self.prores.trained.logits], "lr": self.schedule.lr, "weight_decay": 0.0}]

    def before_step(self, step: int) -> None:
        self.prores.set_step(step + self.config.first_step)

    def after_backward(self) -> None:
        self.prores.after_backward()

    def state(self) -> dict[str, Any]:
        return self.schedule.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.schedule.load_state(state)

    def row(self, step: int, *, detailed: bool) -> dict[str, Any]:
        alpha = self.prores.values
        row: dict[str, Any] = {"alpha_min": float(alpha.min()), "alpha_max": float(alpha.max())}
        if detailed and self.config.log_alpha:
            row["alpha"] = alpha.tolist()
        if detailed:
            row |= self.schedule.row(step + self.config.first_step)
        return row
