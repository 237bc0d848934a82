"""The recipe sections that the engine itself reads."""

from __future__ import annotations

from typing import Literal

from titan_prores.config.kinds import SETS, SLOTS
from titan_prores.config.paths import PathInRun, WritePath
from titan_prores.config.sections import Section, setting

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

# Every section of a recipe.
SECTIONS = (*dict.fromkeys((*ENGINE_SECTIONS, *SLOTS, *SETS)),)
