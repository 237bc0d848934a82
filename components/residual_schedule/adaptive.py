"""A residual schedule that waits for the layers to settle."""

from __future__ import annotations

from pydantic import model_validator

from titan_prores import AdaptiveSchedule, Section, register, setting


@register("residual_schedule", "adaptive")
class Adaptive(AdaptiveSchedule):
    """One layer after another, the next once the one before has settled (bounded both ways)."""

    class Config(Section):
        warmup_steps: int = setting(1000, "length of a layer's own warmup", unit="optimizer steps", gt=0)
        min_steps: int = setting(
            1000,
            "from the beginning of one layer's warmup to the next one's, at least; below warmup_steps a layer is "
            "judged while its alpha still rises",
            unit="optimizer steps",
            gt=0,
        )
        max_steps: int = setting(2000, "the same, at most: then it begins anyway", unit="optimizer steps", gt=0)
        tolerance: float = setting(
            0.01,
            "a layer has settled when the running mean of how far it turns the stream changes by no more than "
            "this share from one measurement to the next",
            ge=0,
        )
        every_steps: int = setting(
            10,
            "measure every N steps; a measurement reads each layer's input and output and waits for the device",
            unit="optimizer steps",
            gt=0,
        )
        smoothing: float = setting(0.8, "share of the running mean that a measurement leaves as it was", ge=0, lt=1)
        floor: float = setting(0.0, "alpha of a layer whose warmup has not begun", ge=0, lt=1)

        @model_validator(mode="after")
        def _bounds_in_order(self) -> Adaptive.Config:
            if self.max_steps < self.min_steps:
                raise ValueError(f"max_steps {self.max_steps} is less than min_steps {self.min_steps}")
            return self

    def __init__(self, config: Config, *, n_layers: int) -> None:
        super().__init__(n_layers, **config.model_dump())

    def describe(self) -> str:
        least, most = ((self.n_layers - 1) * steps + self.warmup_steps for steps in (self.min_steps, self.max_steps))
        return f"all layers at 1 after {least} to {most} steps, by what is measured every {self.every_steps}"
