"""Weights & Biases."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from titan_prores import ConfigError, Metric, RunFolder, Section, register, setting
from titan_prores.components.metrics._scalars import scalars


@register("metrics", "wandb")
class WandB(Metric):
    """Sends every number of every row, grouped as in TensorBoard, and the recipe to Weights & Biases.

    Needs the extra titan-prores[wandb].

    The run folder keeps the id of its run there, so that a resumed run goes on in the same curves. The service ignores
    the steps that it already has.
    """

    class Config(Section):
        project: str = setting("titan-prores", "name of the project", min_length=1)
        entity: str | None = setting(None, "user or team; default your default entity")
        run_name: str | None = setting(None, "name of the run; default chosen by the service")
        mode: Literal["online", "offline", "disabled"] = setting(
            "online", "offline keeps everything in the run folder for `wandb sync`; disabled does nothing"
        )

    _run = None

    def __init__(self, config: Section) -> None:
        super().__init__(config)
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "", "needs the package wandb, which is not installed", allowed="pip install 'titan-prores[wandb]'"
            )

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        import wandb

        id_file = run.path / "wandb_run_id"
        known = id_file.read_text().strip() if id_file.exists() else None
        # Started anew in the same folder, it is another run.
        self._run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.run_name,
            mode=self.config.mode,
            dir=str(run.path),
            config=info["recipe"],
            id=known if info["start_step"] else None,
            resume="allow",
        )
        id_file.write_text(f"{self._run.id}\n")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
