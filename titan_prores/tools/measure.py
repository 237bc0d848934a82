"""Side by side: runs built from recipes and stepped by turns, and what may be claimed of the ratios of their times.

Nothing here names a component: what is compared with what is for the scripts to say.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_prores.checkpoint.saver import Saver
from titan_prores.config import registry, sources
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section
from titan_prores.distributed.mesh import World
from titan_prores.protocols.batch import Batch
from titan_prores.protocols.metric import Metric
from titan_prores.trainer import Trainer
from titan_prores.training.throughput import Throughput

CONFIDENCE = 0.95
FEWEST_PAIRS = 6  # of fewer no two are 95 % sure to enclose the median

MET, MISSED, UNRESOLVED = "met", "missed", "inconclusive"


# --- What may be claimed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A median, and two values that enclose the true one with 95 % confidence or more."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float]) -> Interval:
    """Median and the narrowest pair of order statistics, as far from one end as from the other, that encloses it.

    Assumes nothing about the distribution but that values are independent: the true median lies below the k-th
    smallest of n values with the probability that fewer than k of n coins show heads.

    Raises:
        ValueError: fewer than 6 values.
    """
    ordered, n = sorted(values), len(values)
    if n < FEWEST_PAIRS:
        raise ValueError(f"{n} values: a 95 % interval of the median takes at least {FEWEST_PAIRS}")
    outside, k = 0.0, 0
    while outside + math.comb(n, k) / 2**n <= (1 - CONFIDENCE) / 2:
        outside += math.comb(n, k) / 2**n
        k += 1
    return Interval(ordered[k - 1], statistics.median(ordered), ordered[n - k])


def paired_ratio(seconds: Sequence[float], reference: Sequence[float]) -> Interval:
    """Interval of the ratios seconds[i] / reference[i], each pair being of one round."""
    return median_interval([ours / theirs for ours, theirs in zip(seconds, reference, strict=True)])


def paired_difference(seconds: Sequence[float], reference: Sequence[float]) -> Interval:
    """Interval of the differences seconds[i] - reference[i], each pair being of one round."""
    return median_interval([ours - theirs for ours, theirs in zip(seconds, reference, strict=True)])


def verdict(found: Interval, same: Interval, limit: float, equal: float = 1.0) -> str:
    """Whether a ratio or a difference of times is at most `limit`.

    Args:
        found: of the thing measured to its reference.
        same: of a second copy of the reference to the first, measured in the same rounds (A/A).
        limit: the goal, greater than `equal`.
        equal: what two equal things give: 1 for a ratio, 0 for a difference.

    Returns:
        "met" or "missed" where the whole interval is on one side of the limit and A/A strays from `equal` by less than
        the limit does, from end to end; otherwise "inconclusive".
    """
    noise = max(same.high, equal) - min(same.low, equal)
    if noise >= limit - equal or found.low <= limit < found.high:
        return UNRESOLVED
    return MET if found.high <= limit else MISSED


def verdict_at_least(found: Interval, same: Interval, limit: float) -> str:
    """Whether a ratio is at least `limit`, also when all of it is off by as much as A/A strays from 1.

    Args:
        found: the ratio.
        same: the ratio of two equal things, measured in the same rounds (A/A).
        limit: the goal, greater than 0.
    """
    stray = max(same.high, 1 / same.low, 1.0)
    if found.low / stray >= limit:
        return MET
    return MISSED if found.high * stray < limit else UNRESOLVED


def verdict_of_share(ratio: Interval, same: Interval, limit: float) -> str:
    """Whether a ratio of times is at most `limit`, a goal far below 1, which A/A cannot be close to.

    The interval is widened by what A/A strays from 1, as if the reference had been off by so much.
    """
    if ratio.high / min(same.low, 1.0) <= limit:
        return MET
    return MISSED if ratio.low / max(same.high, 1.0) > limit else UNRESOLVED


def by_turns(steps: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Call every step once a round, in an order drawn anew for each round and the same on all ranks.

    Args:
        steps: name -> a call that returns how many seconds it took.
        rounds: rounds that count.
        warmup: rounds before them that do not: they compile and allocate.

    Returns:
        Name -> seconds, one a round.
    """
    order, shuffled = list(steps), random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warmup + rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds = steps[name]()
            if number >= warmup:
                found[name].append(seconds)
    return found


# --- A run to measure ---------------------------------------------------------------------------------------------


def load(path: Path, overrides: Sequence[str] = (), world_size: int = 1) -> Recipe:
    """The recipe in a file with the overrides of a command line.

    Raises:
        ConfigErrors: every fault of the first pass that has any.
    """
    return resolve(sources.load(path, overrides, registry.DEFAULTS), world_size)


class _StepTimer(Metric):
    """Notes when the backward passes of a step are done, the gradients they left and the row of the step."""

    def __init__(self) -> None:
        super().__init__(Section())
        self.row: Mapping[str, Any] = {}
        self.time_after_backward = 0.0
        self.gradients: dict[str, torch.Tensor] | None = None
        self.wait: Callable[[], None] | None = None

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        if self.wait is not None:
            self.wait()
            self.time_after_backward = time.perf_counter()
        if self.gradients is not None:
            self.gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        return {}

    def write(self, row: Mapping[str, Any]) -> None:
        self.row = row


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


