"""Degrees of the device mesh, and batch sizes that fit them."""

from __future__ import annotations

from collections.abc import Mapping

from titan_prores.config.engine_sections import Parallelism, Training
from titan_prores.config.errors import ConfigError, ConfigErrors, counted

# Mesh axes, outermost first, and the keys that give their degrees.
AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}


def plan_mesh(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Axis -> degree, outermost first, with -1 filled in.

    Raises:
        ConfigErrors: the degrees do not multiply to `world_size`, naming those that would.
    """
    degrees = {axis: getattr(parallelism, key) for axis, key in AXES.items()}
    errors = [
        ConfigError(
            f"parallelism.{AXES[axis]}",
            "not a valid degree",
            value=0,
            allowed="at least 1, or -1 for the remaining ranks",
        )
        for axis, degree in degrees.items()
        if degree == 0
    ]
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        keys = " and ".join(f"parallelism.{AXES[axis]}" for axis in open_axes)
        errors.append(ConfigError(keys, "only one degree can be -1", value=-1))
    if errors:
        raise ConfigErrors(errors)
    given = 1
    for degree in degrees.values():
        given *= degree if degree != -1 else 1
    if open_axes and world_size % given == 0:
        degrees[open_axes[0]] = world_size // given
        given = world_size
    if given != world_size:
        product = " x ".join(f"{AXES[axis]} {degree}" for axis, degree in degrees.items() if degree != 1)
        ranks = counted(world_size, "rank")
        allowed = f"degrees whose product is {world_size}, or one of them -1"
        if open_axes:
            allowed = f"the product of the other degrees, {given}, must divide {world_size}"
        raise ConfigErrors(
            [ConfigError("parallelism", f"{product or 'all degrees 1'} does not fit {ranks}", allowed=allowed)]
        )
    return degrees


def data_parallel_size(degrees: Mapping[str, int]) -> int:
    """Ranks that see different samples."""
    return degrees["dp_replicate"] * degrees["dp_shard"]


def global_batch_size(training: Training, data_ranks: int) -> int:
    """Sequences an optimizer step.

    Raises:
        ConfigError: it is not a multiple of local_batch_size x ranks; lists the local sizes, or the numbers of ranks,
            that divide it.
    """
    if training.global_batch_size == -1:
        return training.local_batch_size * data_ranks
    size = training.global_batch_size
    if size < 1 or size % (training.local_batch_size * data_ranks):
        share = size // data_ranks if size % data_ranks == 0 else 0
        fitting, ranks = ([n for n in range(1, min(whole, 1024) + 1) if whole % n == 0] for whole in (share, size))
        if fitting:
            allowed = f"with this many ranks local_batch_size {', '.join(map(str, fitting))}"
        else:
            allowed = f"a multiple of {data_ranks}, or -1"
            allowed += f"; {size} fits {', '.join(map(str, ranks))} data ranks" if ranks else ""
        raise ConfigError(
            "training.global_batch_size",
            f"is not a multiple of training.local_batch_size {training.local_batch_size} x {data_ranks} data ranks",
            value=size,
            allowed=allowed,
        )
    return size
