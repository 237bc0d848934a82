"""Cosine of residual outputs between two checkpoints of a run, without a probe having been on while it ran."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import resolve
from titan_prores.distributed.mesh import World
from titan_prores.output.run_folder import RunFolder

if TYPE_CHECKING:
    from titan_prores.model.held_out_reader import HeldOutReader

# Whatever the run was spread over, here it is one process, which only looks.
ALONE = (
    "--parallelism.data_parallel_replicate_degree=1",
    "--parallelism.data_parallel_shard_degree=-1",
    "--parallelism.tensor_parallel_degree=1",
    "--checkpoint.enabled=true",
    "--checkpoint.resume='auto'",
)


def checkpoint_cosines(run: Path, first: int, second: int, sequences: int, device: str = "auto") -> list[float]:
    """Mean over tokens of the cosine of what each layer adds in the two checkpoints; one value a layer.

    Both take the same held-out text, each with the alpha of the update that would follow it.

    Args:
        run: a run folder; its recipe is built in this process, so relative paths in it count from here.
        first, second: steps that the run has checkpoints of.
        sequences: held-out windows in the batch.
        device: as `job.device`.

    Raises:
        ConfigError, ConfigErrors: a checkpoint is not there or damaged, or the recipe cannot be built here.
    """
    from titan_prores.distributed import mesh

    recipe_file = RunFolder(run, is_main=False).recipe_file
    if not recipe_file.is_file():
        raise ConfigError("RUN", f"not a run folder: it has no {recipe_file.name}", value=str(run))
    tree = sources.load(recipe_file, [*ALONE, f"--job.device={device}"], registry.DEFAULTS)
    slot = resolve(tree, 1).slots["checkpoint"]
    if not {"folder", "init_from"} <= set(type(slot.config).model_fields):
        raise ConfigError("checkpoint.name", "has no keys folder and init_from to read weights by", value=slot.name)
    folder = run / slot.config.folder
    paths = [folder / f"step-{step:08d}" for step in (first, second)]
    for step, path in zip((first, second), paths, strict=True):
        if not path.is_dir():
            there = sorted(int(each.name.removeprefix("step-")) for each in folder.glob("step-*"))
            raise ConfigError("--checkpoints", f"there is none in {folder}", value=step, allowed=there)
    try:
        directions = None
        for step, path in zip((first, second), paths, strict=True):
            with tempfile.TemporaryDirectory(prefix="cosine-") as scratch:
                reader = _built(run, step, path, Path(scratch) / "run", device)
                tokens_BS = reader.tokens(sequences)
                if directions is None:
                    directions = reader.residual_directions(tokens_BS)
        return reader.residual_cosines(tokens_BS, directions)
    finally:
        mesh.stop()


def _built(run: Path, step: int, checkpoint: Path, scratch: Path, device: str) -> HeldOutReader:
    """The run's model as update `step + 1` would find it, from a checkpoint that nothing is written beside."""
    from titan_prores.trainer import Trainer

    overrides = [
        *ALONE,
        f"--job.device={device}",
        f"--job.dump_folder={scratch}",
        f"--checkpoint.init_from={checkpoint.resolve()}",
    ]
    folder = RunFolder(run, is_main=False)
    recipe = resolve(sources.load(folder.recipe_file, overrides, registry.DEFAULTS), 1)
    trainer = Trainer(recipe, World(0, 0, 1), own_weights=True)
    trainer.build()
    trainer.watchdog.close()
    trainer.run.close()
    # init_from takes weights alone; a schedule may have a state besides.
    try:
        meta = recipe.slots["checkpoint"].build(run=folder, mesh=trainer.mesh).read_meta(step)
    except ConfigError as error:
        raise error.under("checkpoint") from error
    try:
        trainer.transforms.load_states(meta.get("transforms", {}), step)
        trainer.transforms.before_step(step)
    except Exception as error:  # whatever a transform makes of a state that it has not written
        problem = f"the state of the transforms in {checkpoint} cannot be taken: {type(error).__name__}: {error}"
        raise ConfigError("--checkpoints", problem, value=step) from error
    return trainer.reader
