"""The residual schedules of the ProRes paper, one entry each in `titan_prores.prores.SCHEDULES`."""

from __future__ import annotations

from pydantic import model_validator

from titan_prores import Schedule, Section, register, setting
from titan_prores.prores import SCHEDULES, check_length


def _component(name: str) -> type:
    class Constant(Section):
        pass

    class Length(Section):
        alternatives = (("T", "total"),)

        T: float | None = setting(None, "warmup length of the first layer", unit="optimizer steps")
        total: float | None = setting(
            None, "step at which every layer has reached alpha = 1; give either T or total", unit="optimizer steps"
        )

        @model_validator(mode="after")
        def _one_length(self) -> Length:
            check_length(name, self.T, self.total)
            return self

    class PaperSchedule(Schedule):
        Config = Length if SCHEDULES[name].stages else Constant

        def __init__(self, config: Section, *, n_layers: int) -> None:
            super().__init__(name, n_layers, **config.model_dump())

    PaperSchedule.__doc__ = SCHEDULES[name].summary
    PaperSchedule.__qualname__ = f"PaperSchedule[{name}]"
    return PaperSchedule


for _name in SCHEDULES:
    register("residual_schedule", _name)(_component(_name))
