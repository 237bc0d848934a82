"""A run as data: engine sections, one component a slot, and the sets of transforms, parallelisms and metrics.

`resolve` turns a `config.Tree` into a `Recipe` in two passes. The first checks everything the engine itself owns and
needs no torch; the second imports plug-ins and components and checks their own sections. Knows no mesh, no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_prores import registry
from titan_prores.config import Section, Tree, setting
from titan_prores.errors import ConfigError, ConfigErrors, nearest
from titan_prores.parts import Part, dump, resolve_part, resolve_section, resume_rules

Dtype = Literal["float32", "bfloat16"]


class Job(Section):
    """Where a run lives."""

    dump_folder: str = setting("outputs", "run folder: recipe, log, metrics and checkpoints go there")
    description: str = setting("", "one line about the run, kept with it")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA where there is a device")


class Training(Section):
    """The training loop."""

    steps: int = setting(1000, "length of the run; schedules are laid out over it", unit="optimizer steps", gt=0)
    stop_after: int | None = setting(
        None, "end the run after this step without changing its schedules", unit="optimizer steps", gt=0
    )
    seed: int = setting(0, "seed of weights, data order and dropout", on_resume="same", ge=0)
    seq_len: int = setting(1024, "length of a training sequence", unit="tokens", on_resume="same", gt=0)
    local_batch_size: int = setting(8, "sequences a data-parallel rank takes through the model at once", gt=0)
    global_batch_size: int = setting(
        -1, "sequences an optimizer step, gradients being accumulated as needed; -1 = local_batch_size x ranks",
        on_resume="same", ge=-1,
    )  # fmt: skip
    max_norm: float = setting(1.0, "gradients are scaled down to this L2 norm; 0 = never", ge=0)
    dtype: Dtype = setting("float32", "of master weights and optimizer state; bfloat16 = pure bf16 training")
    mixed_precision_param: Dtype = setting("float32", "of weights and activations in forward and backward")
    mixed_precision_reduce: Dtype = setting("float32", "in which gradients are summed over ranks")
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", "what to do when loss or gradient norm is not finite: end the run, or pass over the batch"
    )
    max_nonfinite_skips: int = setting(10, "with skip: batches passed over in a row before the run ends", ge=1)
    deterministic: bool = setting(False, "use deterministic kernels only; slower on CUDA")
    gc_freq: int = setting(
        50, "run Python's garbage collector every so many steps instead of at random; 0 = leave it alone",
        unit="optimizer steps", ge=0,
    )  # fmt: skip


class Parallelism(Section):
    """Degrees of the device mesh; their product is the number of ranks."""

    data_parallel_replicate_degree: int = setting(1, "replicas of the sharded model (HSDP); -1 = what is left", ge=-1)
    data_parallel_shard_degree: int = setting(
        -1, "ranks that weights are sharded over (FSDP2); -1 = what is left", ge=-1
    )
    tensor_parallel_degree: int = setting(1, "ranks that split every layer; -1 = what is left", ge=-1)


class Metrics(Section):
    """How often a run is shown."""

    log_freq: int = setting(10, "console line and per-layer values every so many steps", unit="optimizer steps", gt=0)


class Comm(Section):
    """Timeouts of collectives."""

    init_timeout_seconds: int = setting(
        300, "until all ranks have met and finished their first step", unit="seconds", gt=0
    )
    train_timeout_seconds: int = setting(100, "of a collective after the first step", unit="seconds", gt=0)


class Profiling(Section):
    """Traces and memory snapshots, off unless asked for."""

    enable_profiling: bool = setting(False, "write torch.profiler traces (Chrome format)")
    save_traces_folder: str = setting("profile_trace", "below the run folder")
    profile_freq: int = setting(10, "one trace every so many steps", unit="optimizer steps", ge=3)
    enable_memory_snapshot: bool = setting(False, "write CUDA memory snapshots for pytorch.org/memory_viz")
    save_memory_snapshot_folder: str = setting("memory_snapshot", "below the run folder")


ENGINE_SECTIONS: dict[str, type[Section]] = {
    "job": Job,
    "training": Training,
    "parallelism": Parallelism,
    "metrics": Metrics,
    "comm": Comm,
    "profiling": Profiling,
}

# Section -> kind of the one component it configures.
SLOTS = {
    "model": "model",
    "tokenizer": "tokenizer",
    "dataset": "dataset",
    "loss": "loss",
    "optimizer": "optimizer",
    "lr_scheduler": "lr_scheduler",
    "checkpoint": "checkpoint",
    "validation": "validator",
}

# Section -> kind of the components its sub-tables name, each on unless `enabled = false`.
SETS = {"transforms": "transform", "parallelism": "parallelism", "metrics": "metrics"}

SECTIONS = (*dict.fromkeys((*ENGINE_SECTIONS, *SLOTS, *SETS)),)

# Mesh axes, outermost first, and the keys that give their degrees.
AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}

# Keys that users of torchtitan v0.2 know by another name than ours.
TORCHTITAN_KEYS = {
    "training.dataset": "dataset.name",
    "training.dataset_path": "dataset.files",
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.enable_cpu_offload": "parallelism.fsdp (CPU offload is not supported yet)",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "model.tokenizer_path": "tokenizer.path",
    "model.hf_assets_path": "tokenizer.path",
    "model.norm_type": "model.norm",
    "optimizer.early_step_in_backward": None,
    "checkpoint.enable": "checkpoint.enabled",
    "checkpoint.enable_checkpoint": "checkpoint.enabled",
    "checkpoint.load_step": "checkpoint.resume",
    "checkpoint.async_mode": None,
    "checkpoint.export_dtype": None,
    "metrics.enable_tensorboard": "metrics.tensorboard.enabled",
    "metrics.save_tb_folder": "metrics.tensorboard.folder",
    "metrics.enable_wandb": "metrics.wandb.enabled",
    "metrics.disable_color_printing": None,
    "validation.enable": "validation.enabled",
    "validation.dataset": "dataset.validation_fraction",
    "validation.steps": "validation.max_tokens",
    "parallelism.fsdp_reshard_after_forward": "parallelism.fsdp.reshard_after_forward",
    "parallelism.context_parallel_degree": None,
    "parallelism.pipeline_parallel_degree": None,
    "parallelism.expert_parallel_degree": None,
    "activation_checkpoint": "transforms.activation_checkpoint",
    "compile": "transforms.compile",
    "compile.enable": "transforms.compile.enabled",
    "float8": "transforms.float8",
    "quantize": "transforms.float8",
    "comm.trace_buf_size": None,
    "experimental": "import",
    "experimental.custom_import": "import",
    "job.custom_config_module": "import",
    "job.print_args": "--check",
    "job.print_config": "--check",
    "job.config_file": "--config",
    "debug": "training.seed and training.deterministic",
}


@dataclass(frozen=True)
class Recipe:
    """Everything a run is made of. A component is handed its own `Part.config` and never this."""

    job: Job
    training: Training
    parallelism: Parallelism
    metrics: Metrics
    comm: Comm
    profiling: Profiling
    slots: Mapping[str, Part]
    sets: Mapping[str, tuple[Part, ...]]
    disabled: Mapping[str, tuple[Part, ...]]
    origins: Mapping[str, str] = field(compare=False, default_factory=dict)
    imports: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as TOML-ready tables, every default filled in."""
        tables: dict[str, Any] = {"import": list(self.imports)} if self.imports else {}
        for section in SECTIONS:
            table = dump(getattr(self, section)) if section in ENGINE_SECTIONS else {}
            if section in self.slots:
                part = self.slots[section]
                table = {"name": part.name, **dump(part.config)}
            for group, enabled in ((self.sets, True), (self.disabled, False)):
                for part in group.get(section, ()):
                    table[part.name] = {"enabled": enabled, **dump(part.config)}
            tables[section] = table
        return tables

    def resume_rules(self) -> dict[str, str]:
        """Dotted key -> "same" | "free": whether a resumed run may change it."""
        rules: dict[str, str] = {}
        for section in ENGINE_SECTIONS:
            rules |= {f"{section}.{k}": r for k, r in resume_rules(getattr(self, section), "free").items()}
        for section, part in self.slots.items():
            default = registry.KINDS[part.kind].on_resume
            rules |= {f"{section}.name": default}
            rules |= {f"{section}.{k}": r for k, r in resume_rules(part.config, default).items()}
        for section, parts in self.sets.items():
            for part in parts:
                default = registry.KINDS[part.kind].on_resume
                prefix = f"{section}.{part.name}"
                rules |= {f"{prefix}.{k}": r for k, r in resume_rules(part.config, default).items()}
        return rules


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> leaf value of nested tables."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat


