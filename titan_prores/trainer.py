"""A run: build it, then step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from titan_prores.build import (
    build_components,
    check_loss,
    choose_checkpoint,
    materialize,
    prepare_data,
    transform_model,
)
from titan_prores.checkpoint.resume import check_start, models_changed, text_sources
from titan_prores.checkpoint.saver import Saver
from titan_prores.config.errors import counted
from titan_prores.config.layout import global_batch_size, plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.data import DataError, TokenWindows, microbatches
from titan_prores.distributed import mesh as mesh_module
from titan_prores.distributed.agreement import Agreement
from titan_prores.distributed.failures import FailureBoard
from titan_prores.distributed.mesh import World
from titan_prores.distributed.signals import Stopped, StopRequest
from titan_prores.distributed.watchdog import FOR_DATA, Watchdog, group_timeout
from titan_prores.model.grad_norm import clip, total_norm
from titan_prores.model.held_out_reader import HeldOutReader
from titan_prores.model.loss import as_terms
from titan_prores.model.weight_init import name_seed
from titan_prores.output.log import logger, setup
from titan_prores.output.run_folder import RunFolder
from titan_prores.protocols.batch import IGNORED_LABEL, Batch
from titan_prores.protocols.validator import ValidationContext
from titan_prores.training.garbage_collection import ScheduledCollection
from titan_prores.training.metrics_hub import MetricsHub, add, perplexity
from titan_prores.training.nonfinite import NonFinitePolicy, keep_batch
from titan_prores.training.profiling import profiler
from titan_prores.training.throughput import Throughput

# How long a rank that was signalled goes on waiting for its data, while others may wait for it.
DATA_GRACE_SECONDS = 5.0


class Trainer:
    """Builds everything that a recipe names, and trains. Making one does nothing yet; all methods are collective.

    Attributes:
        saved_step: completed updates at the last checkpoint that was written or loaded; 0 without one.
        step: completed optimizer updates, skipped batches included.
        samples: sequences trained on so far; the position in the data.
        stage: what it is doing, for the crash report.
        failures: where a rank that fails says so; None until there is a process group.
        log_file: train.log, on rank 0 once there is a run folder.
        stopped: the signal that ended the run before its end.
        stop_request: whether a signal asked this process to end; only looked at, nothing is handled here.
        own_weights: whether weights that a fresh start takes from elsewhere are of the same run, which the caller puts
            where it was.
    """

    def __init__(
        self, recipe: Recipe, world: World, stop_request: StopRequest | None = None, *, own_weights: bool = False
    ) -> None:
        self.recipe, self.world, self.own_weights = recipe, world, own_weights
        self.stop_request = stop_request or StopRequest()
        self.step = self.samples = self.saved_step = 0
        self.nonfinite = NonFinitePolicy(recipe.training)
        self.stage = "building the run"
        self.failures: FailureBoard | None = None
        self.run: RunFolder | None = None
        self.stopped: str | None = None
        self.log_file: Path | None = None
        self.last_validation: dict[str, float] = {}
        self.validated_step: int | None = None

    def build(self) -> None:
        """Everything up to the first step; what can be refused is refused before text is tokenised.

        Raises:
            ConfigError, ConfigErrors: the recipe does not fit the model, the data, the devices or the checkpoint.
        """
        recipe, world = self.recipe, self.world
        degrees = plan_mesh(recipe.parallelism, world.size)
        self.parts = build_components(recipe, degrees)
        self.transforms = self.parts.transforms
        device = mesh_module.choose_device(recipe.job.device, world)
        if recipe.training.deterministic:
            torch.use_deterministic_algorithms(True)

        self.mesh = mesh_module.start(degrees, device, world, recipe.comm.init_timeout_seconds)
        self.metrics_hub = MetricsHub(self.parts.metrics, recipe, self.mesh)
        self.failures = FailureBoard(self.mesh.store)
        self.agreement = Agreement(self.mesh.store, world.rank, world.size)
        self.watchdog = Watchdog(
            self.mesh.store, world.rank, world.size, recipe.comm.init_timeout_seconds, self.mesh.groups()
        ).start()
        self.batch_size = global_batch_size(recipe.training, self.mesh.data_size)
        self.gradient_accumulation_steps = self.batch_size // (recipe.training.local_batch_size * self.mesh.data_size)
        applied = transform_model(recipe, self.parts, self.mesh)
        check_loss(recipe, self.parts, self.mesh)

        self.run = RunFolder(Path(recipe.job.dump_folder), is_main=self.mesh.is_main)
        self.mesh.on_main(self.run.open)
        self.log_file = self.run.log_file if self.mesh.is_main else None
        setup(self.log_file, world.rank, world.size)
        checkpoint = recipe.slots["checkpoint"]
        checkpointer = checkpoint.build(run=self.run, mesh=self.mesh) if checkpoint.config.enabled else None
        self.saver = Saver(checkpointer, checkpoint.config, self.agreement)
        resume_step, meta = choose_checkpoint(checkpointer, recipe, self.parts, self.batch_size, self.run, self.mesh)
        if resume_step is None and not self.own_weights:
            check_start(recipe, dict(self.transforms.named), meta)
        self.step = resume_step or 0
        self._begin("preparing data", patient=True)  # tokenising takes its time
        self.data, self.windows = prepare_data(recipe, self.parts, self.mesh, {} if resume_step is None else meta)

        self.sources = text_sources(self.parts.dataset) if self.mesh.is_main else None

        self._begin("building the model")
        for line in applied:
            logger.info(line)
        if not self.parts.loss_is_cross_entropy:
            logger.warning(
                "loss: what %s gives is not the cross-entropy, so the rows show it as loss, without a perplexity; one "
                "that returns LossTerms has both (validation measures the plain cross-entropy)",
                recipe.slots["loss"].name,
            )
        self.model = materialize(recipe, self.parts, self.mesh.device)
        self.optimizer, self.added = self.parts.build_optimizer(self.model)
        self.reader = HeldOutReader(self.model, self.transforms, self.mesh, self.data.validation, recipe.training)
        if resume_step is not None:
            self._load(resume_step, meta)
        else:
            self.saver.initialize(self.model)

    def _begin(self, stage: str, *, patient: bool = False) -> None:
        """Note what comes next, for the watchdog and for the crash report."""
        self.stage = stage
        self.watchdog.mark(self.step, stage, patient=patient)

    def _load(self, step: int, meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._begin("loading the checkpoint")
        self.saver.load(step, self.model, self.optimizer)
        self.transforms.load_states(meta.get("transforms", {}), step)
        self.step = self.saved_step = step
        self.samples = meta["samples"]
        self.nonfinite.load_state(meta)

    def train(self) -> dict[str, Any]:
        """Train to `training.steps` or `training.stop_after`; returns what to say at the end."""
        recipe, training = self.recipe, self.recipe.training
        self.end = min(training.steps, training.stop_after or training.steps)
        self._begin("starting the metrics")
        self.metrics_hub.start(self.run, self.step, self.end, self.reader)
        self.mesh.on_main(lambda: self.run.note_start(recipe, self.mesh.degrees, self.step))
        tokens, ranks = counted(self.batch_size * training.seq_len, "token"), counted(self.mesh.size, "rank")
        logger.info("%s per step on %s", tokens, ranks)
        first_step = self.step + 1
        with ExitStack() as stack:
            collection = stack.enter_context(ScheduledCollection(training.gc_freq))
            stack.callback(self.watchdog.close)
            self._open_loader()
            stack.callback(lambda: self.loader.close())
            stack.enter_context(self.metrics_hub.closing())
            profile = stack.enter_context(
                profiler(recipe.profiling, self.run.path, self.mesh.rank, start_step=self.step)
            )
            self.clock = Throughput(self.mesh.device, self.mesh.size, self.model.flops_per_token())
            self.stop_request.can_wait = True
            if self.step >= self.end:
                logger.info("nothing left to train: step %d of %d is done", self.step, self.end)
            if self.step and self._validation_is_due() and self.step not in self.mesh.on_main(self.run.validations):
                self.validate()  # a signal had cut it short
            while self.step < self.end and not self.stopped:
                self._begin(f"step {self.step + 1}")
                if self.samples in self.nonfinite.to_skip:
                    self.skip_batch()
                else:
                    try:
                        self.train_step()
                    except Stopped:  # before it began, as its data do not come
                        if self.mesh.size > 1 or self.step == self.saved_step:
                            raise
                self.stopped = self.agreement.after_step(self.step, "stop", self.stop_request.name)
                with self.clock.paused():
                    profile.step()
                    if self.nonfinite.offending is not None:
                        self.rewind()
                        continue
                    if self._validation_is_due() and not self.stopped:
                        self._begin(f"validation after step {self.step}")
                        self.validate()
                    if self.saver.due(self.step, last=self.step == self.end or self.stopped is not None):
                        self._begin(f"saving the checkpoint of step {self.step}")
                        self.save()
                    if self.step == first_step:
                        self.mesh.set_timeout(recipe.comm.train_timeout_seconds)
                        self.watchdog.set_timeout(recipe.comm.train_timeout_seconds)
                collection.after_step(self.step)
            self._begin("waiting for the last checkpoint")
            self.saver.finish()
        return {
            "step": self.step,
            "run_folder": str(self.run.path),
            "tokens_per_second": self.clock.median(),
            "validation": self.last_validation,
            "stopped": self.stopped,
        }

    def train_step(self) -> None:
        """One optimizer update: number `self.step + 1`."""
        sample, count = self.samples, self.gradient_accumulation_steps
        loaded = [self.next_batch().to(self.mesh.device) for _ in range(count)]
        batches = [self.transforms.prepare_batch(batch) for batch in loaded]
        self.transforms.before_step(self.step)
        factor = self.parts.lr_scheduler.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        # Random numbers depend on what is computed, not on what was computed before: no state to save.
        torch.manual_seed(name_seed(self.recipe.training.seed, f"step {self.step} rank {self.mesh.data_rank}"))

        valid = sum((batch.labels_BS != IGNORED_LABEL).sum() for batch in batches)
        valid = self.mesh.sum_over_data(valid)
        loss_sum, other_sums = torch.zeros((), device=self.mesh.device), {}
        for number, batch in enumerate(batches, 1):
            self.transforms.before_microbatch(last=number == count)
            with self.transforms.computing():
                found = as_terms(self.parts.loss(self.model(batch.tokens_BS, **batch.extras), batch.labels_BS))
                (found.total / valid).backward()
            loss_sum += found.cross_entropy.detach() / valid
            for name, term in found.others.items():
                other_sums[name] = other_sums.get(name, 0.0) + term.detach() / valid

        self.transforms.after_backward()
        measured = self.metrics_hub.measure(self.step + 1, self.model)
        grad_norm = clip(self.model.parameters(), self.recipe.training.max_norm, apart=self.added)
        summed = self.mesh.sum_over_data(torch.stack([loss_sum, *other_sums.values()]))
        numbers = torch.cat([summed, grad_norm.to(summed).view(1)])
        loss_value, *other_values, norm_value = self.mesh.agree(numbers).tolist()  # the one wait for the device
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        self.saver.before_update()
        if finite:
            self.optimizer.step()
        else:
            facts = {"step": self.step + 1, "loss": loss_value, "grad_norm": norm_value, "first_sample": sample}
            keep_batch(self.run.path / "nonfinite", loaded, facts, loss_sum.item(), self.model, self.mesh)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.samples += self.batch_size
        self.transforms.after_step(self.step)
        row = {
            "step": self.step,
            "loss": loss_value,
            "grad_norm": norm_value,
            **({"perplexity": perplexity(loss_value)} if self.parts.loss_is_cross_entropy else {}),
            "lr": self.optimizer.param_groups[-1]["lr"],
            "tokens": self.samples * self.recipe.training.seq_len,
            **self.clock.step(self.batch_size * self.recipe.training.seq_len),
            **({} if finite else {"skipped": True}),
        }
        add(row, dict(zip(other_sums, other_values, strict=True)), "the loss")
        self.metrics_hub.write_step(row, self.transforms, measured)
        self.nonfinite.judge(self.step, sample, finite=finite, loss=loss_value, grad_norm=norm_value)

    def skip_batch(self) -> None:
        """Take the microbatches of update number `self.step + 1`, and leave the weights as they are."""
        for _ in range(self.gradient_accumulation_steps):
            self.next_batch()
        self.mesh.barrier()  # every step ends together, as `Agreement` relies on
        self.step += 1
        self.samples += self.batch_size
        logger.warning("step %d: its batch was not finite before and is skipped", self.step)
        tokens = self.samples * self.recipe.training.seq_len
        self.metrics_hub.write({"step": self.step, "skipped": True, "tokens": tokens})

    def rewind(self) -> None:
        """Go back to the last good checkpoint, from where the batch that was not finite will be skipped."""
        self._begin("going back to the last good checkpoint", patient=True)  # it is read and verified first
        step, meta = self.saver.last_good()
        self.nonfinite.rewind(step, self.batch_size, meta.get("samples", 0))
        self._load(step, meta)
        self.loader.close()
        self._open_loader()
        self.metrics_hub.close()
        self.metrics_hub.start(self.run, self.step, self.end, self.reader)
        self.last_validation, self.validated_step = {}, None
        self.stopped = self.stopped or self.mesh.first(self.stop_request.name)

    def _open_loader(self) -> None:
        """Microbatches from the position in the data on."""
        training = self.recipe.training
        self.loader = microbatches(
            self.windows,
            seed=training.seed,
            start_position=self.samples,
            local_batch_size=training.local_batch_size,
            data_rank=self.mesh.data_rank,
            data_ranks=self.mesh.data_size,
            num_workers=self.recipe.slots["dataset"].config.num_workers,
            waiting=self._wait_for_data,
        )

    def next_batch(self) -> Batch:
        """The next microbatch of this rank, on the CPU."""
        with self.watchdog.doing(FOR_DATA):
            return next(self.loader)

    def _wait_for_data(self, seconds: float) -> None:
        """Called about once a second while the data workers give nothing.

        Raises:
            Stopped: a signal came. Alone, a rank can stop at once; others may be in the step's collectives already, and
                this one should rather join them.
            DataError: nothing has come for longer than a collective may take.
        """
        if (name := self.stop_request.name) and (self.mesh.size == 1 or self.stop_request.age > DATA_GRACE_SECONDS):
            raise Stopped(name)
        if seconds > group_timeout(self.watchdog.timeout).total_seconds():
            raise DataError(f"no batch for {seconds:.0f} s, from data workers that are alive")

    def _validation_is_due(self) -> bool:
        """Whether there is to be a validation after the step that is done."""
        config = self.recipe.slots["validation"].config
        due = self.step == self.end or self.step % config.freq == 0
        return due and config.enabled and len(self.data.validation) > 0

    def validate(self) -> None:
        """Measure on held-out text and write a validation row."""
        windows = TokenWindows(self.data.validation, self.recipe.training.seq_len, keep_partial=True)
        with self.transforms.computing():
            found = self.parts.validator.validate(
                ValidationContext(
                    self.model,
                    self.parts.validation_loss,
                    self.transforms.prepare_batch,
                    windows,
                    self.parts.tokenizer,
                    self.mesh,
                    self.recipe.training.local_batch_size,
                    stopping=lambda: self.mesh.any(self.stop_request.name is not None),
                )
            )
        self.transforms.after_evaluation()
        if found is None:
            self.stopped = self.mesh.first(self.stop_request.name)
            logger.info("validation after step %d is cut short by %s", self.step, self.stopped)
            return
        self.last_validation, self.validated_step = found, self.step
        self.metrics_hub.write({"step": self.step, "validation": True, **self.last_validation})

    def save(self) -> None:
        """Write a full checkpoint."""
        self.mesh.on_main(self.metrics_hub.sync)
        weights_are_finite = bool(total_norm(self.model.parameters()).isfinite())
        meta = {
            "step": self.step,
            "samples": self.samples,
            "global_batch_size": self.batch_size,
            "data": self.data.fingerprint,
            "sources": self.sources,
            "mesh": self.mesh.degrees,
            **self.nonfinite.state(self.samples),
            "transforms": self.transforms.states(),
            "changes_model": models_changed(self.recipe, dict(self.transforms.named), self.step),
            "finite": weights_are_finite and not self.nonfinite.skipped_in_a_row,
            "recipe": self.recipe.to_dict(),
        }
        if self.validated_step == self.step:
            meta["validation_loss"] = self.last_validation.get("validation_loss")
        self.saver.save(self.step, self.model, self.optimizer, meta)
        self.saved_step = self.step

    def close(self) -> None:
        """End a run that went well: let the folder go and leave the process group together."""
        self.run.write_status("stopped" if self.stopped else "finished", self.step, signal=self.stopped)
        self.run.close()
        mesh_module.stop()
