"""A residual schedule that the user has written down as a CSV file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_prores import ConfigError, ReadPath, Section, counted, register, setting
from titan_prores.prores import table


@register("residual_schedule", "from_table")
class FromTable(table.TableSchedule):
    """alpha from a CSV file of breakpoints, straight lines between them, constant outside."""

    class Config(Section):
        path: ReadPath = setting(
            help="CSV file with the header step,alpha_1,...,alpha_L and a line for each breakpoint, steps ascending, "
            "alphas from 0 to 1; taken literally",
            on_resume="free",
            min_length=1,  # what it holds must stay, wherever it lies
        )
        sha256: str = setting("", "of the file's content; found by itself, and refused where it is given and differs")

        @classmethod
        def presets(cls, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
            path = given.get("path")
            try:
                content = table.read(path) if isinstance(path, str) else None
            except ValueError:  # said when the schedule is built, with everything else that is wrong then
                content = None
            return {} if content is None else {"sha256": (table.digest(content), f"content of {path}")}

    def __init__(self, config: Config, *, n_layers: int) -> None:
        try:
            content = table.read(config.path)
            parsed = table.TableSchedule.parse(content)
        except ValueError as error:
            raise ConfigError("path", str(error), value=config.path) from None
        if (found := table.digest(content)) != config.sha256:
            raise ConfigError("sha256", f"{config.path} has another: {found}", value=config.sha256)
        if parsed.n_layers != n_layers:
            layers = counted(parsed.n_layers, "layer")
            raise ConfigError("path", f"its table is for {layers}, the model has {n_layers}", value=config.path)
        super().__init__(parsed.steps, parsed.alphas)
        self._path = config.path

    def describe(self) -> str:
        first, last = self.steps[[0, -1]].astype(int)
        return f"{counted(len(self.steps), 'breakpoint')} of {self._path}, steps {first} to {last}"
