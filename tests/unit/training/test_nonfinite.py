"""What a run does about numbers that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from titan_prores.config.engine_sections import Training
from titan_prores.protocols.batch import Batch
from titan_prores.training import nonfinite
from titan_prores.training.nonfinite import NonFiniteError, NonFinitePolicy, keep_batch

BAD = {"finite": False, "loss": float("nan"), "grad_norm": 1.0}
GOOD = {"finite": True, "loss": 1.0, "grad_norm": 1.0}


def test_skips_in_a_row_are_counted() -> None:
    policy = NonFinitePolicy(Training(on_nonfinite="skip", max_nonfinite_skips=2))
    for step in range(1, 10):
        policy.judge(step, 0, **(GOOD if step % 3 == 0 else BAD))
    policy.judge(10, 0, **BAD)
    policy.judge(11, 0, **BAD)
    with pytest.raises(NonFiniteError, match=r"step 12: .* after 2 batches skipped"):
        policy.judge(12, 0, **BAD)


def test_going_back_is_counted_by_checkpoint() -> None:
    policy = NonFinitePolicy(Training(on_nonfinite="rewind", max_nonfinite_rewinds=2, rewind_batches=2))
    for sample in (160, 320):
        policy.judge(1, sample, **BAD)
        policy.rewind(5, 16, 80)
        assert policy.offending is None
    policy.judge(1, 480, **BAD)
    policy.rewind(6, 16, 96)
    assert policy.to_skip == {144, 160, 304, 320, 464, 480}
    policy.judge(1, 96, **BAD)
    policy.rewind(7, 16, 96)
    assert 80 not in policy.to_skip, "the checkpoint has seen it"
    policy.judge(1, 640, **BAD)
    with pytest.raises(NonFiniteError, match="after going back to step 5 2 times"):
        policy.rewind(5, 16, 80)


def test_a_checkpoint_remembers_batches_that_are_still_to_come() -> None:
    policy = NonFinitePolicy(Training(on_nonfinite="rewind"))
    policy.judge(1, 160, **BAD)
    policy.rewind(5, 16, 80)
    remembered = json.loads(json.dumps(policy.state(96)))
    assert remembered == {"skipped_in_a_row": 0, "pass_over": [160]} and policy.state(176)["pass_over"] == []
    resumed = NonFinitePolicy(Training())
    resumed.load_state(remembered)
    assert resumed.to_skip == {160}
    resumed.load_state({"skipped_in_a_row": 3})  # as of checkpoints that know nothing of it
    assert resumed.skipped_in_a_row == 3 and resumed.to_skip == {160}


MESH = SimpleNamespace(data_rank=0, is_first_with_data=True, is_main=True, gather=lambda value: [value])


def kept(folder: Path, step: int) -> Path:
    model = torch.nn.Linear(2, 1)
    model(torch.tensor([1.0, torch.inf])).sum().backward()
    model.bias.grad = torch.ones(1)
    batches = [Batch(torch.full((2, 3), k), torch.full((2, 3), k + 1), torch.arange(2)) for k in range(4)]
    keep_batch(folder, batches, {"step": step}, float("nan"), model, MESH)
    return folder / f"step-{step:08d}"


def test_a_batch_is_kept_with_its_report(tmp_path: Path) -> None:
    at = kept(tmp_path, 7)
    report = json.loads((at / "report.json").read_text(), parse_constant=pytest.fail)
    assert report == {"step": 7, "loss_by_data_rank": {"0": "NaN"}, "parameters_with_nonfinite_gradients": ["weight"]}
    with np.load(at / "data-rank-0.npz") as arrays:
        assert arrays["tokens"].shape == (4, 2, 3) and (arrays["labels"] == arrays["tokens"] + 1).all()


def test_a_disk_that_cannot_take_it_does_not_end_the_run(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "file").touch()
    kept(tmp_path / "file", 7)
    assert "the batch of step 7 cannot be kept" in "\n".join(logged)


def test_no_more_than_so_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "MOST_KEPT", 2)
    for step in (1, 2, 3, 2):
        kept(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
