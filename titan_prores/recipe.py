"""A run as data: engine sections, one component a slot, and the sets of transforms, parallelisms and metrics.

`resolve` turns a `config.Tree` into a `Recipe` in two passes. The first checks everything the engine itself owns and
needs no torch; the second imports plug-ins and components and checks their own sections. Knows no mesh, no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_prores import registry
from titan_prores.config import Key, Section, Tree, dotted, setting, split_key
from titan_prores.errors import ConfigError, ConfigErrors, counted, nearest, shown
from titan_prores.parts import Part, ResumeRule, dump, resolve_part, resolve_section, resume_rules
from titan_prores.paths import PathInRun, WritePath
from titan_prores.setting_types import type_of

Dtype = Literal["float32", "bfloat16"]


class Job(Section):
    """Where a run lives."""

    dump_folder: WritePath = setting(
        "outputs", "run folder: recipe, log, metrics and checkpoints go there", min_length=1
    )
    description: str = setting("", "one line about the run, kept with it; not inherited from a base")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA where there is a device")


class Training(Section):
    """The training loop."""

    steps: int = setting(1000, "length of the run; schedules are laid out over it", unit="optimizer steps", gt=0)
    stop_after: int | None = setting(
        None, "end the run after this step without changing its schedules", unit="optimizer steps", gt=0
    )
    seed: int = setting(0, "seed of weights, data order and dropout", on_resume="same", ge=0)
    seq_len: int = setting(1024, "length of a training sequence", unit="tokens", on_resume="same", gt=0)
    local_batch_size: int = setting(
        8, "what a data-parallel rank takes through the model at once", unit="sequences", gt=0
    )
    global_batch_size: int = setting(
        -1,
        "in an optimizer step, gradients being accumulated as needed; -1 = local_batch_size x ranks",
        unit="sequences",
        ge=-1,  # what it comes to must stay the same, which the checkpoint knows
    )
    max_norm: float = setting(1.0, "gradients are scaled down to this L2 norm; 0 = never", ge=0)
    dtype: Dtype = setting("float32", "of master weights and optimizer state; bfloat16 = pure bf16 training")
    mixed_precision_param: Dtype | None = setting(
        None, "of weights and activations in forward and backward; default as training.dtype"
    )
    mixed_precision_reduce: Dtype = setting("float32", "in which gradients are summed over ranks")
    on_nonfinite: Literal["stop", "skip", "rewind"] = setting(
        "stop",
        "what to do when loss or gradient norm is not finite: end the run, pass over the batch, or go back to the last "
        "good checkpoint and pass over the batch on the way",
    )
    max_nonfinite_skips: int = setting(10, "with skip: batches passed over in a row before the run ends", ge=1)
    max_nonfinite_rewinds: int = setting(3, "with rewind: how often to the same checkpoint before the run ends", ge=1)
    rewind_batches: int = setting(
        1, "with rewind: batches to pass over, the offending one and those before it", unit="batches", ge=1
    )
    deterministic: bool = setting(False, "use deterministic kernels only; slower on CUDA")
    gc_freq: int = setting(
        50,
        "run Python's garbage collector every so many steps instead of at random; 0 = leave it alone",
        unit="optimizer steps",
        ge=0,
    )


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
        300, "until all ranks have met and finished their first step", unit="seconds", gt=0, le=31_536_000
    )
    train_timeout_seconds: int = setting(
        100, "of a collective after the first step", unit="seconds", gt=0, le=31_536_000
    )


class Profiling(Section):
    """Traces and memory snapshots, off unless asked for."""

    enable_profiling: bool = setting(False, "write torch.profiler traces (Chrome format)")
    save_traces_folder: PathInRun = setting("profile_trace", "below the run folder")
    profile_freq: int = setting(10, "one trace every so many steps", unit="optimizer steps", ge=3)
    enable_memory_snapshot: bool = setting(False, "write CUDA memory snapshots for pytorch.org/memory_viz")
    save_memory_snapshot_folder: PathInRun = setting("memory_snapshot", "below the run folder")


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
TORCHTITAN_KEYS: dict[str, str | None] = {
    "activation_checkpoint": "transforms.activation_checkpoint",
    "checkpoint.async_mode": None,
    "checkpoint.enable": "checkpoint.enabled",
    "checkpoint.enable_checkpoint": "checkpoint.enabled",
    "checkpoint.export_dtype": None,
    "checkpoint.load_step": "checkpoint.resume",
    "comm.mode": None,
    "comm.save_traces_folder": None,
    "comm.trace_buf_size": None,
    "compile": "transforms.compile",
    "compile.enable": "transforms.compile.enabled",
    "debug.deterministic": "training.deterministic",
    "debug.seed": "training.seed",
    "experimental.custom_import": "import",
    "experimental.custom_model_path": "import",
    "fault_tolerance": None,
    "float8": "transforms.float8",
    "job.config_file": "--config",
    "job.custom_config_module": "import",
    "job.print_args": "--check",
    "job.print_config": "--check",
    "lr_scheduler.decay_type": "lr_scheduler.name",
    "memory_estimation": "--check",
    "metrics.disable_color_printing": None,
    "metrics.enable_tensorboard": "metrics.tensorboard.enabled",
    "metrics.enable_wandb": "metrics.wandb.enabled",
    "metrics.save_for_all_ranks": None,
    "metrics.save_tb_folder": "metrics.tensorboard.folder",
    "model.converters": "transforms",
    "model.hf_assets_path": "tokenizer.path",
    "model.norm_type": "model.norm",
    "model.tokenizer_path": "tokenizer.path",
    "optimizer.early_step_in_backward": None,
    "parallelism.context_parallel_degree": None,
    "parallelism.disable_loss_parallel": None,
    "parallelism.enable_async_tensor_parallel": "parallelism.tensor_parallel.async_tp",
    "parallelism.enable_compiled_autograd": None,
    "parallelism.expert_parallel_degree": None,
    "parallelism.expert_tensor_parallel_degree": None,
    "parallelism.fsdp_reshard_after_forward": "parallelism.fsdp.reshard_after_forward",
    "parallelism.pipeline_parallel_degree": None,
    "parallelism.pipeline_parallel_microbatch_size": None,
    "parallelism.pipeline_parallel_schedule": None,
    "profiling.profiler_active": None,
    "profiling.profiler_warmup": None,
    "quantize": "transforms.float8",
    "training.batch_size": "training.local_batch_size",
    "training.dataset": "dataset.name",
    "training.dataset_path": "dataset.files",
    "training.enable_cpu_offload": "parallelism.fsdp.cpu_offload",
    "training.gc_debug": None,
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "validation.dataset": "dataset.validation_fraction",
    "validation.enable": "validation.enabled",
    "validation.steps": "validation.max_tokens",
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
                    label = split_key(part.key)[-1]
                    component = {"name": part.name} if part.name != label else {}
                    table[label] = {"enabled": enabled, **component, **dump(part.config)}
            tables[section] = table
        return tables

    def resume_rules(self) -> dict[Key, ResumeRule]:
        """Key -> whether a resumed run may change it."""
        rules: dict[Key, ResumeRule] = {}
        for section in ENGINE_SECTIONS:
            rules |= resume_rules(getattr(self, section), "free", (section,))
        for section, part in self.slots.items():
            default = registry.KINDS[part.kind].on_resume
            rules[(section, "name")] = ResumeRule(default)
            rules |= resume_rules(part.config, default, (section,))
        for parts in self.sets.values():
            for part in parts:
                rules |= resume_rules(part.config, registry.KINDS[part.kind].on_resume, split_key(part.key))
        return rules


def flatten(table: Mapping[str, Any], key: Key = ()) -> dict[Key, Any]:
    """Key -> leaf value of nested tables."""
    flat: dict[Key, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, (*key, name))
        else:
            flat[(*key, name)] = value
    return flat


def differences(recipe: Recipe, earlier: Mapping[str, Any]) -> Iterator[tuple[Key, Key | None, Any, Any]]:
    """Compare the values of two recipes. A key that one of them lacks has its default there.

    Args:
        recipe: the recipe of now.
        earlier: `Recipe.to_dict()` of another one, perhaps of an earlier version.

    Yields:
        Key, that of the setting that it is or lies in (None where this version has no such setting), and the values of
        `earlier` and of now, of each key whose values differ; sorted by key.
    """
    rules, before, now = recipe.resume_rules(), flatten(earlier), flatten(recipe.to_dict())
    for key in sorted(before.keys() | now.keys()):
        prefixes = [key[:length] for length in range(len(key), 0, -1)]
        ruled = next((prefix for prefix in prefixes if prefix in rules), None)
        default = rules[ruled].default if ruled == key else None
        old, new = before.get(key, default), now.get(key, default)
        if old != new:
            yield key, ruled, old, new


def changes_since(recipe: Recipe, earlier: Mapping[str, Any]) -> tuple[list[ConfigError], list[str]]:
    """Compare with the resolved recipe that a checkpoint holds.

    A key that one of the two lacks has its default there, so that a later version may have more keys. Settings of a
    transform that was or is off, and of a component of another name, are free: they had or have no effect.

    Args:
        recipe: the recipe of the run that wants to resume.
        earlier: `Recipe.to_dict()` of the run that wrote the checkpoint.

    Returns:
        An error for each changed key that must be the same, and a line for each other change.
    """
    rules, before = recipe.resume_rules(), flatten(earlier)
    off = {key[:2] for key, on in before.items() if key[0] in SETS and key[2:] == ("enabled",) and not on}
    errors, notes = [], []
    for key, ruled, old, new in differences(recipe, earlier):
        same = ruled is not None and rules[ruled].rule == "same"
        if same and key[:2] not in off and any(k[: len(ruled) - 1] == ruled[:-1] for k in before):
            errors.append(
                ConfigError(
                    dotted(key),
                    f"was {shown(old)} when the checkpoint was written and must stay so",
                    value=new,
                    where=_origin(recipe.origins, key),
                )
            )
        else:
            notes.append(f"{dotted(key)}: {shown(old)} -> {shown(new)}")
    return errors, notes


def _origin(origins: Mapping[str, str], key: Key) -> str | None:
    """Place of a key or of the nearest table around it."""
    return next((origins[dotted(key[:n])] for n in range(len(key), 0, -1) if dotted(key[:n]) in origins), None)


def plan_mesh(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Axis -> degree, outermost first, with -1 filled in.

    Raises:
        ConfigErrors: the degrees do not multiply to `world_size`, naming those that would.
    """
    degrees = {axis: getattr(parallelism, key) for axis, key in AXES.items()}
    errors = [
        ConfigError(f"parallelism.{AXES[axis]}", "is no degree", value=0, allowed="at least 1, or -1 for what is left")
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


def load_plugins(tree: Tree) -> None:
    """Import what installed packages and the recipe's `import` offer.

    Raises:
        ConfigErrors: those that cannot be imported, all of them.
    """
    errors: list[ConfigError] = []
    try:
        registry.load_entry_points()
    except ConfigErrors as several:
        errors.extend(several.errors)
    for entry in tree.imports:
        try:
            registry.load_plugin(entry.reference, entry.folder)
        except ConfigError as error:
            error.where = error.where or entry.where
            errors.append(error)
    _refuse_if_any(errors)


def _refuse_sweep(tree: Tree) -> None:
    """One error for a sweep file, which has the keys of a recipe nowhere, instead of one for each of its keys."""
    recipe = tree.values.get("recipe")
    if isinstance(recipe, str) and tree.values.keys() & {"folder", "axes", "grids"}:
        where = tree.origin(("recipe",)) or ""
        sweep = where.rpartition(":")[0]
        raise ConfigErrors(
            [
                ConfigError(
                    "",
                    "this file is a sweep, not a recipe",
                    where=where,
                    allowed=f"python scripts/sweep.py {sweep}, or the recipe that it names, {recipe}",
                )
            ]
        )


def _engine_sections(tree: Tree, errors: list[ConfigError]) -> dict[str, Section]:
    """First pass: unknown sections and every fault in the engine's own keys."""
    sections: dict[str, Section] = {}
    for name, table in tree.values.items():
        where = tree.origin((name,))
        if name not in SECTIONS:
            errors.extend(_unknown_section(name, table, tree))
        elif not isinstance(table, dict):
            errors.append(
                ConfigError(
                    name,
                    f"must be a table, not {type_of(table)}",
                    value=table,
                    where=where,
                    allowed=f"[{name}] and its keys below",
                )
            )
    for name, section in ENGINE_SECTIONS.items():
        raw = tree.values.get(name, {})
        if not isinstance(raw, dict):
            continue
        if name in SETS:
            # Sub-tables name components and belong to the second pass.
            raw = {k: v for k, v in raw.items() if not isinstance(v, dict) or k in section.model_fields}
        found: list[ConfigError] = []
        sections[name] = resolve_section(section, raw, (name,), tree, found)
        for error in found:
            if name in SETS and error.problem == "unknown key" and error.nearest is None:
                error.allowed = f"{', '.join(sorted(section.model_fields))}, or a table [{name}.<component>]"
        errors.extend(found)
    return sections


def _unknown_section(name: str, table: Any, tree: Tree) -> list[ConfigError]:
    """Errors for what stands at the top level and is no section of ours."""
    if isinstance(table, dict):
        known = [key for key in table if f"{name}.{key}" in TORCHTITAN_KEYS]
        if known:
            return [
                ConfigError(f"{name}.{key}", "unknown key", value=table[key], where=tree.origin((name, key)))
                for key in known
            ]
        fault = ConfigError(dotted((name,)), "unknown section", where=tree.origin((name,)))
    else:
        fault = ConfigError(dotted((name,)), "unknown key", value=table, where=tree.origin((name,)))
    fault.nearest = nearest(name, SECTIONS)
    if fault.nearest is None or not isinstance(table, dict):
        keys = {key: f"{section}.{key}" for section, fields in ENGINE_SECTIONS.items() for key in fields.model_fields}
        key = nearest(name, keys)
        fault.nearest = keys[key] if key else fault.nearest
    if fault.nearest is None:
        fault.allowed = SECTIONS
    return [fault]


def _use_our_names(errors: list[ConfigError]) -> None:
    """Where a key is unknown but torchtitan has it, say what it is called here."""
    for error in errors:
        if error.problem.startswith("unknown") and error.key in TORCHTITAN_KEYS:
            ours = TORCHTITAN_KEYS[error.key]
            error.problem = f"is torchtitan's name; here it is {ours}" if ours else "torchtitan has this, we do not yet"
            error.allowed = error.nearest = None


def _resolve_set(
    section: str, kind: str, tree: Tree, errors: list[ConfigError], origins: dict[str, str]
) -> tuple[list[Part], list[Part]]:
    on, off = [], []
    tables = tree.values.get(section, {})
    engine_keys = ENGINE_SECTIONS[section].model_fields if section in ENGINE_SECTIONS else {}
    # By name: the order of tables in a file means nothing.
    for name, raw in sorted(tables.items()):
        if name in engine_keys:
            continue
        key = (section, name)
        if not isinstance(raw, dict):
            if section not in ENGINE_SECTIONS:  # elsewhere the first pass has refused it
                errors.append(
                    ConfigError(
                        dotted(key),
                        f"must be a table, not {type_of(raw)}",
                        value=raw,
                        where=tree.origin(key),
                        allowed="enabled = true or false, and the settings of the component",
                    )
                )
            continue
        enabled = raw.get("enabled", True)
        if not isinstance(enabled, bool):
            hint = str(enabled).lower() if str(enabled).lower() in ("true", "false") else None
            errors.append(
                ConfigError(
                    dotted((*key, "enabled")),
                    f"must be of type bool, not {type_of(enabled)}",
                    value=enabled,
                    where=tree.origin((*key, "enabled")),
                    nearest=hint,
                )
            )
        settings = {k: v for k, v in raw.items() if k != "enabled"}
        part = resolve_part(kind, settings, key, tree, errors, origins, name=name, also=("enabled",))
        if part is not None:
            (on if enabled else off).append(part)
        # On because its table is there.
        origins.setdefault(dotted((*key, "enabled")), tree.introduced.get(key, "default"))
    return on, off


def _check_combinations(transforms: list[Part], errors: list[ConfigError], tree: Tree) -> None:
    present = {part.name for part in transforms}
    for part in transforms:
        where = tree.origin(split_key(part.key))
        for needed in getattr(part.component, "needs", ()):
            if needed not in present:
                errors.append(ConfigError(part.key, f"needs the transform {needed}", where=where))
        for other in getattr(part.component, "conflicts", ()):
            if other in present:
                errors.append(ConfigError(part.key, f"does not work together with {other}", where=where))
        if hasattr(part.component, "check_beside"):
            others = {other.name: other.config for other in transforms if other is not part}
            try:
                part.component.check_beside(part.config, others)
            except ConfigError as error:
                error.under(part.key)
                error.where = error.where or tree.origin(split_key(error.key)) or where
                errors.append(error)


def resolve(tree: Tree, world_size: int = 1) -> Recipe:
    """Check and type a whole recipe.

    Args:
        tree: what `config.load` read.
        world_size: number of ranks that the mesh and batch sizes must fit.

    Raises:
        ConfigErrors: every fault of the first pass that has any.
    """
    _refuse_sweep(tree)
    errors = list(tree.errors)
    sections = _engine_sections(tree, errors)
    if sections.get("parallelism") is not None and sections.get("training") is not None:
        faults: list[ConfigError] = []
        try:
            ranks = data_parallel_size(plan_mesh(sections["parallelism"], world_size))
            global_batch_size(sections["training"], ranks)
        except ConfigErrors as several:
            faults.extend(several.errors)
        except ConfigError as error:
            faults.append(error)
        for fault in faults:
            fault.where = tree.origin(tuple(fault.key.partition(" and ")[0].split(".")))
        errors.extend(faults)
    _refuse_if_any(errors)

    origins = {dotted(key): origin for key, origin in tree.origins.items()}
    load_plugins(tree)

    slots: dict[str, Part] = {}
    for section, kind in SLOTS.items():
        part = resolve_part(kind, tree.values.get(section, {}), (section,), tree, errors, origins)
        if part is not None:
            slots[section] = part
    sets: dict[str, tuple[Part, ...]] = {}
    disabled: dict[str, tuple[Part, ...]] = {}
    for section, kind in SETS.items():
        on, off = _resolve_set(section, kind, tree, errors, origins)
        sets[section], disabled[section] = tuple(on), tuple(off)
    if (
        sections["training"].on_nonfinite == "rewind"
        and "checkpoint" in slots
        and not slots["checkpoint"].config.enabled
    ):
        errors.append(
            ConfigError(
                "training.on_nonfinite",
                "needs checkpoints to go back to, and checkpoint.enabled is false",
                value="rewind",
                allowed="stop, skip",
                where=tree.origin(("training", "on_nonfinite")),
            )
        )
    if "checkpoint" in slots and not slots["checkpoint"].config.enabled:
        if (source := slots["checkpoint"].config.weights_from()) is not None:
            errors.append(
                ConfigError(
                    "checkpoint.enabled",
                    f"the weights are to come from {source}, which takes checkpoints to be on",
                    value=False,
                    allowed="true; checkpoint.interval may be as long as the run",
                    where=tree.origin(("checkpoint", "enabled")),
                )
            )
    elif {"checkpoint", "validation"} <= slots.keys():
        _check_ranking(slots, sections["training"], errors, tree)
    _check_combinations([*sets["transforms"], *sets["parallelism"]], errors, tree)
    _refuse_if_any(errors)
    imports = dict.fromkeys(
        str(registry.plugin_file(entry.reference, entry.folder) or entry.reference) for entry in tree.imports
    )
    return Recipe(**sections, slots=slots, sets=sets, disabled=disabled, origins=origins, imports=tuple(imports))


def _check_ranking(slots: Mapping[str, Part], training: Training, errors: list[ConfigError], tree: Tree) -> None:
    """Refuse to rank checkpoints by a validation loss that none of them, or the last alone, will have."""
    checkpoint, validation = slots["checkpoint"].config, slots["validation"].config
    if (key := checkpoint.needs_validation()) is None:
        return
    common = math.lcm(checkpoint.interval, validation.freq)
    problem = None
    if not validation.enabled:
        problem, allowed = (
            "ranks by validation loss, and validation.enabled is false",
            "0, or validation.enabled = true",
        )
    elif "dataset" in slots and slots["dataset"].config.validation_fraction == 0:
        problem = "ranks by validation loss, and dataset.validation_fraction = 0 holds no text out"
        allowed = "0, or a larger dataset.validation_fraction"
    elif common >= training.steps and checkpoint.interval_minutes is None and training.steps > checkpoint.interval:
        problem = (
            "ranks by validation loss, and no saved step but the last is validated: "
            f"saved every {checkpoint.interval}, validated every {validation.freq}, "
            f"both first in step {common} of {training.steps}"
        )
        allowed = "a checkpoint.interval that validation.freq divides"
    if problem is not None:
        value, where = getattr(checkpoint, key), tree.origin(("checkpoint", key))
        errors.append(ConfigError(f"checkpoint.{key}", problem, value=value, allowed=allowed, where=where))


def _refuse_if_any(errors: list[ConfigError]) -> None:
    """End a pass: raise its faults, each once, if there are any."""
    if errors:
        _use_our_names(errors)
        raise ConfigErrors(list({str(error): error for error in errors}.values()))