def changes_since(recipe: Recipe, earlier: Mapping[str, Any]) -> tuple[list[ConfigError], list[str]]:
    """Compare with the resolved recipe that a checkpoint holds.

    Args:
        recipe: the recipe of the run that wants to resume.
        earlier: `Recipe.to_dict()` of the run that wrote the checkpoint.

    Returns:
        An error for each changed key that must be the same, and a line for each other change.
    """
    rules = recipe.resume_rules()
    before, now = flatten(earlier), flatten(recipe.to_dict())
    errors, notes = [], []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if rules.get(key) == "same" and key in before and key in now:
            errors.append(
                ConfigError(key, f"was {old!r} when the checkpoint was written and must stay so", value=new,
                            where=recipe.origins.get(key))
            )  # fmt: skip
        else:
            notes.append(f"{key}: {old!r} -> {new!r}")
    return errors, notes


def plan_mesh(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Axis -> degree, outermost first, with -1 filled in.

    Raises:
        ConfigErrors: the degrees do not multiply to `world_size`, naming those that would.
    """
    degrees = {axis: getattr(parallelism, key) for axis, key in AXES.items()}
    errors = [
        ConfigError(f"parallelism.{AXES[axis]}", "a degree is at least 1, or -1 for what is left", value=0)
        for axis, degree in degrees.items()
        if degree == 0
    ]
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        keys = " and ".join(f"parallelism.{AXES[axis]}" for axis in open_axes)
        errors.append(ConfigError(keys, "only one degree can be -1"))
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
        ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
        raise ConfigErrors([
            ConfigError("parallelism", f"{product or 'all degrees 1'} does not fit {ranks}",
                        allowed=f"degrees whose product is {world_size}, or one of them -1")
        ])  # fmt: skip
    return degrees


def data_parallel_size(degrees: Mapping[str, int]) -> int:
    """Ranks that see different samples."""
    return degrees["dp_replicate"] * degrees["dp_shard"]


def global_batch_size(training: Training, data_ranks: int) -> int:
    """Sequences an optimizer step.

    Raises:
        ConfigError: it is not a multiple of local_batch_size x ranks; lists the local sizes that divide it.
    """
    if training.global_batch_size == -1:
        return training.local_batch_size * data_ranks
    size = training.global_batch_size
    if size % (training.local_batch_size * data_ranks):
        share = size // data_ranks
        fitting = [b for b in range(1, share + 1) if share % b == 0] if size % data_ranks == 0 else []
        raise ConfigError(
            "training.global_batch_size",
            f"is not a multiple of training.local_batch_size {training.local_batch_size} x {data_ranks} data ranks",
            value=size,
            allowed=f"with this many ranks local_batch_size {', '.join(map(str, fitting))}" if fitting
            else f"a multiple of {data_ranks}",
        )  # fmt: skip
    return size


def _engine_sections(tree: Tree, errors: list[ConfigError]) -> dict[str, Section]:
    """First pass: unknown sections and every fault in the engine's own keys."""
    sections: dict[str, Section] = {}
    for name, table in tree.values.items():
        if name not in SECTIONS:
            hint = TORCHTITAN_KEYS.get(name) or nearest(name, SECTIONS)
            kind = "section" if isinstance(table, dict) else "key"
            errors.append(
                ConfigError(name, f"unknown {kind}", where=tree.origin((name,)), nearest=hint,
                            allowed=None if hint else SECTIONS)
            )  # fmt: skip
        elif not isinstance(table, dict):
            errors.append(ConfigError(name, "must be a table", value=table, where=tree.origin((name,))))
    for name, section in ENGINE_SECTIONS.items():
        raw = tree.values.get(name, {})
        if not isinstance(raw, dict):
            continue
        if name in SETS:
            # Sub-tables name components and belong to the second pass.
            raw = {k: v for k, v in raw.items() if not isinstance(v, dict) or k in section.model_fields}
        found: list[ConfigError] = []
        sections[name] = resolve_section(section, raw, (name,), tree, found)
        errors.extend(found)
    return sections


def _use_our_names(errors: list[ConfigError]) -> None:
    """Where a key is unknown but torchtitan has it, say what it is called here."""
    for error in errors:
        if error.problem.startswith("unknown") and error.key in TORCHTITAN_KEYS:
            ours = TORCHTITAN_KEYS[error.key]
            error.problem = (
                "is torchtitan's key" if ours else "torchtitan has this key; here there is nothing like it yet"
            )
            error.allowed, error.nearest = (f"here it is {ours}" if ours else None), None


def _resolve_set(
    section: str, kind: str, tree: Tree, errors: list[ConfigError], origins: dict[str, str]
) -> tuple[list[Part], list[Part]]:
    on, off = [], []
    tables = tree.values.get(section, {})
    engine_keys = ENGINE_SECTIONS[section].model_fields if section in ENGINE_SECTIONS else {}
    for name, raw in tables.items():
        if name in engine_keys:
            continue
        key = (section, name)
        if not isinstance(raw, dict):
            if section not in ENGINE_SECTIONS:  # elsewhere the first pass has refused it
                errors.append(
                    ConfigError(f"{section}.{name}", "must be a table", value=raw, where=tree.origin(key),
                                allowed="enabled = true or false, and the settings of the component")
                )  # fmt: skip
            continue
        enabled = raw.get("enabled", True)
        if not isinstance(enabled, bool):
            errors.append(
                ConfigError(f"{section}.{name}.enabled", "must be of type bool", value=enabled,
                            where=tree.origin((*key, "enabled")))
            )  # fmt: skip
        settings = {k: v for k, v in raw.items() if k != "enabled"}
        component_name = settings.pop("name", name)
        part = resolve_part(kind, settings, key, tree, errors, origins, name=component_name)
        if part is not None:
            (on if enabled else off).append(Part(kind, name, part.component, part.config, part.key))
    return on, off


def _check_combinations(transforms: list[Part], errors: list[ConfigError], tree: Tree) -> None:
    present = {part.name for part in transforms}
    for part in transforms:
        where = tree.origin(tuple(part.key.split(".")))
        for needed in getattr(part.component, "needs", ()):
            if needed not in present:
                errors.append(ConfigError(part.key, f"needs the transform {needed}", where=where))
        for other in getattr(part.component, "conflicts", ()):
            if other in present:
                errors.append(ConfigError(part.key, f"does not work together with {other}", where=where))


def resolve(tree: Tree, world_size: int = 1) -> Recipe:
    """Check and type a whole recipe.

    Args:
        tree: what `config.load` read.
        world_size: number of ranks that the mesh and batch sizes must fit.

    Raises:
        ConfigErrors: every fault of the first pass that has any.
    """
    errors: list[ConfigError] = []
    sections = _engine_sections(tree, errors)
    if sections.get("parallelism") is not None and sections.get("training") is not None:
        try:
            ranks = data_parallel_size(plan_mesh(sections["parallelism"], world_size))
            global_batch_size(sections["training"], ranks)
        except ConfigErrors as several:
            errors.extend(several.errors)
        except ConfigError as error:
            error.where = tree.origin(tuple(error.key.split(".")))
            errors.append(error)
    if errors:
        _use_our_names(errors)
        raise ConfigErrors(errors)

    origins = {".".join(key): origin for key, origin in tree.origins.items()}
    for reference, folder in tree.imports:
        try:
            registry.load_plugin(reference, folder)
        except ConfigError as error:
            error.where = error.where or tree.origin(("import",))
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)

    slots: dict[str, Part] = {}
    for section, kind in SLOTS.items():
        part = resolve_part(kind, tree.values.get(section, {}), (section,), tree, errors, origins)
        if part is not None:
            slots[section] = part
    sets: dict[str, tuple[Part, ...]] = {}
    disabled: dict[str, tuple[Part, ...]] = {}
    for section, kind in SETS.items():
        on, off = _resolve_set(section, kind, tree, errors, origins)
        # By name: the order of tables in a file means nothing.
        sets[section] = tuple(sorted(on, key=lambda part: part.name))
        disabled[section] = tuple(sorted(off, key=lambda part: part.name))
    _check_combinations([*sets["transforms"], *sets["parallelism"]], errors, tree)
    if errors:
        _use_our_names(errors)
        raise ConfigErrors(errors)
    imports = tuple(str((folder / r).resolve()) if r.endswith(".py") else r for r, folder in tree.imports)
    return Recipe(**sections, slots=slots, sets=sets, disabled=disabled, origins=origins, imports=imports)
