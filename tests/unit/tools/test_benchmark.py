"""The command line of titan-prores benchmark and what it makes of measurements."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titan_prores.tools import benchmark
from titan_prores.tools.benchmark import Row, Setup, main, measure, ratio_row, table
from titan_prores.tools.measure import MET, UNRESOLVED, Interval


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "5"], "error: --pairs = 5: is too few for an interval (allowed: 12 or more)"),
        (["--threads", "0"], "error: --threads = 0: not a valid number of threads"),
        (["--only", "prores-egaer"], "did you mean prores-eager?"),
        (["--size", "70M"], "model.flavor = '70M'"),
        (["--training.stepz=1"], "training.stepz"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--jsn", "x"], "--jsn"),
        (["--json", "nowhere/x.json"], "--json = 'nowhere/x.json': is in a folder that is not there"),
        (["--write", "nowhere.md"], "error: nowhere.md cannot be read: No such file or directory"),
        (["--write", "pyproject.toml"], "error: pyproject.toml needs the lines <!-- benchmark:begin -->"),
    ],
)
def test_faults_are_one_line_and_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert all(line.startswith("error: ") or line.endswith(" errors") for line in err.splitlines())


def test_help_names_every_part(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in benchmark.PARTS) and "--section.key=value" in out


@pytest.mark.parametrize(
    ("ratio", "same", "expected"),
    [
        (Interval(0.999, 1.002, 1.006), Interval(0.997, 1.0, 1.002), "<= 1.01: met"),
        (Interval(1.015, 1.02, 1.03), Interval(0.997, 1.0, 1.002), "<= 1.01: missed"),
        (Interval(0.999, 1.002, 1.006), Interval(0.98, 1.0, 1.02), "<= 1.01: inconclusive"),
    ],
)
def test_a_ratio_stands_beside_its_a_a_and_its_verdict(ratio: Interval, same: Interval, expected: str) -> None:
    speeds = {"reference": 2000.0, "on": 1990.0}
    found = SimpleNamespace(ratios={"on": ratio}, same=same, tokens_per_second=speeds)
    _, [cells] = table([ratio_row(found, "on", "ProRes on / off", 1.01, "a note")])
    assert cells == ["ProRes on / off\n1,990 against 2,000 tokens/s; a note", str(ratio), str(same), expected]


def test_a_ratio_without_a_goal_claims_nothing() -> None:
    interval = Interval(1, 1, 1)
    found = SimpleNamespace(ratios={"on": interval}, same=interval, tokens_per_second={"reference": 1.0, "on": 1.0})
    assert table([ratio_row(found, "on", "x")])[1][0][3] == ""


def test_a_part_that_fails_is_a_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(setup: Setup) -> list[Row]:
        """Breaks."""
        raise RuntimeError("no such thing")

    def works(setup: Setup) -> list[Row]:
        """Works."""
        return [Row("works", "1")]

    monkeypatch.setattr(benchmark, "PARTS", {"breaks": breaks, "works": works})
    rows, failed = measure(Setup(benchmark.CONFIG, [], 12, tmp_path), ["breaks", "works"])
    assert failed and [(row.measured, row.result) for row in rows] == [("breaks", "failed"), ("works", "1")]
    assert "no such thing" in rows[0].note


def test_a_start_far_into_the_data_is_judged_by_its_difference(tmp_path: Path) -> None:
    """Over 10^12 tokens in real reads, of which the disk holds none."""
    pytest.importorskip("torchdata")
    setup = Setup(benchmark.CONFIG, [], 12, tmp_path)
    training = SimpleNamespace(seed=0, local_batch_size=2, seq_len=16)
    row = benchmark.loader_start(setup, training, 0, "0 workers")
    assert row.goal == "<= 1 s:" and row.verdict in (MET, UNRESOLVED) and "ms" in row.result and "ms" in row.same
    assert "1e+12 tokens" in row.note and (tmp_path / "large.bin").stat().st_blocks * 512 < 1 << 20
    assert {name: len(taken) for name, taken in setup.seconds["loader start, 0 workers"].items()} == {
        "far": 20,
        "start": 20,
        "again": 20,
    }


def test_the_table_is_written_between_the_lines_of_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark:begin -->\nold\n<!-- benchmark:end -->\nafter\n")
    monkeypatch.setattr(benchmark, "measure", lambda setup, wanted: ([Row("works", "1")], False))
    monkeypatch.setattr(logging, "disable", lambda level: None)
    assert main(["--write", str(page), "--threads", str(torch.get_num_threads())]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- benchmark:begin -->\nMeasured on ") and text.endswith("end -->\nafter\n")
    assert "| works | 1 |" in text and "old" not in text
