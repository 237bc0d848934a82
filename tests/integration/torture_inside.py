"""What runs inside the ranks of a launch that torture.py disturbs: it records, and does harm when told to.

A launch's `--import` names the file that `write_plugin` leaves in the folder of a chain; `launch.json` beside it says
which launch it is and which rank comes to which harm. The engine is wrapped from outside and knows nothing of this.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESTART = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
# What these audit events tell of is about to change the file system.
_CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


def write_plugin(chain: Path) -> Path:
    """The file to name as `--import`: the same for all launches of a chain, whose recipes then do not differ."""
    path = chain / "torture_plugin.py"
    path.write_text(
        f"import sys\n\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        f"from tests.integration.torture_inside import install\n\ninstall({str(chain)!r})\n"
    )
    return path


def describe_launch(chain: Path, number: int, harm: dict[str, Any] | None) -> Path:
    """Say what the next launch is; returns the folder that its ranks write into.

    Args:
        chain: folder of the chain.
        number: of the launch.
        harm: None, or {"rank": of the victim, "kind": a key of _HARM, ...} with what that kind needs.
    """
    folder = chain / "launches" / f"{number:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    (chain / "launch.json").write_text(json.dumps({"folder": str(folder), "run": str(chain / "run"), "harm": harm}))
    return folder


def install(chain: str) -> None:
    """Wrap the trainer of this process, and arrange for the harm it is to come to."""
    told = json.loads((Path(chain) / "launch.json").read_text())
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(told["folder"])
    _record_samples(folder / f"samples-{rank}-{RESTART}.jsonl")
    operations = Operations(Path(told["run"]), folder / f"operations-{rank}-{RESTART}.txt")
    operations.watch()
    harm = told["harm"]
    if harm and harm["rank"] == rank and RESTART == 0:  # a run that torchrun has started again is left in peace
        _HARM[harm["kind"]](harm, operations, folder / f"fired-{rank}.txt")


def _line(path: Path, text: str) -> None:
    """Append one line by one write: it is there or not, wherever the process ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def _record_samples(path: Path) -> None:
    """Write down what each update consumes: a row a microbatch, with the hash of each sample's tokens."""
    from titan_prores import trainer

    loader, train_step = trainer.microbatches, trainer.Trainer.train_step
    now = {"step": 0}

    def recorded(windows: Any, **position: Any) -> Iterator[Any]:
        batches = loader(windows, **position)
        try:
            for batch in batches:
                samples = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch.tokens_BS]
                _line(path, json.dumps({"step": now["step"], "part": position["data_rank"], "samples": samples}))
                yield batch
        finally:
            batches.close()

    def numbered(self: trainer.Trainer) -> None:
        now["step"] = self.step + 1
        train_step(self)

    trainer.microbatches, trainer.Trainer.train_step = recorded, numbered


class Operations:
    """Counts what this process does to the run folder, from 1, and tells whoever wants to know before it is done.

    Attributes:
        before: called with the number of the operation and its text; may raise OSError in its place.
    """

    def __init__(self, run: Path, log: Path) -> None:
        self.run, self.log = str(run.resolve()), log
        self.count = 0
        self.before: Callable[[int, str], None] = lambda number, text: None
        self._pid, self._lock = os.getpid(), threading.RLock()

    def watch(self) -> None:
        sys.addaudithook(self._audit)
        fsync = os.fsync

        def watched_fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            self._meet("fsync", os.readlink(f"/proc/self/fd/{number}"))
            fsync(descriptor)

        os.fsync = watched_fsync

    def _audit(self, event: str, arguments: tuple) -> None:
        if event not in _CHANGES or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        relative_to = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}.get(event)
        path = os.fsdecode(arguments[0])
        if relative_to is not None and arguments[relative_to] not in (-1, None):
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[relative_to]}"), path)
        self._meet(event.removeprefix("os."), path)

    def _meet(self, what: str, path: str) -> None:
        path = os.path.abspath(path)
        if not path.startswith(self.run + os.sep) or os.getpid() != self._pid:  # a data loader's worker is a fork
            return
        with self._lock:
            self.count += 1
            text = f"{what} {os.path.relpath(path, self.run)}"
            _line(self.log, text)
            self.before(self.count, text)


# --- Harm -------------------------------------------------------------------------------------------------------------


def _kill(harm: dict, operations: Operations, fired: Path) -> None:
    """Before operation number `operation`, or `delay_seconds` after it was begun."""

    def before(number: int, text: str) -> None:
        if number != harm["operation"]:
            return
        if delay := harm.get("delay_seconds"):
            _line(fired, f"{delay * 1e3:.2f} ms into {text} (operation {number})")
            # A timer of the kernel, at whose signal a process ends as at SIGKILL: it needs nothing of Python.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, delay)
            return
        _line(fired, f"before {text} (operation {number})")
        os.kill(os.getpid(), signal.SIGKILL)

    operations.before = before


def _refuse(harm: dict, operations: Operations, fired: Path) -> None:
    """From operation number `operation` on, `times` operations fail; what only makes room still works."""
    code = getattr(errno, harm["errno"])
    left = [harm["times"]]

    def before(number: int, text: str) -> None:
        if number < harm["operation"] or not left[0] or text.startswith(("remove", "rmdir")):
            return
        if left[0] == harm["times"]:
            _line(fired, f"{harm['errno']} at {text} (operation {number}), {harm['times']} times")
        left[0] -= 1
        raise OSError(code, os.strerror(code))

    operations.before = before


def _before_step(step: int, action: Callable[[Any], None]) -> None:
    """Call `action` with the trainer before it begins update number `step`."""
    from titan_prores.trainer import Trainer

    train_step = Trainer.train_step

    def watched(self: Trainer) -> None:
        if self.step + 1 == step:
            action(self)
        train_step(self)

    Trainer.train_step = watched


def _not_finite(harm: dict, operations: Operations, fired: Path) -> None:
    """In update `step` this rank's loss is not a number."""

    def poison(trainer: Any) -> None:
        loss = trainer.parts.loss

        def poisoned(*arguments: Any) -> Any:
            return loss(*arguments) * float("nan")

        _line(fired, f"loss NaN in step {harm['step']}")
        trainer.parts.loss = poisoned

    _before_step(harm["step"], poison)


def _sleep(harm: dict, operations: Operations, fired: Path) -> None:
    """Before update `step` this rank stands still for `seconds`."""

    def stand_still(trainer: Any) -> None:
        _line(fired, f"{harm['seconds']:.1f} s before step {harm['step']}")
        time.sleep(harm["seconds"])

    _before_step(harm["step"], stand_still)


_HARM = {"kill": _kill, "refuse": _refuse, "not_finite": _not_finite, "sleep": _sleep}
