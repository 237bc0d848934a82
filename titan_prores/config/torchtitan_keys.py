"""Keys of torchtitan, for messages that name ours."""

from __future__ import annotations

from titan_prores.config.errors import ConfigError
from titan_prores.config.renamed_keys import RENAMED_KEYS

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


def with_our_name(error: ConfigError) -> ConfigError:
    """An error that says what an unknown key is called here, where torchtitan or an earlier version has it."""
    if not error.problem.startswith("unknown"):
        return error
    if error.key in RENAMED_KEYS:
        problem = f"was renamed to {RENAMED_KEYS[error.key]}"
    elif error.key in TORCHTITAN_KEYS:
        ours = TORCHTITAN_KEYS[error.key]
        problem = f"is torchtitan's name; here it is {ours}" if ours else "torchtitan has this, we do not yet"
    else:
        return error
    return error.but(problem=problem, allowed=None, nearest=None)
