"""Progressive Residual Warmup as a transform of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from titan_prores.config import Section, setting, slot
from titan_prores.init import InitRule
from titan_prores.parts import Part
from titan_prores.prores import ProRes
from titan_prores.prores.residual import ScaledResidualAdd
from titan_prores.prores.rewrite import SCHEDULE_NAME
from titan_prores.registry import register
from titan_prores.transform import Facts, Phase, Transform


@register("transform", "prores")
class ProResTransform(Transform):
    """Progressive Residual Warmup: residual branches scaled by alpha(layer, step), from 0 to 1 (arXiv 2603.05369)."""

    class Config(Section):
        residual_schedule: Part = slot("residual_schedule", "linear", "alpha(layer, step) and its length")
        log_alpha: bool = setting(True, "write alpha of every layer to the detailed metrics rows", on_resume="free")

    phase = Phase.REWRITE

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        self.schedule = self.config.residual_schedule.build(n_layers=len(model.layers))
        # A user's own schedule shows its faults here rather than at its first step.
        values = self.schedule.alpha(0)
        if values.shape != (len(model.layers),):
            raise ValueError(f"{self.config.residual_schedule.name}.alpha(0) has shape {values.shape}, "
                             f"not [{len(model.layers)}]")  # fmt: skip

    def apply(self, model: nn.Module, facts: Facts) -> None:
        # One that can do more than say alpha can be called itself (see `protocols.ResidualSchedule`).
        schedule = self.schedule if callable(self.schedule) else self.schedule.alpha
        self.prores = ProRes(model, schedule, mesh=facts.mesh.device_mesh)

    def verify(self, model: nn.Module, facts: Facts) -> None:
        scaled = sum(isinstance(module, ScaledResidualAdd) for module in model.modules())
        if scaled != self.prores.n_adds or scaled < len(model.layers):
            raise RuntimeError(f"{scaled} residual adds are scaled, {self.prores.n_adds} were replaced")

    def describe(self) -> str:
        schedule = self.config.residual_schedule
        settings = schedule.config.model_dump().items()
        length = ", ".join(f"{key} = {value:g}" for key, value in settings if isinstance(value, (int, float)))
        if hasattr(self.schedule, "describe"):
            length = self.schedule.describe()
        return f"{self.prores.n_adds} residual adds scaled, {schedule.name}{f' ({length})' if length else ''}"

    def init_rules(self) -> Sequence[InitRule]:
        trained = self.prores.trained
        return [] if trained is None else [InitRule(f"{SCHEDULE_NAME}.logits", trained.fill)]

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        if self.prores.trained is None:
            return []
        return [{"params": [self.prores.trained.logits], "lr": self.schedule.lr, "weight_decay": 0.0}]

    def before_step(self, step: int) -> None:
        self.prores.set_step(step)

    def after_backward(self) -> None:
        self.prores.after_backward()

    def state(self) -> dict[str, Any]:
        return self.schedule.state() if hasattr(self.schedule, "state") else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.schedule, "load_state"):
            self.schedule.load_state(state)

    def row(self, step: int, *, detailed: bool) -> dict[str, Any]:
        alpha = self.prores.values
        row: dict[str, Any] = {"alpha_min": float(alpha.min()), "alpha_max": float(alpha.max())}
        if detailed and self.config.log_alpha:
            row["alpha"] = alpha.tolist()
        if detailed and hasattr(self.schedule, "row"):
            row |= self.schedule.row(step)
        return row
