"""Learning-rate schedules: a linear warmup from 0, then one of four shapes.

With t completed updates of N, and w warmup updates, the factor is t / w while t < w. Update 1 of a warmup uses 0.
"""

from __future__ import annotations

import math

from titan_prores import ConfigError, Section, register, setting


class Warmup(Section):
    warmup_steps: int = setting(0, "number of warmup steps to the peak learning rate", unit="optimizer steps", ge=0)


class WarmupAndDecay(Warmup):
    min_lr_factor: float = setting(0.0, "final learning rate as a share of the peak", ge=0, le=1)


class _Scheduler:
    """Warmup, then `after_warmup`."""

    Config = Warmup

    def __init__(self, config: Warmup, *, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        if config.warmup_steps > total_steps:
            raise ConfigError(
                "warmup_steps", f"is longer than the run of training.steps = {total_steps}", value=config.warmup_steps
            )

    def factor(self, step: int) -> float:
        if step < self.config.warmup_steps:
            return step / self.config.warmup_steps
        return self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        raise NotImplementedError

    def decayed(self, share: float) -> float:
        """Between the peak, share 1, and min_lr_factor, share 0."""
        floor = self.config.min_lr_factor
        return floor + (1.0 - floor) * share

    def progress(self, step: int) -> float:
        """Share of the updates after the warmup that are done, 0 to 1."""
        return (step - self.config.warmup_steps) / max(self.total_steps - self.config.warmup_steps, 1)


@register("lr_scheduler", "constant")
class Constant(_Scheduler):
    """Warmup, then the peak to the end."""

    def after_warmup(self, step: int) -> float:
        return 1.0


@register("lr_scheduler", "linear")
class Linear(_Scheduler):
    """Warmup, then a straight line to min_lr_factor at step N: (N-t) / (N-w)."""

    Config = WarmupAndDecay

    def after_warmup(self, step: int) -> float:
        return self.decayed(1.0 - self.progress(step))


@register("lr_scheduler", "cosine")
class Cosine(_Scheduler):
    """Warmup, then half a cosine to min_lr_factor at step N: (1 + cos(pi * (t-w)/(N-w))) / 2."""

    Config = WarmupAndDecay

    def after_warmup(self, step: int) -> float:
        return self.decayed(0.5 * (1.0 + math.cos(math.pi * self.progress(step))))


@register("lr_scheduler", "wsd")
class WarmupStableDecay(_Scheduler):
    """Warmup, stable peak, then a straight line over the last D = int(decay_ratio * N) updates: (N-t) / D."""

    class Config(WarmupAndDecay):
        decay_ratio: float = setting(0.1, "share of the run that the decay takes", ge=0, le=1)

    def __init__(self, config: Config, *, total_steps: int) -> None:
        super().__init__(config, total_steps=total_steps)
        self.decay_steps = int(config.decay_ratio * total_steps)
        if config.warmup_steps + self.decay_steps > total_steps:
            raise ConfigError(
                "decay_ratio",
                f"warmup of {config.warmup_steps} and decay of {self.decay_steps} updates overlap in a run of "
                f"{total_steps}",
                value=config.decay_ratio,
            )

    def after_warmup(self, step: int) -> float:
        left = self.total_steps - step
        return self.decayed(left / self.decay_steps) if left < self.decay_steps else 1.0
