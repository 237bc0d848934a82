"""A run that changes its ranks, layout, microbatches and workers in the middle of an epoch, several epochs in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.launch import CORPUS, debug, fork, losses

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SEQ_LEN, BATCH, STOPPED, LAST = 64, 16, 25, 35


def n_windows(run: Path) -> int:
    """Training sequences of an epoch, as the token cache has them."""
    (index,) = (run.parent / "cache").rglob("index.json")
    return (json.loads(index.read_text())["splits"]["train"]["tokens"] - 1) // SEQ_LEN


def test_resumes_on_two_ranks_of_hsdp_in_the_middle_of_the_third_epoch_or_later(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(CORPUS.read_text()[:12_000])
    text = [f"--dataset.files=['{tmp_path / 'short.txt'}']", f"--training.steps={LAST}"]
    control, moved = tmp_path / "control", tmp_path / "moved"
    fork(*debug(control, *text, f"--checkpoint.interval={STOPPED}"))

    epoch = n_windows(control)
    ends = [step for step in range(1, LAST + 1) if (step - 1) * BATCH // epoch < step * BATCH // epoch]
    assert len([step for step in ends if step <= STOPPED]) >= 2, "two epochs are over before the stop"
    assert any(step > STOPPED for step in ends), "and one ends after it"
    assert STOPPED * BATCH % epoch, "it stops inside of an epoch"
    assert any(step * BATCH % epoch for step in ends), "and epochs end inside of a batch"

    name = f"checkpoint/step-{STOPPED:08d}"
    shutil.copytree(control / name, moved / name)
    hsdp = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    other = ["--training.local_batch_size=2", "--dataset.num_workers=1", "--checkpoint.resume=must"]
    again = fork(*debug(moved, *text, *hsdp, *other), ranks=2)
    for change in (
        "training.local_batch_size: 8 -> 2",
        "dataset.num_workers: 0 -> 1",
        "parallelism.data_parallel_replicate_degree: 1 -> 2",
    ):
        assert f"changed since the checkpoint: {change}" in again.text

    expected = {step: loss for step, loss in losses(control).items() if step > STOPPED}
    found = losses(moved)
    assert sorted(found) == list(range(STOPPED + 1, LAST + 1))
    assert max(abs(found[step] - expected[step]) for step in expected) <= 1e-5
    # Which samples they were is what makes them near: neighbouring steps are further apart by far.
    assert min(abs(found[step] - found[step + 1]) for step in range(STOPPED + 1, LAST)) > 1e-4
    meta = json.loads((moved / f"checkpoint/step-{LAST:08d}/meta.json").read_text())
    assert meta["samples"] == LAST * BATCH and meta["mesh"] == {"dp_replicate": 2, "dp_shard": 1, "tp": 1}


def test_a_batch_that_the_new_ranks_cannot_share_names_what_would_fit(tmp_path: Path) -> None:
    """Before anything is started; one line, and the checkpoint stays."""
    run = tmp_path / "run"
    fork(*debug(run, "--training.stop_after=2", "--checkpoint.interval=2"))
    own = ["--training.local_batch_size=3"]
    refused = fork(*debug(run, *own), status=2)
    assert "Traceback" not in refused.text and refused.err.count("error: ") == 1
    assert "global_batch_size = 16: is not a multiple of training.local_batch_size 3 x 1 data ranks" in refused.err
    assert "local_batch_size 1, 2, 4, 8, 16" in refused.err
    fork(*debug(run, "--training.local_batch_size=16", "--training.stop_after=3"))
    assert sorted(losses(run)) == [1, 2, 3]
