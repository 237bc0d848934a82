"""Breaks runs on purpose, starts them again, and holds what they do against runs that nobody disturbs.

A chain is one run folder that a series of launches takes from step 0 to its end. Between and during launches it meets
faults: processes are killed, files damaged, the disk is full, the layout changes. After every launch the harness works
out by itself, without the package, where the next one has to go on and what it has to write:

- It resumes at the newest checkpoint whose files are what its manifest says. No other is taken, none is lost.
- Each row of metrics.jsonl, step by step without gap or repetition, is bitwise that of an undisturbed run in the same
  layout. After a change of layout that is a run from a copy of the same checkpoint, and its next ten losses are within
  LAYOUT_TOLERANCE of the run that stays on the old layout.
- Each update consumes the very samples that the undisturbed run consumes in it, whatever the layout.
- Every rank ends by itself when another one is gone, and no process is left behind.

The faults are a pure function of the seed. Moments that depend on time differ from run to run; the report tells them.
Most ranks are forked from a parent that has imported torch: they run `titan_prores.cli.main` and end as real ones. Some
launches are real ones, through scripts/train.py and torchrun.
"""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.integration.launch import CORPUS, debug, forked, processes_of, start
from tests.integration.torture_inside import describe_launch, write_plugin
from titan_prores.distributed.watchdog import MARGIN_SECONDS
from titan_prores.output.shell import run_command
from titan_prores.output.tables import markdown, show

LAYOUT_TOLERANCE = 1e-5
CONTROL_STEPS = 10
STEPS, INTERVAL = 60, 3
FAULTS_A_CHAIN = 12
PEERS_END_SECONDS = 60  # twice what torchrun waits for ranks that it has asked to end
LAUNCH_SECONDS = 300
STALL_SECONDS = 2
MAX_RESTARTS = 2
REAL_START_SECONDS = 5
CORPUS_BYTES = 12_000  # so little text that a chain sees it more than once
SETTINGS = [
    f"--training.steps={STEPS}",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--training.local_batch_size=4",
    f"--checkpoint.interval={INTERVAL}",
    "--checkpoint.keep_latest_k=4",
    "--validation.freq=5",
    "--validation.max_tokens=512",
    "--metrics.tensorboard.enabled=false",
]
_BEGINNING = re.compile(r"^\d\d:\d\d:\d\d (?:resuming|starting) at step (\d+)\b.*", re.M)
COMPARED = ("loss", "grad_norm", "lr", "tokens")


@dataclass(frozen=True)
class Layout:
    """How a run is spread over ranks and cut into microbatches: all that may change its rounding."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()


LAYOUTS = [
    Layout("one", 1),
    Layout("one, microbatches of 2", 1, ("--training.local_batch_size=2",)),
    Layout("fsdp 2", 2),
    Layout("fsdp 2, microbatches of 2", 2, ("--training.local_batch_size=2",)),
    Layout("hsdp 2 x 1", 2, ("--parallelism.data_parallel_replicate_degree=2",)),
    Layout("tp 2", 2, ("--parallelism.tensor_parallel_degree=2",)),
]


class Lost(Exception):
    """Something is not as the undisturbed run has it."""


# --- The plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault of the plan.

    Attributes:
        number: in the plan, from 0.
        kind: a key of KINDS.
        draws: numbers in [0, 1) that settle everything about it that does not depend on time.
    """

    number: int
    kind: str
    draws: tuple[float, ...]

    def pick(self, draw: int, choices: Sequence[Any]) -> Any:
        return choices[int(self.draws[draw] * len(choices))]


@dataclass(frozen=True)
class Round:
    """One launch and what comes before it.

    Attributes:
        between: faults of the folder and changes of layout, in this order, before the launch.
        during: what the launch itself meets, if anything.
        workers: dataset.num_workers.
        mode: checkpoint.async_mode.
    """

    between: tuple[Fault, ...]
    during: Fault | None
    workers: int
    mode: str


@dataclass(frozen=True)
class ChainPlan:
    """A run folder's story."""

    number: int
    layout: Layout
    rounds: tuple[Round, ...]

    @property
    def faults(self) -> list[Fault]:
        return [fault for each in self.rounds for fault in (*each.between, each.during) if fault is not None]


def plan(seed: int, only: Sequence[str] = ()) -> Iterator[ChainPlan]:
    """Endless chains; the same for the same seed. `only` limits the kinds."""
    kinds = [name for name, kind in KINDS.items() for _ in range(kind.weight) if not only or name in only]
    draw = random.Random(f"titan_prores torture {seed}")
    bag: list[str] = []
    numbers = iter(range(sys.maxsize))

    def fault() -> Fault:
        if not bag:  # each kind comes as often as its weight says before any comes again
            bag.extend(draw.sample(kinds, len(kinds)))
        return Fault(next(numbers), bag.pop(), tuple(draw.random() for _ in range(5)))

    for number in range(sys.maxsize):
        rounds, between = [], []
        layout = draw.choice(LAYOUTS)
        for _ in range(FAULTS_A_CHAIN):
            each = fault()
            during = KINDS[each.kind].during
            if not during:
                between.append(each)
                if draw.random() < 0.5:  # several at once
                    continue
            rounds.append(_round(between, each if during else None, draw))
            between = []
        if between:
            rounds.append(_round(between, None, draw))
        yield ChainPlan(number, layout, tuple(rounds))


def _round(between: list[Fault], during: Fault | None, draw: random.Random) -> Round:
    return Round(tuple(between), during, draw.choice((0, 0, 0, 2)), draw.choice(async_modes()))


def async_modes() -> list[str]:
    """The ways to save that there are."""
    from typing import get_args

    from titan_prores.components.checkpoint.dcp import DistributedCheckpoint

    return list(get_args(DistributedCheckpoint.Config.model_fields["async_mode"].annotation))


# --- Launches ---------------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a launch ended.

    Attributes:
        statuses: rank -> exit status, negative for a signal. A real torchrun has only its own, as rank -1.
        text: what all ranks printed.
        trouble: what no launch may do: go on without a peer, or leave processes behind.
    """

    statuses: dict[int, int]
    text: str
    seconds: float
    trouble: str = ""

    @property
    def said(self) -> str:
        """What a reader of its output looks for: the lines that name errors, or the last ones."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return " / ".join(([line for line in lines if "rror:" in line] or lines)[-4:])[-800:]

    @property
    def well(self) -> bool:
        return not self.trouble and all(status == 0 for status in self.statuses.values())


