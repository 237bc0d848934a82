"""A signal while a run validates: the validation is cut short, and nothing is lost."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.integration.launch import debug, finish, fork, losses, rows, start

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PARTS = '''
import pathlib, time, torch
from titan_prores.registry import lookup, register


@register("loss", "slow")
class Slow(lookup("loss", "cross_entropy")):
    """Cross-entropy that takes its time in validation, while a file says so."""

    def __call__(self, logits, labels):
        here = pathlib.Path(__file__)
        if not torch.is_grad_enabled():
            here.with_name("validating").touch()
            if here.with_name("slow").exists():
                time.sleep(0.5)
        return super().__call__(logits, labels)
'''


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_cuts_a_validation_short(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "slow").touch()
    run = tmp_path / "run"
    own = debug(run, f"--import={tmp_path / 'parts.py'}", "--loss.name=slow", "--training.stop_after=12",
                "--validation.freq=6", "--validation.batch_size=1")  # fmt: skip
    process = start(*own, ranks=ranks)
    while not (tmp_path / "validating").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    finished = finish(process)
    # A whole validation takes some 250 sequences / ranks at half a second each.
    assert time.monotonic() - sent < 30
    assert finished.status == (75 if ranks == 1 else 1)
    assert "validation after step 6 is cut short by SIGTERM" in finished.text
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["signal"]) == ("stopped", 6, "SIGTERM")
    assert not [row for row in rows(run) if row.get("validation")]

    (tmp_path / "slow").unlink()
    assert "resuming at step 6" in fork(*own, ranks=ranks).text
    straight = [part.replace(str(run), str(tmp_path / "straight")) for part in own]
    fork(*straight, ranks=ranks)
    assert losses(run) == losses(tmp_path / "straight")
