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
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "device to train on; auto takes CUDA where it is available"
    )


class Training(Section):
    """The training loop."""

    steps: int = setting(
        1000, "number of optimizer steps of the run; schedules span them", unit="optimizer steps", gt=0
    )
    stop_after: int | None = setting(
        None, "stop after this step without changing any schedule", unit="optimizer steps", gt=0
    )
    seed: int = setting(0, "random seed of weight initialization, data order and dropout", on_resume="same", ge=0)
    seq_len: int = setting(1024, "length of a training sequence", unit="tokens", on_resume="same", gt=0)
    local_batch_size: int = setting(8, "micro-batch size per data-parallel rank", unit="sequences", gt=0)
    global_batch_size: int = setting(
        -1,
        "sequences per optimizer step, with gradient accumulation as needed; -1 = local_batch_size x data-parallel "
        "ranks",
        unit="sequences",
        ge=-1,  # what it comes to must stay the same, which the checkpoint knows
    )
    max_norm: float = setting(1.0, "maximum L2 norm of the gradients, which are clipped to it; 0 disables", ge=0)
    dtype: Dtype = setting("float32", "dtype of master weights and optimizer state; bfloat16 is pure bf16 training")
    mixed_precision_param: Dtype | None = setting(
        None, "dtype of weights and activations in forward and backward; default training.dtype"
    )
    mixed_precision_reduce: Dtype = setting("float32", "dtype in which gradients are reduced over ranks")
    on_nonfinite: Literal["stop", "skip", "rewind"] = setting(
        "stop",
        "what to do when loss or gradient norm is not finite: end the run, skip the batch, or go back to the last "
        "good checkpoint and skip the batch on the way",
    )
    max_nonfinite_skips: int = setting(10, "with skip: number of batches skipped in a row before the run ends", ge=1)
    max_nonfinite_rewinds: int = setting(
        3, "with rewind: number of rewinds to the same checkpoint before the run ends", ge=1
    )
    rewind_batches: int = setting(
        1, "with rewind: number of batches to skip, the offending one and those before it", unit="batches", ge=1
    )
    deterministic: bool = setting(False, "use deterministic kernels only; slower on CUDA")
    gc_freq: int = setting(
        50,
        "run Python's garbage collector every N steps instead of at random times; 0 leaves Python's own schedule",
        unit="optimizer steps",
        ge=0,
    )


class Parallelism(Section):
    """Degrees of the device mesh; their product is the number of ranks."""

    data_parallel_replicate_degree: int = setting(
        1, "number of replicas of the sharded model (HSDP); -1 takes the remaining ranks", ge=-1
    )
    data_parallel_shard_degree: int = setting(
        -1, "number of ranks that weights are sharded over (FSDP2); -1 takes the remaining ranks", ge=-1
    )
    tensor_parallel_degree: int = setting(
        1, "number of ranks that every layer is split over; -1 takes the remaining ranks", ge=-1
    )


class Metrics(Section):
    """How often a run is shown."""

    log_freq: int = setting(10, "write a console line and per-layer values every N steps", unit="optimizer steps", gt=0)


class Comm(Section):
    """Timeouts of collectives."""

    init_timeout_seconds: int = setting(
        300, "time for all ranks to connect and finish their first step", unit="seconds", gt=0, le=31_536_000
    )
    train_timeout_seconds: int = setting(
        100, "timeout of a collective after the first step", unit="seconds", gt=0, le=31_536_000
    )


class Profiling(Section):
    """Traces and memory snapshots, off unless asked for."""

    enable_profiling: bool = setting(False, "write torch.profiler traces (Chrome format)")
    save_traces_folder: PathInRun = setting("profile_trace", "folder of the traces, below the run folder")
    profile_freq: int = setting(10, "write a trace every N steps", unit="optimizer steps", ge=3)
    enable_memory_snapshot: bool = setting(False, "write CUDA memory snapshots for pytorch.org/memory_viz")
    save_memory_snapshot_folder: PathInRun = setting("memory_snapshot", "folder of the snapshots, below the run folder")


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