class Bench:
    """A recipe's run, built by the trainer as for training, that takes a step when it is told to.

    Its batch is taken from the run's own windows once, and is the same in each step: reading data is measured apart.

    Args:
        recipe: with a run folder of its own. Nobody but this object may step what it builds.
        world: this process among those of the run.

    Attributes:
        trainer: the trainer, built.
        tokens_per_step: of all ranks together.
    """

    def __init__(self, recipe: Recipe, world: World | None = None) -> None:
        self.trainer = trainer = Trainer(recipe, world or World(0, 0, 1))
        trainer.build()
        trainer.watchdog.close()
        trainer.run.close()
        size, windows = recipe.training.local_batch_size, trainer.windows
        first = trainer.mesh.data_rank * size
        samples = range(first, first + size)
        tokens, labels = zip(*(windows[number % len(windows)] for number in samples), strict=True)
        batch = Batch(torch.stack(tokens), torch.stack(labels), torch.tensor(samples))
        trainer.loader = itertools.repeat(batch)
        trainer.metrics_hub.prepare(trainer.run, trainer.step, recipe.training.steps, trainer.reader)
        trainer.clock = Throughput(trainer.mesh.device, trainer.mesh.size, trainer.model.flops_per_token())
        self.tokens_per_step = trainer.batch_size * recipe.training.seq_len
        self._timer = _StepTimer()
        trainer.metrics_hub.metrics = [*trainer.metrics_hub.metrics, self._timer]

    @property
    def row(self) -> Mapping[str, Any]:
        """The metrics row of the latest step; empty on ranks other than 0."""
        return self._timer.row

    def step(self) -> float:
        """One optimizer update; seconds until the device has done it."""
        start = time.perf_counter()
        self.trainer.train_step()
        self._wait()
        return time.perf_counter() - start

    def forward_backward(self) -> float:
        """One optimizer update too, of which only forward, loss and backward count. Seconds."""
        self._timer.wait = self._wait
        start = time.perf_counter()
        self.trainer.train_step()
        self._timer.wait = None
        return self._timer.time_after_backward - start

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients, before clipping, of one optimizer update: name -> the whole tensor, on the CPU. Collective."""
        self._timer.gradients = {}
        self.step()
        found, self._timer.gradients = self._timer.gradients, None
        return found

    def _wait(self) -> None:
        if self.trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.mesh.device)


class TimedSaver(Saver):
    """A saver that adds up how long training waits for it.

    Attributes:
        stopped_seconds: waited so far, in all of its methods together.
    """

    stopped_seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stopped_seconds += time.perf_counter() - start

    def save(self, *arguments: Any) -> None:
        with self._timed():
            super().save(*arguments)

    def before_update(self) -> None:
        with self._timed():
            super().before_update()

    def finish(self) -> None:
        with self._timed():
            super().finish()


@dataclass(frozen=True)
class Save:
    """What a save has cost training.

    Attributes:
        stopped_seconds: training waited.
        published_seconds: from its begin until the checkpoint was there.
        step_seconds: of the steps taken meanwhile, without what they waited.
    """

    stopped_seconds: float
    published_seconds: float
    step_seconds: tuple[float, ...]


def save(bench: Bench, saver: TimedSaver) -> Save:
    """Save once and take steps until the checkpoint is published; then delete it."""
    trainer = bench.trainer
    trainer.saver, saver.stopped_seconds = saver, 0.0
    before, start, steps = trainer.run.noted_checkpoint(), time.perf_counter(), []
    trainer.save()
    while (noted := trainer.run.noted_checkpoint()) is None or noted == before:
        waited = saver.stopped_seconds
        steps.append(bench.step() - (saver.stopped_seconds - waited))
    published = time.perf_counter() - start
    saver.finish()
    shutil.rmtree(noted)
    return Save(saver.stopped_seconds, published, tuple(steps))


@dataclass(frozen=True)
class Comparison:
    """Times of several variants against a reference, step by step in one process.

    Attributes:
        benches: variant -> its run; "reference" and "again", a second copy of the reference, among them.
        seconds: the same names -> seconds of each measured step.
        tokens_per_second: the same names -> median.
        ratios: variant -> time relative to the reference.
        same: "again" relative to the reference: what the machine makes of two equal things (A/A).
    """

    benches: Mapping[str, Bench]
    seconds: Mapping[str, Sequence[float]]
    tokens_per_second: Mapping[str, float]
    ratios: Mapping[str, Interval]
    same: Interval


def compare(
    build: Callable[[Sequence[str]], Bench],
    reference: Sequence[str],
    variants: Mapping[str, Sequence[str]],
    pairs: int,
    step: Callable[[Bench], float] = Bench.step,
) -> Comparison:
    """Build everything, then step it by turns.

    Args:
        build: from overrides of a recipe to its run.
        reference: overrides of what everything else is compared with.
        variants: name -> overrides. All that share compiled code must be meant to.
        pairs: steps of each that count.
        step: what is timed.
    """
    torch._dynamo.reset()  # graphs of an earlier comparison are none of this one's
    gc.collect()
    benches = {name: build(own) for name, own in {"reference": reference, "again": reference, **variants}.items()}
    seconds = by_turns({name: partial(step, bench) for name, bench in benches.items()}, pairs)
    base = seconds["reference"]
    return Comparison(
        benches,
        seconds,
        {name: benches[name].tokens_per_step / statistics.median(taken) for name, taken in seconds.items()},
        {name: paired_ratio(seconds[name], base) for name in variants},
        paired_ratio(seconds["again"], base),
    )


# --- Memory -------------------------------------------------------------------------------------------------------


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors that `step` held at once beyond those it found.

    Counted by CUDA's allocator; elsewhere from the profiler's allocator events, which see compiled code too.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)


def saved_bytes(step: Callable[[], Any], left_out: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages, each counted once, that eager autograd keeps for the backward passes of `step`.

    Args:
        step: forward and backward passes.
        left_out: tensors whose storages do not count: parameters, which are there anyhow.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in left_out}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(found.values())
