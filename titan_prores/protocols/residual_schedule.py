"""What a residual schedule must have."""

from __future__ import annotations

import inspect

from titan_prores.config.contracts import optional
from titan_prores.config.sections import Section
from titan_prores.prores import schedule


class ResidualSchedule(schedule.ResidualSchedule):
    """A residual schedule with settings. A subclass defines `alpha`, and `Config`, a Section.

    A component may also derive from a schedule of `titan_prores.prores`, such as `LearnedSchedule`, or, where it has no
    more than `alpha(step)`, from nothing.

    Attributes:
        config: the settings.
        n_layers: number of layers, L.
    """

    def __init__(self, config: Section, *, n_layers: int) -> None:
        self.config, self.n_layers = config, n_layers


for _name, _hook in vars(schedule.ResidualSchedule).items():
    if inspect.isfunction(_hook) and _name != "alpha":
        optional(_hook)
