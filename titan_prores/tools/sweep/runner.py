"""Runs what is left of a sweep, some runs side by side, and keeps what became of them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from titan_prores.build import build_components
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError, ConfigErrors, duration
from titan_prores.config.layout import plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve
from titan_prores.distributed.signals import EXIT_STATUS, signals
from titan_prores.output.run_folder import RunFolder
from titan_prores.output.shell import cores, environment_of_children
from titan_prores.tools.plots import packed
from titan_prores.tools.sweep import results
from titan_prores.tools.sweep.plan import SEED, Run, Sweep
from titan_prores.tools.sweep.results import Result

POLL_SECONDS = 0.3
CONSOLE = "console.log"  # in the run folder: what a run prints


class Book:
    """What is known of each run of a sweep.

    Args:
        sweep: the sweep.
        retry_failed: a run that failed counts as unfinished, until it has been started again.
    """

    def __init__(self, sweep: Sweep, *, retry_failed: bool = False) -> None:
        self.sweep = sweep
        self.retry_failed = retry_failed
        self.started: set[str] = set()
        self._recipes: dict[str, Recipe] = {}
        self._packed = packed.read(sweep.results)
        self._ended: dict[str, Result] = {}
        self._from_file: set[str] = set()  # those of _ended that the run's folder does not tell

    def recipe(self, run: Run) -> Recipe:
        """The run's resolved recipe.

        Raises:
            ConfigErrors: there is a fault in it.
        """
        if run.name not in self._recipes:
            tree = sources.load(self.sweep.recipe_of(run), self.sweep.overrides(run), registry.DEFAULTS)
            self._recipes[run.name] = resolve(tree, self.sweep.file.ranks)
        return self._recipes[run.name]

    def result(self, run: Run) -> Result:
        """What became of the run: as its folder tells, and where it has not ended there, as the file of results tells.

        Raises:
            ConfigError: what is there is of a run with other settings.
        """
        if run.name in self._ended:
            return self._ended[run.name]
        if run.waits:
            return Result(run.name, {axis: str(value) for axis, value in run.values.items()})
        folder = self.folder(run)
        result = results.read(folder)
        if result is not None:
            self._same(folder / results.FILE, result, run)
        if result is None or not result.ended:
            result = self.look(run)
        if not result.ended and run.name in self._packed:
            result = Result.of(self._packed[run.name], self.sweep.results)
            self._same(self.sweep.results, result, run)
            self._from_file.add(run.name)
        self._as_asked_now(run, result)
        if result.state == "failed" and self.retry_failed and run.name not in self.started:
            result.state = "unfinished"
        if result.ended:
            self._ended[run.name] = result
        return result

    def _as_asked_now(self, run: Run, result: Result) -> None:
        """Judge a kept result as the sweep does now; a metric that is new comes from the run folder."""
        file = self.sweep.file
        if result.state == "finished" and file.metric not in result.final:
            result.final |= self.look(run).final
            if file.metric not in result.final:
                raise ConfigError(
                    "metric",
                    f"is neither in the result of {run.name} nor in its run folder",
                    value=file.metric,
                    allowed=list(result.final),
                )
        results.judge(result, file.metric, file.diverged_above)

    def _same(self, file: Path, result: Result, run: Run) -> None:
        if changes := results.changed(result.recipe, self.recipe(run)):
            raise ConfigError(
                "",
                f"has {run.name} with other settings: {'; '.join(changes[:3])}",
                value=str(file),
                allowed="move it away, or give the sweep another folder and another file of results",
            )

    def look(self, run: Run) -> Result:
        """What the run's folder tells now."""
        file = self.sweep.file
        return results.look(run.name, run.values, self.folder(run), self.recipe(run), file.metric, file.diverged_above)

    def metric(self, run: Run) -> float | None:
        return self.result(run).metric(self.sweep.file.metric)

    def folder(self, run: Run) -> Path:
        return self.sweep.folder / run.name

    def begin(self, run: Run) -> None:
        """Leave in the run's folder what is started there."""
        recipe = self.recipe(run)
        settings = {"steps": recipe.training.steps, "recipe": results.relevant(recipe)}
        Result(run.name, dict(run.values), "unfinished", **settings).write(self.folder(run))
        self.started.add(run.name)

    def keep(self, run: Run, result: Result) -> None:
        """Leave in the run's folder what became of it."""
        result.write(self.folder(run))
        self._ended[run.name] = result
        self._from_file.discard(run.name)

    def pack(self) -> None:
        """Write the file of results: every run that has ended, what it has measured on the way, and what the file had.

        Runs in it that the sweep no longer has stay there.
        """
        lines = {}
        for run in self.runs():
            if not (result := self.result(run)).ended:
                continue
            if run.name in self._from_file:
                series = self._packed[run.name]["series"]
            else:
                series = results.series(self.folder(run), self.sweep.file.keep)
                if results.read(self.folder(run)) is None:  # as of a run that was started by hand
                    self.keep(run, result)
            lines[run.name] = {**result.to_dict(), "series": series}
        lines |= {name: line for name, line in self._packed.items() if name not in lines}
        if lines != self._packed:
            packed.write(self.sweep.results, lines)
            self._packed = lines

    def runs(self) -> list[Run]:
        """All runs, with the values that results decide filled in where they are known."""
        return self.sweep.runs(self.metric)

    def check(self, runs: Iterable[Run], *, data: bool) -> None:
        """Resolve the runs, those that wait without the values that they wait for, and build the parts of those left.

        Args:
            runs: some of the sweep's.
            data: whether this machine has to have the runs' data and tokenizers.

        Raises:
            ConfigErrors: the faults of the first run that has any.
        """
        built = set()
        for run in runs:
            recipe = self.recipe(run)
            kind = tuple((axis, str(value)) for axis, value in run.values.items() if axis != SEED)
            if kind not in built and not self.result(run).ended:
                build_components(recipe, plan_mesh(recipe.parallelism, self.sweep.file.ranks), None if data else [])
                built.add(kind)