class Forked:
    """Ranks forked from a parent that has imported everything, and the part of torchrun that ends them together."""

    def __init__(self, arguments: Sequence[str], ranks: int, folder: Path) -> None:
        self.began, self.folder = time.monotonic(), folder
        self.processes = forked(arguments, [[folder / f"output-{rank}.txt"] * 2 for rank in range(ranks)])
        for process in self.processes:
            process.start()

    def alive(self) -> list[int]:
        """Ranks that are still running."""
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def signal(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def wait(self) -> Ended:
        """Wait for all of them. One that outlives a failed peer for too long is killed, and so is all at the end."""
        trouble = ""
        failed_at = None
        while alive := self.alive():
            now = time.monotonic()
            if failed_at is None and any(process.exitcode for process in self.processes):
                failed_at = now
            late = failed_at is not None and now - failed_at > PEERS_END_SECONDS
            if late and not (self.folder / "output-0.txt").stat().st_size:
                self.signal(alive, signal.SIGKILL)  # they still look for a peer that never came: torchrun ends them
                break
            if late or now - self.began > LAUNCH_SECONDS:
                why = "a peer was gone" if late else "it was started"
                seconds = PEERS_END_SECONDS if late else LAUNCH_SECONDS
                trouble = f"rank {', '.join(map(str, alive))} still ran {seconds:.0f} s after {why}"
                self.signal(alive, signal.SIGKILL)
                break
            time.sleep(0.02)
        for process in self.processes:
            process.join()
        seconds = time.monotonic() - self.began
        statuses = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        text = "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("output-*.txt")))
        return Ended(statuses, text, seconds, trouble or self._left_behind())

    def _left_behind(self) -> str:
        """Each rank leads a session of its own, in which its data loader's workers are."""
        sessions = {process.pid for process in self.processes}
        deadline = time.monotonic() + 30  # a worker looks every 5 s whether its parent is there
        while left := [process for process in psutil.process_iter() if _session(process) in sessions]:
            if time.monotonic() > deadline:
                return _kill_and_tell(left)
            time.sleep(0.05)
        return ""


def _kill_and_tell(left: Sequence[psutil.Process]) -> str:
    """End processes that should not be there; says what they were."""
    told = []
    for process in left:
        with suppress(psutil.Error):
            told.append(f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:60]}")
            process.kill()
    return f"{len(left)} processes left behind: {'; '.join(told)}"


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, psutil.Error):
        return None


class Real:
    """A launch as a user makes it: python scripts/train.py, or torchrun for several ranks.

    Args:
        arguments: of scripts/train.py.
        ranks: how many.
        folder: where its output goes.
        options: more options of torchrun, which then is used for one rank too.
        wrapper: what the command is started through.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int,
        folder: Path,
        options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ) -> None:
        self.began, self.n_ranks, self.folder = time.monotonic(), ranks, folder
        self.process = start(*arguments, ranks=ranks, torchrun_options=options, wrapper=wrapper)

    def _ranks(self) -> dict[int, int]:
        """Rank -> process id, of those that have come up. The lowest: workers are forks that come later."""
        found: dict[int, int] = {}
        for process in processes_of(self.process):
            with suppress(psutil.Error):
                if "train.py" in " ".join(process.cmdline()) and "torch.distributed.run" not in process.cmdline():
                    rank = int(process.environ().get("RANK", "0"))
                    found[rank] = min(found.get(rank, process.pid), process.pid)
        return found

    def alive(self) -> list[int]:
        return sorted(self._ranks()) if self.process.poll() is None else []

    def signal(self, ranks: Iterable[int], number: int) -> None:
        found = self._ranks()
        for rank in ranks:
            with suppress(ProcessLookupError):
                if rank in found:
                    os.kill(found[rank], number)

    def signal_launcher(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self) -> Ended:
        trouble = ""
        try:
            out, err = self.process.communicate(timeout=LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            trouble = f"still ran {LAUNCH_SECONDS} s after it was started"
            self._kill()
            out, err = self.process.communicate()
        seconds = time.monotonic() - self.began
        deadline = time.monotonic() + PEERS_END_SECONDS
        while (left := processes_of(self.process)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            trouble = trouble or _kill_and_tell(left)
        (self.folder / "output-0.txt").write_text(out + err)
        return Ended({-1: self.process.returncode}, out + err, seconds, trouble)

    def _kill(self) -> None:
        for process in processes_of(self.process):
            with suppress(psutil.Error):
                process.kill()


# --- What should be ---------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a course of a run is: rows by step, as they stand in metrics.jsonl."""

    layout: Layout
    first: int
    rows: dict[int, dict[str, Any]]
    validation: dict[int, float]
    samples: dict[int, list[str]]


