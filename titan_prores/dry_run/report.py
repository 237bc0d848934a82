"""`--check`: what a recipe would run, worked out by the run's own build code without allocating anything."""

from __future__ import annotations

from titan_prores.build import Components, build_components, check_loss, transform_model
from titan_prores.checkpoint.resume import check_start
from titan_prores.config.errors import MissingError, counted
from titan_prores.config.layout import data_parallel_size, global_batch_size, plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.distributed import mesh as mesh_module
from titan_prores.distributed.failures import own_fault, summarise
from titan_prores.distributed.mesh import Mesh
from titan_prores.dry_run.memory import activation_bytes, state_bytes
from titan_prores.model.activation_bytes import looks_at_values
from titan_prores.model.parameter_groups import trained_parameters
from titan_prores.output.log import quiet
from titan_prores.output.recipe_file import annotated_toml

OFFLOADED = "in the memory of the CPU, not in the sum"


def report(recipe: Recipe, world_size: int) -> str:
    """The resolved recipe with the origin of each value, then mesh, transforms, sizes and bytes per rank.

    The model is built on the meta device and transformed on torch's fake process group, so any world size can be
    looked at in one process.

    Raises:
        ConfigError, ConfigErrors: what a run would refuse before its first step; a tokenizer or data set that is not
            on this machine is told at the end instead, where the sizes can be found without it.
    """
    degrees = plan_mesh(recipe.parallelism, world_size)
    missing: list[MissingError] = []
    components = build_components(recipe, degrees, missing)
    check_start(recipe, dict(components.transforms.named))
    training, model = recipe.training, components.model
    data_ranks = data_parallel_size(degrees)
    batch = global_batch_size(training, data_ranks)
    microbatches = batch // (training.local_batch_size * data_ranks)
    mesh = mesh_module.start_fake(degrees)
    try:
        transforms = transform_model(recipe, components, mesh)
        check_loss(recipe, components, mesh)
        n_parameters = sum(p.numel() for p in model.parameters())
        n_trained = sum(p.numel() for _, p in trained_parameters(model))
        held, about = _held(recipe, components, mesh, microbatches)
        gathered: dict[str, int] = {}
        for transform in components.transforms:
            gathered |= transform.gathered_bytes(model)
        flops = model.flops_per_token()
    finally:
        mesh_module.stop()

    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    lines = [
        annotated_toml(recipe).rstrip(),
        "",
        f"mesh             {axes} = {counted(world_size, 'rank')}",
        "transforms       "
        + "\n                 ".join(
            f"{n}. {line}".replace("\n", "\n" + 20 * " ") for n, line in enumerate(transforms, 1)
        ),
        f"parameters       {n_parameters:,} ({n_parameters / 1e6:.2f}M)"
        + (f" ({n_trained:,} trained)" if n_trained != n_parameters else ""),
        f"tokens per step  {batch * training.seq_len:,} = {counted(data_ranks, 'data rank')} "
        f"x {counted(training.local_batch_size, 'sequence')} x {counted(training.seq_len, 'token')} "
        f"x {counted(microbatches, 'micro-batch')}",
        f"tokens in total  {batch * training.seq_len * training.steps:,} in {counted(training.steps, 'step')}",
        f"flops per token  {flops:.3e} forward and backward",
    ]
    if gathered:
        largest = max(gathered, key=gathered.__getitem__)
        groups = counted(len(gathered), "group")
        lines.append(f"largest gather   {gathered[largest]:,} bytes of weights, of {groups}: {largest}")
    lines += [
        f"bytes per rank   (rank 0; {about})",
        *(f"  {name:<12}{_bytes(size)}  {what}".rstrip() for name, size, what in held),
        f"  {'total':<12}{_bytes(sum(size for _, size, what in held if what != OFFLOADED))}",
        *(f"a run needs      {error}" for error in missing),
    ]
    return "\n".join(lines) + "\n"


def _held(
    recipe: Recipe, components: Components, mesh: Mesh, microbatches: int
) -> tuple[list[tuple[str, int, str]], str]:
    """What rank 0 holds, as (name, bytes, what it is), and what to know about the activations in it."""
    try:
        state = state_bytes(components.model, components.optimizer)
    except Exception as error:  # an optimizer of a plug-in that cannot step like this
        raise own_fault("optimizer", error) from error
    where = "" if components.parameter_device is None else OFFLOADED
    held = [(name, getattr(state, name), where) for name in ("parameters", "gradients", "optimizer")]
    try:
        with quiet("torch._subclasses.fake_tensor"):  # what it has to say is in the error
            activations = activation_bytes(recipe, mesh)
    except Exception as error:  # a model of a plug-in that looks at the values of its tensors
        if mesh.degrees["tp"] > 1 and not looks_at_values(error):
            problem = "the model does not run as its tensor-parallel plan splits it: "
            raise own_fault("parallelism.tensor_parallel_degree", error, problem) from error
        reason = " ".join(summarise(error, 0).split())
        about = f"activations are not included, as the model does not run without values: {reason}"
    else:
        about = "activations as uncompiled code on a CPU keeps them"
        notes = [note for transform in components.transforms if (note := transform.activations_note())]
        what = "; ".join(["kept of a micro-batch until its backward pass", *(f"at most: {note}" for note in notes)])
        held.append(("activations", activations.kept, what))
        held.append(("peak", activations.peak - activations.kept, "beyond activations, at the worst moment"))
    for transform in components.transforms:
        more = transform.held_bytes(components.model, microbatches)
        held += [("buffers", size, what) for what, size in more.items()]
    return held, about


def _bytes(count: int) -> str:
    return f"{count:>18,}  ({count / 2**30:.3f} GiB)"
