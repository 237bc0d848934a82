"""A run: build it, then step by step."""

from __future__ import annotations

import gc
import math
import statistics
from collections import deque
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from titan_prores import mesh as mesh_module
from titan_prores import throughput
from titan_prores.build import build_components, choose_checkpoint, prepare_data, transform_model
from titan_prores.data import TokenWindows, microbatches
from titan_prores.errors import ConfigError
from titan_prores.failures import FailureBoard
from titan_prores.grad_norm import total_norm
from titan_prores.init import allocate, init_weights, name_seed, unfilled_buffers
from titan_prores.log import logger, setup
from titan_prores.mesh import World
from titan_prores.nonfinite import NonFinitePolicy
from titan_prores.profiling import profiler
from titan_prores.recipe import Recipe, global_batch_size, plan_mesh
from titan_prores.records import Records, add, perplexity
from titan_prores.run_folder import RunFolder
from titan_prores.saving import Saver
from titan_prores.stopping import Agreement, StopRequest
from titan_prores.transform import computing
from titan_prores.watchdog import Watchdog


class Trainer:
    """Builds everything that a recipe names, and trains. Making one does nothing yet; all methods are collective.

    Attributes:
        step: completed optimizer updates, passed-over batches included.
        samples: sequences trained on so far; the position in the data.
        stage: what it is doing, for the account of a failure.
        failures: where a rank that fails says so; None until there is a process group.
        log_file: train.log, on rank 0 once there is a run folder.
        stopped: the signal that ended the run before its end.
        stop_request: whether a signal asked this process to end; only looked at, nothing is handled here.
    """

    def __init__(self, recipe: Recipe, world: World, stop_request: StopRequest | None = None) -> None:
        self.recipe, self.world = recipe, world
        self.stop_request = stop_request or StopRequest()
        self.step = self.samples = 0
        self.nonfinite = NonFinitePolicy(recipe.training)
        self.stage = "building the run"
        self.failures: FailureBoard | None = None
        self.run: RunFolder | None = None
        self.stopped: str | None = None
        self.log_file: Path | None = None
        self.last_validation: dict[str, float] = {}
        self.speeds: deque[float] = deque(maxlen=1000)  # tokens/s of the latest steps

    def build(self) -> None:
        """Everything up to the first step; what can be refused is refused before text is tokenised.

        Raises:
            ConfigError, ConfigErrors: the recipe does not fit the model, the data, the devices or the checkpoint.
        """
        recipe, world = self.recipe, self.world
        degrees = plan_mesh(recipe.parallelism, world.size)
        self.parts = build_components(recipe, degrees)
        self.transforms = [transform for _, transform in self.parts.transforms]
        device = mesh_module.choose_device(recipe.job.device, world)
        if recipe.training.deterministic:
            torch.use_deterministic_algorithms(True)

        self.mesh = mesh_module.start(degrees, device, world, recipe.comm.init_timeout_seconds)
        self.records = Records(self.parts.metrics, is_main=self.mesh.is_main)
        self.failures = FailureBoard(self.mesh.store)
        self.agreement = Agreement(self.mesh.store, world.rank, world.size)
        self.watchdog = Watchdog(
            self.mesh.store, world.rank, world.size, recipe.comm.init_timeout_seconds, self.mesh.groups()
        ).start()
        self.batch_size = global_batch_size(recipe.training, self.mesh.data_size)
        applied = transform_model(recipe, self.parts, self.mesh)

        self.run = RunFolder(Path(recipe.job.dump_folder), is_main=self.mesh.is_main)
        self.mesh.on_main(self.run.open)
        self.log_file = self.run.log_file if self.mesh.is_main else None
        setup(self.log_file, world.rank, world.size)
        checkpoint = recipe.slots["checkpoint"]
        checkpointer = checkpoint.build(run=self.run, mesh=self.mesh) if checkpoint.config.enabled else None
        self.saver = Saver(checkpointer, checkpoint.config, self.agreement)
        resume_step, meta = choose_checkpoint(checkpointer, recipe, self.batch_size, self.run, self.mesh)
        self._begin("preparing data", patient=True)  # tokenising takes its time
        self.data, self.windows = prepare_data(recipe, self.parts, self.mesh, meta)

        self._begin("building the model")
        for line in applied:
            logger.info(line)
        self.model = self._materialize(self.parts.model)
        self.optimizer = self.parts.optimizer.build(self.model.named_parameters())
        for group in self.optimizer.param_groups:
            group["peak_lr"] = group["lr"]
        if resume_step is not None:
            self._begin("loading the checkpoint")
            checkpointer.load(resume_step, self.model, self.optimizer)
            self.step, self.samples = resume_step, meta["samples"]
            self.nonfinite.skipped_in_a_row = meta["skipped_in_a_row"]
        elif checkpointer is not None:
            checkpointer.initialize(self.model)

    def _begin(self, stage: str, *, patient: bool = False) -> None:
        """Note what comes next, for the watchdog and for the account of a failure."""
        self.stage = stage
        self.watchdog.mark(self.step, stage, patient=patient)

    def _materialize(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give the transformed meta model storage, weights and buffers."""
        allocate(model, self.mesh.device, self.parts.parameter_device)
        init_weights(model, model.init_rules(), self.recipe.training.seed)
        model.fill_buffers()
        for transform in self.transforms:
            transform.on_materialize(model)
        if unfilled := unfilled_buffers(model):
            raise ConfigError("model", f"its fill_buffers leaves {', '.join(unfilled[:3])} unset")
        return model.train()

    def train(self) -> dict[str, Any]:
        """Train to `training.steps` or `training.stop_after`; returns what to say at the end."""
        recipe, training = self.recipe, self.recipe.training
        end = min(training.steps, training.stop_after or training.steps)
        info = {
            "total_steps": training.steps, "end_step": end, "start_step": self.step, "n_layers": len(self.model.layers),
            "log_freq": recipe.metrics.log_freq, "recipe": recipe.to_dict(),
        }  # fmt: skip
        self._begin("opening the run's records")
        self.mesh.on_main(lambda: self._open_records(info))
        if self.step >= end:
            logger.info("nothing left to train: step %d of %d is done", self.step, end)
        validation = recipe.slots["validation"].config
        if training.gc_freq:
            gc.disable()
        first_step = self.step + 1
        self.loader = microbatches(
            self.windows, seed=training.seed, start_position=self.samples, local_batch_size=training.local_batch_size,
            data_rank=self.mesh.data_rank, data_ranks=self.mesh.data_size,
            num_workers=recipe.slots["dataset"].config.num_workers,
        )  # fmt: skip
        with ExitStack() as stack:
            stack.callback(gc.enable)
            stack.callback(self.watchdog.close)
            stack.enter_context(closing(self.loader))
            stack.enter_context(self.records.closing())
            profile = stack.enter_context(
                profiler(recipe.profiling, self.run.path, self.mesh.rank, start_step=self.step)
            )
            self.clock = throughput.Throughput()
            self.stop_request.can_wait = True
            while self.step < end and not self.stopped:
                self._begin(f"step {self.step + 1}")
                self.train_step()
                self.stopped = self.agreement.after_step(self.step, "stop", self.stop_request.name)
                last = self.step == end or self.stopped is not None
                with self.clock.paused():
                    profile.step()
                    if validation.enabled and not self.stopped and (last or self.step % validation.freq == 0):
                        self._begin(f"validation after step {self.step}")
                        self.validate()
                    if self.saver.due(self.step, last=last):
                        self._begin(f"saving the checkpoint of step {self.step}")
                        self.save()
                    if self.step == first_step:
                        self.mesh.set_timeout(recipe.comm.train_timeout_seconds)
                        self.watchdog.set_timeout(recipe.comm.train_timeout_seconds)
                if training.gc_freq and self.step % training.gc_freq == 0:
                    gc.collect()
            self._begin("waiting for the last checkpoint")
            self.saver.finish()
        speed = statistics.median(self.speeds) if self.speeds else None
        return {
            "step": self.step, "run_folder": str(self.run.path), "tokens_per_second": speed,
            "validation": self.last_validation, "stopped": self.stopped,
        }  # fmt: skip

    def train_step(self) -> None:
        """One optimizer update: number `self.step + 1`."""
        for transform in self.transforms:
            transform.before_step(self.step)
        factor = self.parts.lr_scheduler.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        # Random numbers depend on what is computed, not on what was computed before: no state to save.
        torch.manual_seed(name_seed(self.recipe.training.seed, f"step {self.step} rank {self.mesh.data_rank}"))

        count = self.batch_size // (self.recipe.training.local_batch_size * self.mesh.data_size)
        batches = [[t.to(self.mesh.device, non_blocking=True) for t in next(self.loader)] for _ in range(count)]
        valid = sum((labels_BS != -100).sum() for _, labels_BS in batches)
        valid = self.mesh.sum_over_data(valid)
        loss_sum = torch.zeros((), device=self.mesh.device)
        for number, (tokens_BS, labels_BS) in enumerate(batches, 1):
            for transform in self.transforms:
                transform.before_microbatch(last=number == count)
            with computing(self.transforms):
                loss = self.parts.loss(self.model(tokens_BS), labels_BS) / valid
                loss.backward()
            loss_sum += loss.detach()

        probed = self.records.measure(self.step + 1, self.model)
        grad_norm = self._clip_gradients()
        loss_sum = self.mesh.sum_over_data(loss_sum)
        numbers = torch.stack([loss_sum, grad_norm.to(loss_sum.device)])
        loss_value, norm_value = numbers.tolist()  # the one wait for the device
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        self.saver.before_update()
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.samples += self.batch_size
        for transform in self.transforms:
            transform.after_step(self.step)
        self._log_step(loss_value, norm_value, probed, skipped=not finite)
        self.nonfinite.judge(self.step, finite=finite, loss=loss_value, grad_norm=norm_value)

    def _clip_gradients(self) -> torch.Tensor:
        """Scale gradients to max_norm; returns their L2 norm before that, over all ranks, fp32 scalar."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters])
        if self.recipe.training.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.recipe.training.max_norm, norm)
        return norm

    def _open_records(self, info: dict[str, Any]) -> None:
        """Rank 0: write what the run is, and take rows of steps that will be trained again out of metrics.jsonl."""
        moved = self.run.set_aside_metrics(self.step)
        if moved:
            logger.info("%d rows of metrics.jsonl past step %d moved aside", moved, self.step)
        self.run.write_recipe(self.recipe)
        self.run.write_env(self.mesh.degrees)
        self.run.write_status("running", self.step)
        parameters = sum(p.numel() for p in self.model.parameters())
        logger.info(
            "%s: %.2fM parameters, %d ranks on %s, %d tokens a step", self.recipe.slots["model"].name, parameters / 1e6,
            self.mesh.size, self.mesh.device.type, self.batch_size * self.recipe.training.seq_len,
        )  # fmt: skip
        self.records.start(self.run, info)

    def _log_step(self, loss: float, grad_norm: float, probed: dict[str, Any], skipped: bool) -> None:
        tokens = self.batch_size * self.recipe.training.seq_len
        seconds, speed = self.clock.step(tokens)
        self.speeds.append(speed)
        if not self.mesh.is_main:
            return
        row = {
            "step": self.step, "loss": loss, "perplexity": perplexity(loss),
            "grad_norm": grad_norm, "lr": self.optimizer.param_groups[-1]["lr"],
            "tokens": self.samples * self.recipe.training.seq_len, "tokens_per_second": speed, "step_seconds": seconds,
            "memory_gib": throughput.memory_gib(self.mesh.device),
        }  # fmt: skip
        if (peak := throughput.peak_flops(self.mesh.device)) is not None:
            row["mfu"] = throughput.mfu(speed, self.model.flops_per_token(), self.mesh.size, peak)
        if skipped:
            row["skipped"] = True
        detailed = self.step % self.recipe.metrics.log_freq == 0
        for transform in self.transforms:
            add(row, transform.row(self.step, detailed=detailed), type(transform).__name__)
        add(row, probed, "a probe")
        self.records.write(row)

    def validate(self) -> None:
        """Measure on held-out text and write a validation row."""
        if not len(self.data.validation):
            return
        windows = TokenWindows(self.data.validation, self.recipe.training.seq_len, keep_partial=True)
        with computing(self.transforms):
            self.last_validation = self.parts.validator.validate(
                self.model, self.parts.loss, windows, self.mesh, self.recipe.training.local_batch_size
            )
        for transform in self.transforms:
            transform.after_evaluation()
        self.records.write({"step": self.step, "validation": True, **self.last_validation})

    def save(self) -> None:
        """Write a full checkpoint."""
        skipped = self.nonfinite.skipped_in_a_row
        meta = {
            "step": self.step, "samples": self.samples, "global_batch_size": self.batch_size,
            "data": self.data.fingerprint, "mesh": self.mesh.degrees, "skipped_in_a_row": skipped,
            "finite": not skipped, "validation_loss": self.last_validation.get("validation_loss"),
            "recipe": self.recipe.to_dict(),
        }  # fmt: skip
        self.saver.save(self.step, self.model, self.optimizer, meta)

    def close(self) -> None:
        """End a run that went well: let the folder go and leave the process group together."""
        self.run.write_status("stopped" if self.stopped else "finished", self.step, signal=self.stopped)
        self.run.close()
        mesh_module.stop()
