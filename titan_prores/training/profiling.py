"""Profiler traces and CUDA memory snapshots, taken every N steps when the recipe asks for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titan_prores.config.engine_sections import Profiling
from titan_prores.output.log import logger


class Profiler:
    """What `profiler` hands out when nothing is asked for."""

    def step(self) -> None:
        """To be called at the end of every optimizer step."""


class _ActiveProfiler(Profiler):
    def __init__(self, config: Profiling, run_path: Path, rank: int, start_step: int) -> None:
        self._config, self._rank, self._step = config, rank, start_step
        self._traces = run_path / config.save_traces_folder
        self._snapshots = run_path / config.save_memory_snapshot_folder
        self._trace = self._make_trace() if config.enable_profiling else None
        self._snapshot = config.enable_memory_snapshot and torch.cuda.is_available()
        if config.enable_memory_snapshot and not self._snapshot and rank == 0:
            logger.warning("profiling.enable_memory_snapshot needs CUDA: no snapshot is taken on this machine")

    def _make_trace(self) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Each trace is of one step by itself, so that what the profiler warns of is what we want.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        # The first step with the profiler on is slow in ways that are none of the model's: it is run but not kept.
        wait, warmup, active = self._config.profile_freq - 2, 1, 1
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active),
            on_trace_ready=self._save_trace,
            record_shapes=True,
        )

    def _file(self, folder: Path, step: int | str, suffix: str) -> Path:
        file = folder / f"step_{step}" / f"rank_{self._rank}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def _save_trace(self, profile: torch.profiler.profile) -> None:
        file = self._file(self._traces, self._step, ".json.gz")
        profile.export_chrome_trace(str(file))
        if self._rank == 0:
            logger.info("profiler trace of step %d in %s (open it at ui.perfetto.dev)", self._step, file.parent)

    def _save_snapshot(self, step: int | str) -> None:
        file = self._file(self._snapshots, step, ".pickle")
        torch.cuda.memory._dump_snapshot(str(file))
        if self._rank == 0:
            logger.info("CUDA memory snapshot in %s (open it at pytorch.org/memory_viz)", file.parent)

    def start(self) -> None:
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if self._trace:
            self._trace.start()

    def step(self) -> None:
        self._step += 1
        if self._trace:
            self._trace.step()
        if self._snapshot and self._step % self._config.profile_freq == 0:
            self._save_snapshot(self._step)

    def stop(self, error: BaseException | None) -> None:
        if self._snapshot:
            # The moment that memory runs out is what a snapshot is most wanted for.
            if isinstance(error, torch.cuda.OutOfMemoryError):
                self._save_snapshot(f"{self._step + 1}_out_of_memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._trace:
            # A window cut short by the end of the run would be saved as if it were a step's trace.
            self._trace.on_trace_ready = None
            self._trace.stop()


@contextmanager
def profiler(config: Profiling, run_path: Path, rank: int, *, start_step: int = 0) -> Iterator[Profiler]:
    """Profile the steps run inside, as the recipe says; costs nothing when it asks for nothing.

    Traces go to `<run_path>/<save_traces_folder>/step_N/rank_r.json.gz`: one step out of every `profile_freq`, N being
    the step that was traced. Memory snapshots go to `<save_memory_snapshot_folder>/step_N/rank_r.pickle`.

    Args:
        config: the recipe's [profiling].
        run_path: the run folder.
        rank: of this process; each writes its own files.
        start_step: completed steps, when a run resumes.
    """
    if not (config.enable_profiling or config.enable_memory_snapshot):
        yield Profiler()
        return
    active = _ActiveProfiler(config, run_path, rank, start_step)
    active.start()
    error: BaseException | None = None
    try:
        yield active
    except BaseException as caught:
        error = caught
        raise
    finally:
        active.stop(error)
