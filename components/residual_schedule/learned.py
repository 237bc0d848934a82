"""A residual schedule that is trained with the model."""

from __future__ import annotations

from typing import Literal

from titan_prores import LearnedSchedule, Section, counted, register, setting


@register("residual_schedule", "learned")
class Learned(LearnedSchedule):
    """alpha = sigmoid(logit), a trained logit a layer with a learning rate of its own and no weight decay."""

    class Config(Section):
        lr: float = setting(
            0.01, "peak learning rate of the logits; follows the run's lr_scheduler", gt=0, on_resume="free"
        )
        start: float = setting(0.1, "alpha of the first layer before training", gt=0, lt=1)
        depth: Literal["constant", "1/l", "1/sqrt(l)"] = setting(
            "1/l", "alpha of layer l before training, as a multiple of `start`"
        )
        monotone: float = setting(
            0.0,
            "weight of the sum of max(alpha(l+1) - alpha(l), 0)^2, which is added to what the logits descend, but "
            "not to the loss that is shown",
            ge=0,
        )

    def __init__(self, config: Config, *, n_layers: int) -> None:
        super().__init__(n_layers, start=config.start, depth=config.depth, monotone=config.monotone)
        self.config, self.lr = config, config.lr

    def describe(self) -> str:
        c = self.config
        monotone = f", monotone = {c.monotone:g}" if c.monotone else ""
        return f"{counted(self.n_layers, 'logit')} from alpha = {c.start:g}, {c.depth}; lr = {c.lr:g}{monotone}"
