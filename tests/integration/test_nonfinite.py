"""Loss and gradients that are not finite: stop, skip, rewind, and the batch that is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.integration.launch import debug, fork, losses, rows
from titan_prores.data import TokenWindows, sample_windows
from titan_prores.data.shards import TokenCache

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

PARTS = '''
import torch
from titan_prores import lookup, register, setting

CrossEntropy = lookup("loss", "cross_entropy")


@register("loss", "allergic")
class Allergic(CrossEntropy):
    """Cross-entropy, but infinite for some texts, and not a number from some call on."""

    class Config(CrossEntropy.Config):
        modulus: int = setting(22, "of the sum of a microbatch's labels: 0 makes its loss infinite")
        fails_from: int = setting(10**9, "call from which on everything fails, whatever the text")

    def __init__(self, config, **context):
        super().__init__(config, **context)
        self.config, self.calls = config, 0

    def __call__(self, logits, labels):
        value = super().__call__(logits, labels)
        if not torch.is_grad_enabled():
            return value
        self.calls += 1
        if self.calls >= self.config.fails_from:
            return value * float("nan")
        return value * float("inf") if int(labels.sum()) % self.config.modulus == 0 else value
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    (folder / "parts.py").write_text(PARTS)
    return folder


def run(folder: Path, name: str, *overrides: str, **settings: object) -> tuple[Path, str]:
    """A run whose checkpoints are of every fifth step; its folder and what it printed."""
    own = [f"--import={folder / 'parts.py'}", "--loss.name=allergic", "--checkpoint.interval=5"]
    own.append("--training.local_batch_size=4")
    finished = fork(*debug(folder / name, *own, *overrides), **settings)
    return folder / name, finished.text


def finite(run: Path) -> dict[int, float]:
    return {step: loss for step, loss in losses(run).items() if isinstance(loss, float)}


@pytest.fixture(scope="module")
def skipped(folder: Path) -> Path:
    return run(folder, "skip", "--training.on_nonfinite=skip")[0]


def test_going_back_and_passing_over_is_skipping(folder: Path, skipped: Path) -> None:
    """A batch that is bad whatever the weights: where it is passed over at once, nothing else differs."""
    bad = sorted(set(range(1, 21)) - finite(skipped).keys())
    assert len(bad) == 2 and bad[0] > 5, "or the text of the tests has changed"
    went_back, text = run(folder, "rewind", "--training.on_nonfinite=rewind")
    for step in bad:
        assert f"going back to the checkpoint of step {(step - 1) // 5 * 5}" in text
        assert f"step {step}: its batch was not finite before and is skipped" in text
    found = [row for row in rows(went_back) if "validation" not in row]
    assert [row["step"] for row in found] == list(range(1, 21)), "every step has one row"
    assert [row["step"] for row in found if row.get("skipped")] == bad
    assert finite(went_back) == finite(skipped)
    for name in ("skip", "rewind"):
        status = json.loads((folder / name / "status.json").read_text())
        assert (status["state"], status["step"]) == ("finished", 20)


def test_two_ranks_go_back_and_one_goes_on(folder: Path, skipped: Path) -> None:
    bad = sorted(set(range(1, 21)) - finite(skipped).keys())
    went_back, _ = run(
        folder,
        "two",
        "--training.on_nonfinite=rewind",
        "--checkpoint.interval=1",
        f"--training.stop_after={bad[0]}",
        ranks=2,
    )
    assert rows(went_back)[-1]["step"] == bad[0]
    again, text = run(folder, "two", "--training.on_nonfinite=rewind", "--training.max_nonfinite_rewinds=1")
    assert f"resuming at step {bad[0]}" in text
    assert finite(again).keys() == finite(skipped).keys()
    assert max(abs(loss - finite(skipped)[step]) for step, loss in finite(again).items()) <= 1e-5


def test_batches_before_the_bad_one_are_passed_over_where_that_is_asked(folder: Path, skipped: Path) -> None:
    bad = sorted(set(range(1, 21)) - finite(skipped).keys())
    before, _ = run(
        folder,
        "three",
        "--training.on_nonfinite=rewind",
        "--training.rewind_batches=3",
        f"--training.stop_after={bad[0]}",
    )
    passed_over = [row["step"] for row in rows(before) if row.get("skipped")]
    newest = (bad[0] - 1) // 5 * 5
    assert passed_over == [step for step in range(bad[0] - 2, bad[0] + 1) if step > newest]


def test_a_run_that_cannot_be_saved_ends(folder: Path) -> None:
    _, text = run(
        folder,
        "endless",
        "--training.on_nonfinite=rewind",
        "--training.max_nonfinite_rewinds=2",
        "--loss.modulus=1000000007",
        "--loss.fails_from=30",
        status=1,
    )
    assert "after going back to step 5 2 times" in text
    _, text = run(
        folder, "early", "--training.on_nonfinite=rewind", "--loss.modulus=1000000007", "--loss.fails_from=3", status=1
    )
    assert "step 1: loss nan" in text and "there is no good checkpoint yet to go back to" in text
    _, text = run(folder, "never", "--training.on_nonfinite=rewind", "--checkpoint.enabled=false", status=2)
    assert "training.on_nonfinite = 'rewind'" in text and "needs checkpoints" in text


def test_the_batch_is_kept_to_be_looked_at(folder: Path, skipped: Path) -> None:
    bad = sorted(set(range(1, 21)) - finite(skipped).keys())
    shutil.rmtree(folder / "kept", ignore_errors=True)
    kept, text = run(folder, "kept", ranks=2, status=None)
    assert "NonFiniteError" in text
    assert [path.name for path in (kept / "nonfinite").iterdir()] == [f"step-{bad[0]:08d}"]
    (batch,) = (kept / "nonfinite").iterdir()
    report = json.loads((batch / "report.json").read_text())
    assert report["step"] == bad[0] and report["first_sample"] == 16 * (bad[0] - 1)
    by_rank = [float(loss) for loss in report["loss_by_data_rank"].values()]
    assert sum(np.isinf(by_rank)) == 1, "and so it says which rank's part it was"
    assert "layers.0.attention.wq.weight" in report["parameters_with_nonfinite_gradients"]
    (index,) = (folder / "cache").rglob("index.json")
    windows = TokenWindows(TokenCache.open(index.parent).train, 64)
    for rank in (0, 1):
        with np.load(batch / f"data-rank-{rank}.npz", allow_pickle=False) as arrays:
            tokens, labels = arrays["tokens"], arrays["labels"]
        assert tokens.shape == labels.shape == (2, 4, 64)
        infinite = [int(part.sum()) % 22 == 0 for part in labels]
        assert any(infinite) == bool(np.isinf(by_rank[rank]))
        for microbatch in (0, 1):
            first = report["first_sample"] + (2 * microbatch + rank) * 4
            ids = sample_windows(0, np.arange(first, first + 4), len(windows))
            assert np.array_equal(tokens[microbatch], np.stack([windows[i][0].numpy() for i in ids]))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_save_on_its_way_is_published_before_such_a_run_ends(folder: Path, mode: str) -> None:
    own = [f"--checkpoint.async_mode={mode}", "--checkpoint.interval=1", "--loss.modulus=1000000007"]
    ended, text = run(folder, f"on-its-way-{mode}", *own, "--loss.fails_from=17", status=1)
    assert "step 5: loss nan" in text
    assert sorted(path.name for path in (ended / "checkpoint").iterdir()) == [f"step-0000000{k}" for k in range(1, 5)]


def test_a_signal_in_a_step_that_goes_back_is_answered_there(folder: Path, skipped: Path) -> None:
    """Not when the step comes round again, which may be long after."""
    bad = min(set(range(1, 21)) - finite(skipped).keys())
    (folder / "signal.py").write_text(SIGNAL_IN_STEP)
    stopped, _ = run(
        folder,
        "signalled",
        f"--import={folder / 'signal.py'}",
        "--training.on_nonfinite=rewind",
        f"--metrics.signal_in_step.step={bad}",
        ranks=2,
        status=75,
    )
    assert [row["step"] for row in rows(stopped) if "loss" in row] == [1, 2, 3, 4, 5]
    status = json.loads((stopped / "status.json").read_text())
    assert (status["state"], status["step"], status["signal"]) == ("stopped", 5, "SIGTERM")
    again, _ = run(folder, "signalled", "--training.on_nonfinite=rewind", ranks=2)
    assert finite(again).keys() == finite(skipped).keys()


SIGNAL_IN_STEP = '''
import os, signal
from titan_prores import Metric, register, Section, setting


@register("metrics", "signal_in_step")
class SignalInStep(Metric):
    """Signals its own rank in a step."""

    class Config(Section):
        step: int = setting(1, "which")

    def measure(self, step, model):
        if step == self.config.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}
'''
