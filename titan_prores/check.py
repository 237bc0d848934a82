"""`--check`: what a recipe would run, worked out by the run's own build code without allocating anything."""

from __future__ import annotations

from titan_prores import mesh as mesh_module
from titan_prores.build import build_components, state_bytes, transform_model
from titan_prores.failures import own_fault
from titan_prores.recipe import Recipe, data_parallel_size, global_batch_size, plan_mesh
from titan_prores.run_folder import annotated_toml


def report(recipe: Recipe, world_size: int) -> str:
    """The resolved recipe with the origin of each value, then mesh, transforms, sizes and bytes per rank.

    The model is built on the meta device and transformed on torch's fake process group, so any world size can be
    looked at in one process.

    Raises:
        ConfigError, ConfigErrors: what a run would refuse before its first step.
    """
    degrees = plan_mesh(recipe.parallelism, world_size)
    components = build_components(recipe, degrees)
    training = recipe.training
    data_ranks = data_parallel_size(degrees)
    batch = global_batch_size(training, data_ranks)
    microbatches = batch // (training.local_batch_size * data_ranks)
    mesh = mesh_module.start_fake(degrees)
    try:
        n_parameters = sum(p.numel() for p in components.model.parameters())
        transforms = transform_model(recipe, components, mesh)
        try:
            held = state_bytes(components.model, components.optimizer)
        except Exception as error:  # an optimizer of somebody's that cannot take a step like this
            raise own_fault("optimizer", error) from error
        more: dict[str, int] = {}
        for _, transform in components.transforms:
            more |= transform.held_bytes(components.model, microbatches)
        flops = components.model.flops_per_token()
    finally:
        mesh_module.stop()

    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    lines = [
        annotated_toml(recipe).rstrip(),
        "",
        f"mesh             {axes} = {_count(world_size, 'rank')}",
        "transforms       "
        + "\n                 ".join(
            f"{n}. {line}".replace("\n", "\n" + 20 * " ") for n, line in enumerate(transforms, 1)
        ),
        f"parameters       {n_parameters:,} ({n_parameters / 1e6:.2f}M)",
        f"tokens a step    {batch * training.seq_len:,} = {_count(data_ranks, 'data rank')} "
        f"x {_count(training.local_batch_size, 'sequence')} x {_count(training.seq_len, 'token')} "
        f"x {_count(microbatches, 'microbatch')}",
        f"tokens in all    {batch * training.seq_len * training.steps:,} in {training.steps:,} steps",
        f"flops a token    {flops:.3e} forward and backward",
        "bytes per rank   (rank 0; activations are not included)",
        f"  parameters     {_bytes(held.parameters)}",
        f"  gradients      {_bytes(held.gradients)}",
        f"  optimizer      {_bytes(held.optimizer)}",
        *(f"  besides        {_bytes(size)}  {what}" for what, size in more.items()),
        f"  together       {_bytes(held.parameters + held.gradients + held.optimizer + sum(more.values()))}",
    ]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("h") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _bytes(count: int) -> str:
    return f"{count:>16,}  ({count / 2**30:.3f} GiB)"
