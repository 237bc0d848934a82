"""How titan-prores gpu-check judges, and what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from titan_prores.tools import gpu_check
from titan_prores.tools.gpu_check import Check, difference, launch, main, near, reason, same_bits


def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "error: no CUDA device is available" in capsys.readouterr().err


def test_missing_packages_are_named(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    gone = ("pydantic", "tomli_w")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else find_spec(name, *a))
    assert main(["--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        "error: these packages are missing: pydantic tomli-w (pip install pydantic tomli-w)\n"
    )


def test_a_place_that_is_not_there_is_refused_first(capsys: pytest.CaptureFixture) -> None:
    assert main(["--device", "cpu", "--json", "nowhere/x.json"]) == 2
    assert capsys.readouterr().err == "error: --json nowhere/x.json: there is no such folder\n"


def gradients(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"": torch.tensor(2.0), "a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), **changed}


def test_difference_is_relative_and_names_the_worst() -> None:
    assert difference(gradients(), gradients()) == (0.0, "")
    worst, whose = difference(gradients(a=torch.tensor([3.0, 4.5])), gradients())
    assert worst == pytest.approx(0.1) and whose == "a"
    assert difference({**gradients(), "": torch.tensor(3.0)}, gradients()) == (0.5, "the loss")


@pytest.mark.parametrize(
    "found",
    [
        gradients(a=torch.zeros(2)),  # zero where the other is not, and the other way round
        gradients(b=torch.tensor([0.0, 1e-9])),
        gradients(c=torch.ones(1)),
        {"": torch.tensor(2.0), "a": torch.tensor([3.0, 4.0])},
    ],
)
def test_zeros_and_missing_names_are_infinitely_far(found: dict[str, torch.Tensor]) -> None:
    assert difference(found, gradients())[0] == float("inf")


def test_not_a_number_is_no_agreement(tmp_path: Path) -> None:
    check = Check("cpu", tmp_path, tmp_path / "report.jsonl")
    near(check, "x", gradients(a=torch.tensor([3.0, float("nan")])), gradients())
    assert lines(check) == ["failed"]


def lines(check: Check) -> list[str]:
    return [json.loads(line)["status"] for line in check.report.read_text().splitlines()]


def test_bits_are_compared_where_the_reference_repeats_itself(tmp_path: Path) -> None:
    check = Check("cpu", tmp_path, tmp_path / "report.jsonl")
    off = gradients(a=torch.tensor([3.0, 4.00001]))
    same_bits(check, "equal", gradients(), gradients(), gradients())
    same_bits(check, "differs", off, gradients(), gradients())
    same_bits(check, "reference differs too", off, gradients(), off | {"": torch.tensor(2.000001)})
    same_bits(check, "far off", gradients(a=torch.ones(2)), gradients(), off)
    assert lines(check) == ["ok", "failed", "ok", "failed"]


def test_parts_that_cannot_run_are_skipped_and_said(tmp_path: Path) -> None:
    import time

    late, soon = time.time() + 1, time.time() + 600
    [line] = launch("parity", "cpu", 2, tmp_path, late)
    assert line == {"what": "parity", "result": "out of time", "status": "skipped"}
    [line] = launch("parity-fsdp2", "cpu", 1, tmp_path, soon)
    assert line["status"] == "skipped" and line["result"] == "needs two devices or more"
    [line] = launch("parity-fsdp2", "cpu", 2, tmp_path, soon)
    assert line["status"] == "skipped" and "nothing to compare with" in line["result"]


def test_a_part_is_killed_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SPARE_SECONDS", 0)
    import time

    start = time.time()
    [line] = launch("parity", "cpu", 2, tmp_path, start + 0.5)
    assert line["status"] == "skipped" and line["result"].startswith("out of time after")


@pytest.mark.parametrize(("n_devices", "ranks"), [(1, 0), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_ranks_of_the_parity_parts_divide_their_batch(n_devices: int, ranks: int) -> None:
    assert gpu_check.PARTS["parity-fsdp2"].ranks(n_devices) == ranks


def test_reason_is_the_last_error() -> None:
    log = "a\nValueError: first\n  in line 3\ntorch.elastic ChildFailedError: \nthe end\n"
    assert reason(log) == "ValueError: first"
    assert reason("") == "no output"