def command(sweep: Sweep, run: Run) -> list[str]:
    """What starts a run."""
    launcher = ["launch", "--nproc", str(sweep.file.ranks)] if sweep.file.ranks > 1 else []
    return [
        sys.executable,
        "-m",
        "titan_prores",
        *launcher,
        "--config",
        str(sweep.recipe_of(run)),
        *sweep.overrides(run),
    ]


@dataclass
class _Child:
    run: Run
    process: subprocess.Popen
    before: int | None  # time stamp of status.json, to tell whether this process has written it
    console: int  # length of console.log before it, of earlier attempts
    signals: int = 0  # how many have been passed on
    started: float = field(default_factory=time.monotonic)


class Runner:
    """Runs a sweep's runs in their order, each as a process of its own.

    Args:
        book: what is known of them.
        jobs: how many at a time.
        say: takes a line about what happens.
        after_each: called whenever a result has been kept.
    """

    def __init__(
        self,
        book: Book,
        jobs: int = 1,
        say: Callable[[str], None] = print,
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.book, self.sweep, self.jobs = book, book.sweep, jobs
        self.say, self.after_each = say, after_each
        self.stopped: str | None = None
        self._signals_received = 0
        self._children: list[_Child] = []
        self._elsewhere: set[str] = set()  # runs that another process is at

    def run(self, wanted: Callable[[Run], bool] = lambda run: True) -> int:
        """Run what has not ended yet.

        Args:
            wanted: which runs.

        Returns:
            The exit status: 0 all runs have ended, 1 one of them failed or cannot be started, 75 a signal stopped the
            sweep and every run in it with everything saved.

        Raises:
            ConfigError: a run was refused.
        """
        with self._signals():
            try:
                while self._step(wanted):
                    time.sleep(POLL_SECONDS)
            finally:
                self._end_all()
        if self.stopped:
            self.say(f"stopped by {self.stopped}, everything saved: the same command goes on")
            return EXIT_STATUS
        left = [run for run in self.book.runs() if wanted(run)]
        for run in left:
            if run.waits:
                self.say(f"{self.sweep.title(run)}: cannot run, none of what it waits for ended well")
        return int(any(run.waits or self.book.result(run).state == "failed" for run in left))

    def _step(self, wanted: Callable[[Run], bool]) -> bool:
        """Take in what has ended, pass signals on, start what there is room for; False when nothing is left."""
        for child in [child for child in self._children if child.process.poll() is not None]:
            self._children.remove(child)
            self._take(child)
        for child in self._children:
            if child.signals < self._signals_received:
                child.signals = self._signals_received
                child.process.send_signal(signal.SIGTERM)
        if self.stopped:
            return bool(self._children)
        for run in self.book.runs() if self._elsewhere else ():
            if run.name in self._elsewhere and (result := self.book.result(run)).ended:
                self._elsewhere.remove(run.name)
                self._keep(run, result, "has ended there")
        if len(self._children) < self.jobs:
            running = {child.run.name for child in self._children}
            for run in self.book.runs():
                if (
                    not run.waits
                    and run.name not in running
                    and wanted(run)
                    and not self.book.result(run).ended
                    and not self._is_elsewhere(run)
                ):
                    self._start(run)
                    return True
        return bool(self._children or self._elsewhere)

    def _is_elsewhere(self, run: Run) -> bool:
        """Whether another sweep, or a run that outlived a killed one, is at it; then it is waited for."""
        if not RunFolder(self.book.folder(run), is_main=False).held:
            self._elsewhere.discard(run.name)
            return False
        if run.name not in self._elsewhere:
            self._elsewhere.add(run.name)
            self.say(f"{self.sweep.title(run)}: another process is at it; waiting for that")
        return True

    def _start(self, run: Run) -> None:
        folder = self.book.folder(run)
        self.book.begin(run)
        runs = self.book.runs()
        number = [other.name for other in runs].index(run.name) + 1
        self.say(f"[{number}/{len(runs)}] {self.sweep.title(run)}: {'goes on' if _stamp(folder) else 'starts'}")
        before = _stamp(folder)
        environment = environment_of_children()
        environment.setdefault("OMP_NUM_THREADS", str(max(cores() // (self.jobs * self.sweep.file.ranks), 1)))
        with (folder / CONSOLE).open("ab") as console:
            length = console.tell()
            # A session of its own: Ctrl-C reaches the sweep alone, which passes it on once.
            process = subprocess.Popen(
                command(self.sweep, run),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                start_new_session=True,
            )
        self._children.append(_Child(run, process, before, length))

    def _take(self, child: _Child) -> None:
        """Keep what became of a run whose process has ended."""
        run, status = child.run, child.process.returncode
        folder = self.book.folder(run)
        result = self.book.look(run)
        told = _stamp(folder) != child.before
        if result.state == "unfinished" and told and _state(folder) == "stopped":
            self.stopped = self.stopped or f"a signal to {self.sweep.title(run)}"
            return
        if status == EXIT_STATUS or (self.stopped and status):
            self.stopped = self.stopped or f"a signal to {self.sweep.title(run)}"
            return
        if status == 2 and self._is_elsewhere(run):
            return  # which came between our look and its start
        if status == 2:
            raise ConfigError("", f"the run was refused:\n{_tail(folder / CONSOLE, child.console)}", value=run.name)
        if not result.ended or not told:
            result.state, result.error = "failed", f"ended with status {status}; see {folder / CONSOLE}"
        self._keep(run, result, f"{result.state} after {duration(time.monotonic() - child.started)}")

    def _keep(self, run: Run, result: Result, how: str) -> None:
        self.book.keep(run, result)
        metric = self.sweep.file.metric
        shown = f"{metric} {result.final[metric]:.4f}" if result.state == "finished" else result.error
        self.say(f"{self.sweep.title(run)}: {how}, {shown}")
        self.after_each()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take note of signals; the runs get them with the next step, save and end, at once with a second one."""

        def receive(number: int, frame: object) -> None:
            self.stopped = signal.Signals(number).name
            self._signals_received += 1

        before = {number: signal.signal(number, receive) for number in signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Leave no process behind, whatever went wrong here."""
        for child in self._children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        for child in self._children:
            child.process.wait()


def slurm_script(book: Book, runs: Iterable[Run], waiting: int, again: list[str]) -> str:
    """A Slurm array with a task for each run.

    Args:
        book: what is known of the sweep's runs.
        runs: those that can start now.
        waiting: how many runs wait for them.
        again: the command line of this script for the same sweep.
    """
    sweep, runs = book.sweep, list(runs)
    names = [run.name for run in runs]
    if not names:
        raise ConfigErrors([ConfigError("--slurm", "no run is left that could start now")])
    on_cpus = all(book.recipe(run).job.device == "cpu" for run in runs)
    gpus = "" if on_cpus else f"#SBATCH --gpus-per-node={sweep.file.ranks}\n"
    later = f"# {waiting} more runs wait for the results of these: print the script again then.\n" if waiting else ""
    listed = "\n".join(f"    {shlex.quote(name)}" for name in names)
    return (
        "#!/usr/bin/env bash\n"
        f"{later}"
        f"#SBATCH --job-name={shlex.quote(sweep.folder.name)}\n"
        f"#SBATCH --array=0-{len(names) - 1}\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH --ntasks=1\n"
        f"{gpus}"
        f"#SBATCH --cpus-per-task={8 * sweep.file.ranks}\n"
        "#SBATCH --output=slurm-%A-%a.out\n"
        "# A task that is preempted is queued again, and its run goes on from its newest checkpoint.\n"
        "#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        f"names=(\n{listed}\n)\n"
        f'exec srun {shlex.join(again)} --only "${{names[$SLURM_ARRAY_TASK_ID]}}"\n'
    )


def _stamp(folder: Path) -> int | None:
    try:
        return (folder / "status.json").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _state(folder: Path) -> str | None:
    try:
        return json.loads((folder / "status.json").read_text(encoding="utf-8")).get("state")
    except (FileNotFoundError, ValueError):
        return None


def _tail(file: Path, start: int, lines: int = 20) -> str:
    """The errors among the last lines after the byte `start`, else the last lines."""
    last = file.read_bytes()[start:].decode(errors="replace").splitlines()[-lines:]
    return "\n".join([line for line in last if line.startswith("error: ")] or last)