def read_rows(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of metrics.jsonl in their order, and the lines that are none."""
    rows, broken = [], []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            broken.append(line)
            continue
        rows.append(row) if isinstance(row, dict) and "step" in row else broken.append(line)
    return rows, broken


def check_rows(found: Sequence[Mapping[str, Any]], expected: Mapping[int, Mapping[str, Any]], at_least: int) -> None:
    """Training rows are those of steps 1, 2, 3 ... up to `at_least` or later, each bitwise the expected one.

    Raises:
        Lost: the first that is not.
    """
    steps = [row["step"] for row in found]
    if steps != list(range(1, len(steps) + 1)):
        gap = next(number for number, step in enumerate(steps, 1) if number != step)
        raise Lost(f"metrics.jsonl has step {steps[gap - 1]} where step {gap} belongs")
    if len(steps) < at_least:
        raise Lost(f"metrics.jsonl ends at step {len(steps)}, and {at_least} were done")
    for row in found:
        wanted = expected.get(row["step"])
        if wanted is None:
            raise Lost(f"step {row['step']} is past the end")
        for key in COMPARED:
            if row.get(key) != wanted.get(key):
                raise Lost(f"step {row['step']}: {key} is {row.get(key)!r}, undisturbed {wanted.get(key)!r}")


def read_samples(folder: Path, restart: int = 0) -> dict[int, dict[int, list[str]]]:
    """What a launch consumed: step -> data rank -> samples. Ranks of one data rank must have had the same.

    Args:
        folder: of the launch.
        restart: which of its starts, where torchrun started it again.

    Raises:
        Lost: they had not.
    """
    found: dict[int, dict[int, list[str]]] = {}
    for file in sorted(folder.glob(f"samples-*-{restart}.jsonl")):
        mine: dict[tuple[int, int], list[str]] = {}
        for line in file.read_text().splitlines():
            row = json.loads(line)
            mine.setdefault((row["step"], row["part"]), []).extend(row["samples"])
        for (step, part), samples in mine.items():
            other = found.setdefault(step, {}).setdefault(part, samples)
            shorter = min(len(other), len(samples))
            if other[:shorter] != samples[:shorter]:
                raise Lost(f"step {step}: two ranks of data rank {part} had different samples")
            if len(samples) > shorter:
                found[step][part] = samples
    return found


def check_samples(
    found: Mapping[int, Mapping[int, Sequence[str]]], expected: Mapping[int, Sequence[str]], first: int, complete: bool
) -> None:
    """Each update's samples are the expected ones, of all data ranks together, in any order.

    Args:
        found: of one launch: step -> data rank -> samples.
        expected: step -> samples.
        first: the update that it had to begin with.
        complete: whether its last update was done; otherwise that one may have consumed fewer.

    Raises:
        Lost: an update consumed others.
    """
    steps = sorted(found)
    if steps and steps != list(range(first, steps[-1] + 1)):
        raise Lost(f"began with step {steps[0]}, not {first}, or left one out: {steps}")
    for step in steps:
        consumed = sorted(sample for samples in found[step].values() for sample in samples)
        wanted = sorted(expected.get(step, []))
        left = list(wanted)
        for sample in consumed:
            if sample not in left:
                raise Lost(f"step {step}: consumed a sample that is not of this step, or one twice")
            left.remove(sample)
        if left and (complete or step != steps[-1]):
            raise Lost(f"step {step}: consumed {len(consumed)} of {len(wanted)} samples")


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint's files are those of its manifest, found without the package's own code."""
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        return meta["step"] == int(checkpoint.name.removeprefix("step-")) and all(
            (content := (checkpoint / name).read_bytes()) is not None
            and len(content) == each["bytes"]
            and hashlib.sha256(content).hexdigest() == each["sha256"]
            for name, each in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --- Chains -----------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What became of a fault.

    Attributes:
        state: survived, lost, or missed: the launch had ended before it could happen.
        moment: what was hit, and when.
    """

    number: int
    kind: str
    chain: int
    launch: int
    layout: str
    mode: str
    moment: str = ""
    state: str = "open"
    problem: str = ""


class Campaign:
    """What the chains of one torture share: the text, and the undisturbed runs from step 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "corpus.txt"
        self.text.write_bytes(CORPUS.read_bytes()[:CORPUS_BYTES])
        self.references: dict[str, Expected] = {}
        self.seconds = {1: 3.0, 2: 5.0}  # of a launch, by ranks
        self.operations: dict[tuple[int, int], float] = {}  # (ranks, rank) -> operations on files a step

    def arguments(self, chain: Path, layout: Layout, *more: str) -> list[str]:
        files = f"--dataset.files=[{str(self.text)!r}]"
        plugin = f"--import={chain / 'torture_plugin.py'}"
        return debug(chain / "run", *SETTINGS, files, *layout.overrides, plugin, *more)

    def undisturbed(self, name: str, layout: Layout, checkpoint: Path | None = None) -> Expected:
        """A run that nobody disturbs, to the last step; from a copy of a checkpoint, or from step 0."""
        chain = self.folder / name
        chain.mkdir()
        write_plugin(chain)
        first = 0
        if checkpoint is not None:
            shutil.copytree(checkpoint, chain / "run" / "checkpoint" / checkpoint.name)
            first = int(checkpoint.name.removeprefix("step-"))
        more = ["--checkpoint.interval=1000000", "--validation.freq=1"]
        folder = describe_launch(chain, 0, None)
        ended = Forked(self.arguments(chain, layout, *more), layout.ranks, folder).wait()
        if not ended.well:
            raise RuntimeError(f"the undisturbed run {chain} ended with {ended.statuses} {ended.trouble}: {ended.text}")
        rows, _ = read_rows(chain / "run" / "metrics.jsonl")
        samples = {
            step: [sample for part in parts.values() for sample in part] for step, parts in read_samples(folder).items()
        }
        return Expected(
            layout,
            first,
            {row["step"]: row for row in rows if "loss" in row},
            {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row},
            samples,
        )

    def from_the_start(self, layout: Layout) -> Expected:
        if layout.name not in self.references:
            number = LAYOUTS.index(layout)
            self.references[layout.name] = self.undisturbed(f"undisturbed-{number}", layout)
        return self.references[layout.name]


class Chain:
    """One run folder, and what is known about it.

    Args:
        campaign: that it belongs to.
        planned: its story.
        own: more overrides for its launches, and not for the undisturbed ones: for the tests of this harness.
    """

    def __init__(self, campaign: Campaign, planned: ChainPlan, own: Sequence[str] = ()) -> None:
        self.campaign, self.planned, self.own = campaign, planned, tuple(own)
        self.folder = campaign.folder / f"chain-{planned.number:03d}"
        self.folder.mkdir()
        self.run = self.folder / "run"
        self.layout = planned.layout
        self.records: list[Record] = []
        self.launches = 0
        self.rows: dict[int, dict[str, Any]] = {}
        self.validation: dict[int, float] = {}
        self.origin: dict[int, Expected] = {}  # step of a checkpoint -> the course that wrote it
        self.samples: dict[int, list[str]] = {}
        write_plugin(self.folder)

    # What there is

    def checkpoints(self) -> list[Path]:
        """Folders called step-<k>, ascending, damaged ones too; not what only looks like one."""
        return sorted((self.run / "checkpoint").glob(f"step-{'[0-9]' * 8}"))

    def whole(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self.checkpoints() if is_whole(path)]

    def cache_shards(self) -> list[Path]:
        return sorted((self.folder / "cache").rglob("*.bin"))

    # The story

    def play(self, wanted: int = sys.maxsize) -> None:
        """Play all rounds and a last launch that is left in peace. What is lost ends it, and is in the records."""
        try:
            self.samples = self.campaign.from_the_start(LAYOUTS[0]).samples
            self.clean(self.planned.rounds[0], STEPS // (len(self.planned.rounds) + 2), "the first launch")
            for number, each in enumerate(self.planned.rounds, 2):
                if sum(record.state != "missed" for record in self.records) >= wanted:
                    break
                self.play_round(each, STEPS * number // (len(self.planned.rounds) + 2))
            self.clean(replace(self.planned.rounds[-1], mode="disabled"), STEPS, "the last launch")
            rows = [row for row in read_rows(self.run / "metrics.jsonl")[0] if "loss" in row]
            if len(rows) != STEPS:
                raise Lost(f"metrics.jsonl has {len(rows)} steps of {STEPS} at the end")
        except Lost as problem:
            for record in self.records:
                if record.state == "open":
                    record.state, record.problem = "lost", str(problem)
            if not any(record.state == "lost" for record in self.records):
                self.records.append(
                    Record(
                        -1, "none", self.planned.number, self.launches, self.layout.name, "", "", "lost", str(problem)
                    )
                )
            return
        self._settle()

    def _settle(self) -> None:
        for record in self.records:
            if record.state == "open":
                record.state = "survived"

    def play_round(self, each: Round, end: int) -> None:
        for fault in each.between:
            record = self._record(fault, each)
            KINDS[fault.kind].act(self, fault, record, each, end)
        if each.during is None:
            self.clean(each, end, "a launch that nothing disturbs")
        else:
            record = self._record(each.during, each)
            KINDS[each.during.kind].act(self, each.during, record, each, end)

    def _record(self, fault: Fault, each: Round) -> Record:
        record = Record(fault.number, fault.kind, self.planned.number, self.launches + 1, self.layout.name, each.mode)
        self.records.append(record)
        return record

    def clean(self, each: Round, end: int, what: str) -> None:
        """A launch to step `end` that has to go well."""
        ended, folder = self.launch(each, end)
        if not ended.well:
            raise Lost(f"{what} ended with {ended.statuses} {ended.trouble}: {ended.said}")
        ranks = self.layout.ranks
        self.campaign.seconds[ranks] = (self.campaign.seconds[ranks] + ended.seconds) / 2
        if steps := len(read_samples(folder)):
            for rank in range(ranks):
                log = folder / f"operations-{rank}-0.txt"
                count = len(log.read_text().splitlines()) if log.exists() else 0
                self.campaign.operations[ranks, rank] = count / steps

    def arguments(self, each: Round, end: int) -> list[str]:
        return self.campaign.arguments(
            self.folder,
            self.layout,
            f"--training.stop_after={end}",
            f"--checkpoint.async_mode={each.mode}",
            f"--dataset.num_workers={each.workers}",
            *self.own,
        )

    def launch(
        self,
        each: Round,
        end: int,
        harm: dict[str, Any] | None = None,
        *,
        outside: Callable[[Any], None] = lambda running: None,
        more: Sequence[str] = (),
        starter: Callable[..., Any] = Forked,
        not_finite: int | None = None,
        afterwards: Callable[[Ended], None] = lambda ended: None,
    ) -> tuple[Ended, Path]:
        """Start, let `outside` do something to it, wait for its end and check all that it left.

        Raises:
            Lost: that is not as it should be.
        """
        whole = self.whole()
        resume = whole[-1] if whole else 0
        course = self._course_from(resume)
        self.launches += 1
        folder = describe_launch(self.folder, self.launches, harm)
        running = starter([*self.arguments(each, end), *more], self.layout.ranks, folder)
        outside(running)
        ended = running.wait()
        afterwards(ended)
        (folder / "ended.json").write_text(json.dumps({"statuses": ended.statuses, "seconds": ended.seconds}))
        self._check(ended, folder, resume, course, each.mode, not_finite)
        return ended, folder

    def _course_from(self, step: int) -> Expected:
        """The undisturbed run that a launch from `step` in this layout has to be."""
        if step == 0:
            return self.campaign.from_the_start(self.layout)
        written_by = self.origin[step]
        if written_by.layout == self.layout:
            return written_by
        checkpoint = self.run / "checkpoint" / f"step-{step:08d}"
        name = f"{self.folder.name}-undisturbed-{self.launches + 1:03d}"
        course = self.campaign.undisturbed(name, self.layout, checkpoint)
        # The run that stays where it was went through this very checkpoint.
        for other in range(step + 1, min(step + CONTROL_STEPS, STEPS) + 1):
            gap = abs(course.rows[other]["loss"] - written_by.rows[other]["loss"])
            if not gap <= LAYOUT_TOLERANCE:
                raise Lost(
                    f"from {written_by.layout.name} to {self.layout.name} at step {step}: the loss of step {other} is "
                    f"{gap:.1e} away from the run that stays"
                )
        return course

    def _check(
        self, ended: Ended, folder: Path, resume: int, course: Expected, mode: str, not_finite: int | None
    ) -> None:
        """Everything about a launch that must hold whatever happened to it."""
        if ended.trouble:
            raise Lost(ended.trouble)
        said = _BEGINNING.search(ended.text)
        if said and int(said[1]) != resume:
            raise Lost(f"the newest whole checkpoint is of step {resume}, and it went on elsewhere: {said[0]}")
        ended_itself = all(status in (0, 75) for status in ended.statuses.values())
        starts = [samples for restart in range(1 + MAX_RESTARTS) if (samples := read_samples(folder, restart))]
        for number, samples in enumerate(starts):
            first = min(samples) if number else resume + 1  # torchrun's own restarts go on where they find it
            check_samples(samples, self.samples, first, complete=ended_itself and number == len(starts) - 1)
        trained = bool(starts)
        if trained:
            self.rows = {k: row for k, row in self.rows.items() if k <= resume}
            self.rows |= {k: row for k, row in course.rows.items() if k > resume}
            self.validation = {k: loss for k, loss in self.validation.items() if k <= resume}
            self.validation |= {k: loss for k, loss in course.validation.items() if k > resume}
        rows, broken = read_rows(self.run / "metrics.jsonl")
        if trained and (len(broken) > (not ended_itself)):
            raise Lost(f"metrics.jsonl holds what is no row: {broken[0][:80]!r}")
        training = [row for row in rows if "loss" in row]
        if (
            training
            and training[-1]["step"] == not_finite
            and "NaN" in (training[-1]["loss"], training[-1]["grad_norm"])
        ):
            training.pop()  # with tensor parallelism the loss that rank 0 writes may be its own, and finite
        if trained or not rows:
            check_rows(training, self.rows, resume if trained else 0)
            for row in rows:
                if "validation_loss" in row and row["validation_loss"] != self.validation.get(row["step"]):
                    raise Lost(
                        f"step {row['step']}: validation_loss {row['validation_loss']} is not the undisturbed one"
                    )
        done = training[-1]["step"] if trained and training else resume
        for path in self.checkpoints():
            step = int(path.name.removeprefix("step-"))
            if trained and step > resume:
                if not is_whole(path):
                    raise Lost(f"{path} was published and is not whole")
                self.origin[step] = course
        # A save is done, or on its way beside training, before the next step begins.
        due = (done - 1) // INTERVAL * INTERVAL - (INTERVAL if mode != "disabled" else 0)
        if done > resume and due > (newest := max([resume, *self.whole()])):
            raise Lost(f"step {done} was done, and the newest whole checkpoint is of step {newest}")
        if trained and done > resume:
            for record in self.records:  # what went before is survived once a step that is right came after it
                before = record.launch < self.launches or not KINDS[record.kind].during
                if record.state == "open" and before:
                    record.state = "survived"


# --- Kinds of faults --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        act: does it. Gets the chain, the fault, its record, the round and the step at which the round ends.
        weight: how often it comes, against the others.
        during: whether it makes the round's launch itself.
    """

    act: Callable[[Chain, Fault, Record, Round, int], None]
    summary: str
    weight: int
    during: bool


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: int, *, during: bool) -> Callable[[Callable], Callable]:
    def add(act: Callable) -> Callable:
        KINDS[name] = Kind(act, (act.__doc__ or "").strip().splitlines()[0], weight, during)
        return act

    return add


def _a_checkpoint(chain: Chain, fault: Fault, record: Record) -> Path | None:
    """A whole checkpoint that is not the only one, most often the newest."""
    whole = chain.whole()
    if len(whole) < 2:
        record.state, record.moment = "missed", "there were no two whole checkpoints"
        return None
    step = whole[-1] if fault.draws[0] < 0.7 else fault.pick(1, whole)
    return chain.run / "checkpoint" / f"step-{step:08d}"


def _a_file(chain: Chain, fault: Fault, record: Record) -> Path | None:
    if (checkpoint := _a_checkpoint(chain, fault, record)) is None:
        return None
    path = fault.pick(2, sorted(checkpoint.iterdir()))
    record.moment = f"{checkpoint.name}/{path.name}"
    return path


@kind("truncate", 2, during=False)
def truncate(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A file of a checkpoint loses its end."""
    if path := _a_file(chain, fault, record):
        size = path.stat().st_size
        os.truncate(path, int(fault.draws[3] * size))
        record.moment += f": {size:,} -> {path.stat().st_size:,} bytes"


@kind("flip", 2, during=False)
def flip(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """One bit in a file of a checkpoint is another."""
    if path := _a_file(chain, fault, record):
        content = bytearray(path.read_bytes())
        at, bit = int(fault.draws[3] * len(content)), int(fault.draws[4] * 8)
        content[at] ^= 1 << bit
        path.write_bytes(content)
        record.moment += f": bit {bit} of byte {at:,}"


@kind("delete", 2, during=False)
def delete(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A file of a checkpoint is gone: tensors, DCP's metadata, meta.json or the manifest."""
    if path := _a_file(chain, fault, record):
        path.unlink()


@kind("empty", 1, during=False)
def empty(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A file of a checkpoint is there and holds nothing."""
    if path := _a_file(chain, fault, record):
        os.truncate(path, 0)


@kind("swap", 1, during=False)
def swap(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A file of a checkpoint is that of another step."""
    path = _a_file(chain, fault, record)
    if path is None:
        return
    others = [other for other in chain.checkpoints() if other != path.parent and (other / path.name).is_file()]
    if not others:
        record.state, record.moment = "missed", f"no other checkpoint has a {path.name}"
        return
    other = fault.pick(3, others)
    shutil.copyfile(other / path.name, path)
    record.moment += f" is that of {other.name}"


@kind("misname", 1, during=False)
def misname(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A checkpoint's folder has another step's name."""
    if checkpoint := _a_checkpoint(chain, fault, record):
        other = checkpoint.with_name(f"step-{STEPS + 1 + int(fault.draws[2] * 1000):08d}")
        checkpoint.rename(other)
        record.moment = f"{checkpoint.name} -> {other.name}"


@kind("leftovers", 1, during=False)
def leftovers(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """What killed saves and removals leave, and names that only look like a checkpoint's."""
    folder, step = chain.run / "checkpoint", 1 + int(fault.draws[0] * STEPS)
    folder.mkdir(exist_ok=True)
    names = [f".unfinished-step-{step:08d}", f".unfinished-removal-{step}", "step-12", f"step-{step:08d}.tmp"]
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__0_0.distcp").write_bytes(b"half of a file")
    record.moment = ", ".join(names)


@kind("torn metrics", 1, during=False)
def torn_metrics(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """metrics.jsonl ends in what a writer leaves that is killed, or a disk that lost its power."""
    tail = fault.pick(0, [b'{"step": 7, "lo', b"\0" * 512, b"\xff\xfe\x80 garbage", b"garbage\n\0\0\0\ngarbage\n"])
    with (chain.run / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    record.moment = repr(tail[:24])


@kind("side files", 2, during=False)
def side_files(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A file of the run folder that holds no state is gone, empty or garbage."""
    name = fault.pick(0, ["status.json", "latest_checkpoint", "env.json", "recipe.toml", "train.log", "run.lock"])
    what = fault.pick(1, ["gone", "empty", "garbage"])
    path = chain.run / name
    if what == "gone":
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(b"" if what == "empty" else b"\xff\xfe\0 garbage")
    record.moment = f"{name} {what}"


@kind("no checkpoints", 1, during=False)
def no_checkpoints(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """The folder of checkpoints is gone: the run has to begin again."""
    record.moment = f"{len(chain.whole())} whole ones removed"
    shutil.rmtree(chain.run / "checkpoint", ignore_errors=True)


@kind("layout", 4, during=False)
def layout(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """The run goes on in another layout."""
    other = fault.pick(0, [other for other in LAYOUTS if other != chain.layout])
    record.moment = f"{chain.layout.name} -> {other.name}"
    chain.layout = other


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _refused(chain: Chain, each: Round, end: int, named: str) -> None:
    """A launch that has to end at once with status 2, name what is wrong and change no checkpoint."""
    before = _content(chain.run / "checkpoint")
    ended, folder = chain.launch(each, end)
    if set(ended.statuses.values()) != {2} or named not in ended.text:
        raise Lost(f"not refused by the name of {named}: {ended.statuses} {ended.said}")
    if read_samples(folder) or _content(chain.run / "checkpoint") != before:
        raise Lost("a launch that was refused trained, or changed the checkpoints")


@kind("all damaged", 1, during=True)
def all_damaged(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """No checkpoint is whole: refused, and nothing is deleted; then the files come back."""
    checkpoints = chain.checkpoints()
    if not checkpoints:
        record.state, record.moment = "missed", "there were no checkpoints"
        return
    kept = shutil.copytree(chain.run / "checkpoint", chain.folder / "kept")
    for path in checkpoints:
        doomed = fault.pick(0, sorted(path.iterdir()))
        doomed.write_bytes(doomed.read_bytes()[:-1] if fault.draws[1] < 0.5 else b"")
    record.moment = f"{len(checkpoints)} checkpoints"
    _refused(chain, each, end, "no checkpoint is whole")
    shutil.rmtree(chain.run / "checkpoint")
    kept.rename(chain.run / "checkpoint")


@kind("token shard", 2, during=True)
def token_shard(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A file of tokens is altered, cut or gone: refused by its name; then it comes back."""
    path = fault.pick(0, chain.cache_shards())
    what = fault.pick(1, ["altered", "cut", "gone"])
    content = path.read_bytes()
    altered = bytearray(content)
    altered[int(fault.draws[2] * len(content))] ^= 1
    path.unlink()
    if what != "gone":
        path.write_bytes(altered if what == "altered" else content[:-2])
    record.moment = f"{path.name} {what}"
    _refused(chain, each, end, path.name)
    path.write_bytes(content)


def _ended(ended: Ended, record: Record, allowed: Callable[[int], bool], what: str) -> None:
    if not all(allowed(status) for status in ended.statuses.values()):
        raise Lost(f"{record.kind} ({record.moment}): {what}, not {ended.statuses}: {ended.said}")


def _at_operation(chain: Chain, fault: Fault, end: int, **harm: Any) -> dict[str, Any]:
    """Harm to one rank, at one of about as many operations on files as the next launch of it has."""
    rank = fault.pick(0, range(chain.layout.ranks))
    steps = max(1, end - max(chain.whole(), default=0))
    count = steps * chain.campaign.operations.get((chain.layout.ranks, rank), 2 if rank else 10)
    return {"rank": rank, "operation": 1 + int(fault.draws[1] * count), **harm}


def _fired(folder: Path, record: Record, harm: Mapping[str, Any]) -> bool:
    """Whether the harm came to the rank; notes when it did, and that it was missed otherwise."""
    file = folder / f"fired-{harm['rank']}.txt"
    record.moment = f"rank {harm['rank']}: "
    record.moment += file.read_text().strip() if file.exists() else f"had ended before {harm}"
    if not file.exists():
        record.state = "missed"
    return file.exists()


def _harmed(
    chain: Chain,
    record: Record,
    each: Round,
    end: int,
    harm: dict[str, Any],
    allowed: Callable[[int], bool],
    what: str,
    **options: Any,
) -> Ended:
    """A launch that comes to harm inside; `allowed` are exit statuses then."""
    ended, folder = chain.launch(each, end, harm, **options)
    _ended(ended, record, allowed if _fired(folder, record, harm) else (lambda status: status == 0), what)
    return ended


@kind("kill at operation", 6, during=True)
def kill_at_operation(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A rank is killed between two operations on files of the run folder: most are those of saves."""
    harm = _at_operation(chain, fault, end, kind="kill")
    _harmed(chain, record, each, end, harm, lambda status: status in (-9, 0, 1), "ranks end when one is killed")


@kind("kill in operation", 4, during=True)
def kill_in_operation(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """The same a moment later, amid writing a file."""
    harm = _at_operation(chain, fault, end, kind="kill", delay_seconds=1e-5 + 3e-3 * fault.draws[2])
    _harmed(chain, record, each, end, harm, lambda status: status in (-14, 0, 1), "ranks end when one is killed")


def _later(chain: Chain, fault: Fault, record: Record, action: Callable[[Any], str]) -> Callable[[Any], None]:
    """At a random moment of the launch do something to it from outside, unless it has ended."""
    seconds = fault.draws[0] * chain.campaign.seconds[chain.layout.ranks]

    def act(running: Any) -> None:
        time.sleep(max(0.0, running.began + seconds - time.monotonic()))
        # Where it has ended there is nobody to signal, or it ends while it is looked at.
        with suppress(psutil.NoSuchProcess):
            if running.alive():
                record.moment = f"{action(running)} {seconds:.2f} s after the start"
                return
        record.state, record.moment = "missed", f"had ended before {seconds:.2f} s"

    return act


@kind("kill", 4, during=True)
def kill_at_a_moment(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """One rank, or all at once, killed at any moment."""
    ranks = list(range(chain.layout.ranks)) if fault.draws[1] < 0.5 else [fault.pick(2, range(chain.layout.ranks))]

    def kill(running: Any) -> str:
        running.signal(ranks, signal.SIGKILL)
        return f"rank {', '.join(map(str, ranks))} killed"

    ended, _ = chain.launch(each, end, outside=_later(chain, fault, record, kill))
    _ended(ended, record, lambda status: status in (-9, 0, 1), "ranks end when one is killed")


@kind("kill helper", 2, during=True)
def kill_helper(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A process that a rank has started is killed: one that reads its data ahead, or writes its checkpoints."""

    def kill(running: Any) -> str:
        rank = fault.pick(1, running.alive())
        helpers = psutil.Process(running.processes[rank].pid).children(recursive=True)
        if not helpers:
            record.state = "missed"
            return f"rank {rank} had no helper"
        helper = fault.pick(2, helpers)
        helper.kill()
        return f"one of {len(helpers)} helpers of rank {rank} killed"

    ended, _ = chain.launch(replace(each, workers=2), end, outside=_later(chain, fault, record, kill))
    _ended(ended, record, lambda status: status in (0, 1), "goes on without it, or all ranks end")


@kind("signal", 4, during=True)
def ask_to_stop(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """SIGTERM, SIGUSR1 or SIGINT, to all ranks or one: stops with everything saved, or before the first step."""
    number = fault.pick(1, [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    ranks = list(range(chain.layout.ranks)) if fault.draws[2] < 0.5 else [fault.pick(3, range(chain.layout.ranks))]

    def ask(running: Any) -> str:
        running.signal(ranks, number)
        return f"{number.name} to rank {', '.join(map(str, ranks))}"

    ended, folder = chain.launch(each, end, outside=_later(chain, fault, record, ask))
    # Before the handlers are there, a signal does what it always does; a rank that is left alone then fails.
    _ended(ended, record, lambda s: s in (0, 1, 75, 130, -number), "75 everywhere or an end before the first step")
    statuses = set(ended.statuses.values())
    newest = max(chain.whole(), default=0)
    done = max(read_samples(folder), default=newest)
    if 75 in statuses:
        state = json.loads((chain.run / "status.json").read_text())
        trained = bool(read_samples(folder))
        if not trained and "starting at step" not in ended.text and "resuming at step" not in ended.text:
            return  # this launch did not get as far as the run's folder
        # A peer that was signalled before it had a step to finish may be gone with the store; then torchrun ends all.
        well = statuses == {75} or (not trained and statuses == {75, 1})
        if not well or state["state"] != "stopped" or not state["step"] == done == newest:
            raise Lost(f"stopped by {number.name} with {ended.statuses}, step {done}, but {state}")


@kind("two signals", 1, during=True)
def two_signals(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """SIGTERM to all ranks, and again while they save: ends at once."""

    def ask(running: Any) -> str:
        everyone = running.alive()
        running.signal(everyone, signal.SIGTERM)
        time.sleep(1.05)
        running.signal(running.alive(), signal.SIGTERM)
        return "SIGTERM twice, 1.05 s apart,"

    ended, _ = chain.launch(each, end, outside=_later(chain, fault, record, ask))
    allowed = (0, 1, 75, 130, 128 + signal.SIGTERM, -signal.SIGTERM)
    _ended(ended, record, lambda status: status in allowed, "ends when it is asked twice")


@kind("disk full", 3, during=True)
def disk_full(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """From some operation on nothing can be written: ends and says why."""
    _disk_fails(chain, fault, record, each, end, "ENOSPC", 10**9)


@kind("disk error", 2, during=True)
def disk_error(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A single operation fails: the run ends and says why, or does without it."""
    _disk_fails(chain, fault, record, each, end, "EIO", 1)


def _disk_fails(chain: Chain, fault: Fault, record: Record, each: Round, end: int, code: str, times: int) -> None:
    harm = _at_operation(chain, fault, end, kind="refuse", errno=code, times=times)
    ended = _harmed(chain, record, each, end, harm, lambda status: status in (0, 1, 2), "an error that is told")
    reason = os.strerror(getattr(errno, code))
    if any(ended.statuses.values()) and reason not in ended.text:
        raise Lost(f"{record.kind} ({record.moment}): ended without saying {reason!r}: {ended.said}")


def _a_step(chain: Chain, fault: Fault, draw: int, end: int, first: int = 1) -> int:
    """A step that the next launch does, its `first` one or later; past the end where there is none."""
    begin = max(chain.whole(), default=0) + first
    return fault.pick(draw, range(begin, end + 1) or [end + 1])


@kind("not finite", 2, during=True)
def not_finite(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """One rank's loss is not a number: all ranks stop before the update."""
    step = _a_step(chain, fault, 1, end)
    harm = {"rank": fault.pick(0, range(chain.layout.ranks)), "kind": "not_finite", "step": step}
    ended = _harmed(
        chain,
        record,
        each,
        end,
        harm,
        lambda status: status == 1,
        "all ranks stop",
        more=["--training.on_nonfinite=stop"],
        not_finite=step,
    )
    if record.state != "missed" and not re.search(rf"step {step}: .*\bnan\b", ended.text):
        raise Lost(f"stopped without saying that step {step} was not finite: {ended.said}")


@kind("pause", 2, during=True)
def pause(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A rank stands still for a moment: the run waits and goes on."""
    rank, seconds = fault.pick(1, range(chain.layout.ranks)), 0.5 + 1.5 * fault.draws[2]

    def halt(running: Any) -> str:
        running.signal([rank], signal.SIGSTOP)
        time.sleep(seconds)
        running.signal([rank], signal.SIGCONT)
        return f"rank {rank} stood still for {seconds:.1f} s,"

    ended, _ = chain.launch(each, end, outside=_later(chain, fault, record, halt))
    _ended(ended, record, lambda status: status == 0, "goes on")


@kind("late rank", 1, during=True)
def late_rank(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """A rank stands still for longer than the timeout: the others name it and end."""
    rank, step = fault.pick(0, range(chain.layout.ranks)), _a_step(chain, fault, 1, end, first=2)
    if chain.layout.ranks == 1:
        record.state, record.moment = "missed", "nobody waits for a single rank"
        return
    harm = {"rank": rank, "kind": "sleep", "step": step, "seconds": STALL_SECONDS + MARGIN_SECONDS + 5}
    ended = _harmed(
        chain,
        record,
        each,
        end,
        harm,
        lambda status: status == 1,
        "all ranks end",
        more=[f"--comm.train_timeout_seconds={STALL_SECONDS}"],
    )
    if record.state != "missed" and f"late: rank {rank}" not in ended.text:
        raise Lost(f"rank {rank} was late and nobody said so: {ended.said}")


@kind("torchrun restarts", 1, during=True)
def torchrun_restarts(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """torchrun --max-restarts: a rank is killed between two operations, and the run goes on by itself to its end."""
    harm = _at_operation(chain, fault, end, kind="kill")
    starter = functools.partial(Real, options=[f"--max-restarts={MAX_RESTARTS}"])
    _harmed(chain, record, each, end, harm, lambda status: status == 0, "torchrun goes on", starter=starter)
    rows = [row for row in read_rows(chain.run / "metrics.jsonl")[0] if "loss" in row]
    if len(rows) < end:
        raise Lost(f"torchrun ended with status 0 at step {len(rows)} of {end}")


@kind("kill real", 2, during=True)
def kill_real(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """scripts/train.py or torchrun as a user starts them: a rank, or the launcher itself, killed at any moment."""
    rank = fault.pick(1, [*range(chain.layout.ranks), None])

    def kill(running: Any) -> str:
        running.signal_launcher(signal.SIGKILL) if rank is None else running.signal([rank], signal.SIGKILL)
        return f"{'the launcher' if rank is None else f'rank {rank}'} killed"

    slower = replace(fault, draws=(REAL_START_SECONDS / 4 + fault.draws[0] * 2, *fault.draws[1:]))
    ended, _ = chain.launch(each, end, outside=_later(chain, slower, record, kill), starter=Real)
    _ended(ended, record, lambda status: status in (-9, 0, 1), "ends when it is killed")


_SMALL_DISK = """
mount -t tmpfs -o size="$1" none "$2" && cp -a "$3/." "$2/" || exit 99
shift 3
"$@"
status=$?
rm -rf "$KEPT"/* "$KEPT"/.unfinished-* && cp -a "$MOUNTED/." "$KEPT/" || exit 98
exit $status
"""


@kind("small disk", 1, during=True)
def small_disk(chain: Chain, fault: Fault, record: Record, each: Round, end: int) -> None:
    """Checkpoints lie on a file system that is too small for one more: the run ends, says why, and loses none."""
    mounted, kept = chain.run / "checkpoint", chain.folder / "on-small-disk"
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode or not chain.whole():
        record.state, record.moment = "missed", "no file system can be mounted here, or there is no checkpoint"
        return
    shutil.copytree(mounted, kept)
    used = sum(path.stat().st_size for path in mounted.rglob("*") if path.is_file())
    one = sum(path.stat().st_size for path in chain.checkpoints()[-1].iterdir())
    size = used + int(one * (0.1 + 0.8 * fault.draws[0])) + 65536
    script = f"MOUNTED={shlex.quote(str(mounted))} KEPT={shlex.quote(str(kept))}\n{_SMALL_DISK}"
    wrapper = ["unshare", "-rm", "sh", "-c", script, "sh", str(size), str(mounted), str(kept)]
    record.moment = f"{size:,} bytes, {used:,} of them used"

    def put_back(ended: Ended) -> None:
        shutil.rmtree(mounted)
        kept.rename(mounted)

    ended, _ = chain.launch(each, end, starter=functools.partial(Real, wrapper=wrapper), afterwards=put_back)
    _ended(ended, record, lambda status: status in (0, 1), "ends with its own status")
    if ended.statuses[-1] and "No space left" not in ended.text:
        raise Lost(f"ended without saying that the disk is full: {ended.said}")
    if not ended.statuses[-1]:
        record.state = "missed"


# --- The report -------------------------------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what became of the faults, by kind."""
    rows = []
    for name, each in KINDS.items():
        mine = [record.state for record in records if record.kind == name]
        if mine:
            rows.append([name, *(str(mine.count(state)) for state in ("survived", "lost", "missed")), each.summary])
    states = [record.state for record in records]
    rows.append(["all", *(str(states.count(state)) for state in ("survived", "lost", "missed")), ""])
    return ["fault", "survived", "lost", "missed", "what it is"], rows


def write_report(file: Path, seed: int, records: Sequence[Record], seconds: float) -> None:
    """All about a torture, as .json or as a Markdown table."""
    if file.suffix == ".json":
        facts = {"seed": seed, "seconds": round(seconds, 1), "faults": [asdict(record) for record in records]}
        file.write_text(json.dumps(facts, indent=1) + "\n")
        return
    file.write_text(f"Seed {seed}, {seconds / 60:.0f} minutes.\n\n{markdown(*table(records))}")


def torture(
    folder: Path,
    faults: int,
    seed: int,
    only: Sequence[str] = (),
    chain: int | None = None,
    say: Callable[[str], None] = print,
    records: list[Record] | None = None,
) -> list[Record]:
    """Play chains until so many faults have happened; one chain alone where its number is given.

    `records` gets those of each chain that has ended, for whoever may not see the end.
    """
    campaign, records = Campaign(folder), [] if records is None else records
    for planned in plan(seed, only):
        if chain is not None and planned.number != chain:
            if planned.number > chain:
                break
            continue
        played = Chain(campaign, planned)
        began = time.monotonic()
        played.play(sys.maxsize if chain is not None else faults - happened(records))
        records += played.records
        lost = [record for record in played.records if record.state == "lost"]
        say(
            f"chain {planned.number}: {happened(played.records)} faults in {played.launches} launches, "
            f"{time.monotonic() - began:.0f} s, {len(lost)} lost; {happened(records)} of {faults}"
        )
        for record in lost:
            say(f"  LOST {describe(record)}")
        if not lost:
            for path in folder.glob(f"{played.folder.name}*"):
                shutil.rmtree(path)
        if happened(records) >= faults:
            break
    return records


def happened(records: Iterable[Record]) -> int:
    return sum(record.state != "missed" for record in records)


def describe(record: Record) -> str:
    return (
        f"fault {record.number} ({record.kind}: {record.moment}) in chain {record.chain} at launch {record.launch}, "
        f"{record.layout}, async_mode {record.mode or 'disabled'}: {record.problem}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0 when every fault was survived, 1 when something was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.torture",
        description=(
            "Kill, damage and disturb small runs, start them again, and hold all that they do against undisturbed ones."
        ),
        epilog="Exit status: 0 every fault was survived, 1 something was lost, 2 the command is wrong. Linux only.",
    )
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="how many; those that miss do not count")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="settles which faults come, and in what order")
    parser.add_argument("--only", action="append", choices=list(KINDS), metavar="KIND", help="these kinds; see --list")
    parser.add_argument("--chain", type=int, metavar="C", help="this chain of the seed's plan alone")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder to work in; what is lost stays")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write every fault as .json, or the table as .md")
    parser.add_argument("--list", action="store_true", help="the kinds of faults")
    options = parser.parse_args(arguments)
    if options.list:
        show(
            "kinds of faults",
            ["kind", "weight", "what it is"],
            [[n, str(k.weight), k.summary] for n, k in KINDS.items()],
        )
        return 0
    if options.report and options.report.suffix not in (".json", ".md"):
        parser.error("--report ends in .json or .md")
    if options.faults < 1:
        parser.error("--faults is at least 1")
    if options.chain is not None and options.chain < 0:
        parser.error("--chain is at least 0")
    if options.report and not options.report.absolute().parent.is_dir():
        parser.error(f"--report {options.report}: there is no such folder")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"--keep {folder} is not empty")
    except OSError as error:
        parser.error(f"--keep {folder}: {error.strerror}")
    began, records, status = time.monotonic(), [], 0
    try:
        torture(folder.resolve(), options.faults, options.seed, options.only or (), options.chain, records=records)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        print("interrupted: chains that had ended")
    seconds = time.monotonic() - began
    lost = [record for record in records if record.state == "lost"]
    show(f"seed {options.seed}: {happened(records)} faults in {seconds / 60:.1f} minutes", *table(records))
    if options.report:
        write_report(options.report, options.seed, records, seconds)
    for record in lost:
        print(f"LOST {describe(record)}\n  {folder}; again: --seed {options.seed} --chain {record.chain}")
    if not lost and options.keep is None:
        shutil.rmtree(folder)
    return status or int(bool(lost))


if __name__ == "__main__":
    sys.exit(run_command(main))
