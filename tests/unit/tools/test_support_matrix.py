"""The support matrix: what is judged how, what the committed results say, and what the page shows of them."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import matrix
from tests.distributed.matrix import AXES, CELLS, CONTROLS, MARK, SAMPLE, STEPS, Cell, judge
from tests.distributed.spawn import RanksFailed

EAGER, COMPILED = Cell("tp2", "none", "eager", "off", "pre"), Cell("tp2", "none", "compiled", "off", "pre")
CONTROL = Cell("tp2", "none", "eager", "off", "pre", "swapped-shard")


def a_run(**changes: float) -> dict[str, Any]:
    """Losses and gradients of 1, and of a branch that alpha keeps at 0 in step 1; `w1..w3` and `loss` move them."""
    gradients = {(step, "w"): torch.ones(4) for step in STEPS} | {
        (step, "branch"): torch.full((4,), float(step > 1)) for step in STEPS
    }
    for key, by in changes.items():
        if key != "loss":
            gradients[int(key[-1]), key[:-1]] += by
    return {"losses": [1.0, 1.0, 1.0 + changes.get("loss", 0.0)], "gradients": gradients}


def test_every_cell_has_a_result_and_none_failed() -> None:
    results = matrix.read(matrix.RESULTS)
    assert results.keys() == matrix.ALL.keys()
    assert {results[cell.name]["status"] for cell in CELLS} <= {"passed", "refused"}
    assert {results[cell.name]["status"] for cell in CONTROLS} == {"noticed"}


def test_results_are_sorted_and_their_errors_within_their_tolerance() -> None:
    lines = matrix.RESULTS.read_text().splitlines()
    assert lines == [json.dumps(line) for line in matrix.read(matrix.RESULTS).values()]
    for line in matrix.read(matrix.RESULTS).values():
        assert line["torch"] and line["torchao"]
        if line["status"] == "passed":
            for what in ("gradient", "loss"):
                assert 0 <= line[f"{what}_error"] <= line[f"{what}_tolerance"], line["cell"]
        else:
            assert line["reason"]


def test_the_page_shows_the_committed_results() -> None:
    table = matrix.render(matrix.read(matrix.RESULTS))
    assert f"<!-- {MARK}:begin -->\n{table}<!-- {MARK}:end -->" in matrix.PAGE.read_text()


def test_matrix_is_every_combination() -> None:
    assert len(CELLS) == len(set(CELLS)) == 270 and len(matrix.ALL) == 270 + len(CONTROLS)
    assert {cell.float8 for cell in CONTROLS if cell.fault == "swapped-shard"} == set(AXES["float8"])


def test_sample_has_every_pair() -> None:
    def pairs(cells: list[Cell], axes: list[str]) -> set[tuple[tuple[str, str], ...]]:
        return {pair for cell in cells for pair in combinations([(axis, getattr(cell, axis)) for axis in axes], 2)}

    left_out = {(("mesh", mesh), ("compile", "compiled")) for mesh in ("hsdp", "fsdp2xtp2")}
    assert pairs(SAMPLE, list(AXES)) == pairs(CELLS, list(AXES)) - left_out


def test_judge() -> None:
    reference = a_run()
    assert judge(EAGER, a_run(w2=0.9e-5), reference)["status"] == "passed"
    assert judge(EAGER, a_run(w2=2e-5), reference) == {
        "gradient_error": 2e-5,
        "gradient_tolerance": 1e-5,
        "loss_error": 0.0,
        "loss_tolerance": 1e-5,
        "status": "failed",
        "reason": "gradient of w in step 2",
    }
    assert judge(COMPILED, a_run(w2=2e-5), reference)["status"] == "passed"
    assert judge(EAGER, a_run(loss=2e-5), reference)["reason"] == "loss of step 3"
    assert judge(EAGER, a_run(loss=float("nan")), reference)["status"] == "failed"
    assert judge(EAGER, a_run(w3=float("nan")), reference)["status"] == "failed"


@pytest.mark.parametrize("change", [{"branch1": 1e-12}, {"branch3": -1.0}])
def test_judge_fails_an_unexpected_zero(change: dict[str, float]) -> None:
    found = judge(COMPILED, a_run(**change), a_run())
    assert found["status"] == "failed" and "zero on one side only" in found["reason"]
    assert "gradient_error" not in found  # there is no infinity in JSON


def test_judge_of_a_control() -> None:
    assert judge(CONTROL, a_run(), a_run())["status"] == "missed"
    assert judge(CONTROL, a_run(w3=0.1), a_run())["status"] == "noticed"


def test_float8_tolerance_is_the_spread_of_its_own_step() -> None:
    cell = Cell("tp2", "none", "eager", "tensorwise", "pre")
    reference = a_run() | {"spread": {"gradients": {1: 1e-7, 2: 1e-2, 3: 1e-1}, "losses": 1e-3}}
    assert judge(cell, a_run(w2=1.4e-2, w3=1.4e-1, loss=1.4e-3), reference)["status"] == "passed"
    assert judge(cell, a_run(w2=1.6e-2), reference)["reason"] == "gradient of w in step 2"
    assert judge(cell, a_run(w1=2e-5), reference)["reason"] == "gradient of w in step 1"  # alpha is 0: no float8 yet
    assert judge(cell, a_run(loss=1.6e-3), reference)["reason"] == "loss of step 3"
    same_casts = Cell("fsdp2", "none", "eager", "tensorwise", "pre")
    assert judge(same_casts, a_run(w3=2e-5), reference)["reason"] == "gradient of w in step 3"


def test_a_launch_that_ends_early_fails_one_cell_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("tp2", "none", "eager", "off", norm) for norm in AXES["norm"]]
    launches = []

    def run_ranks(function: Any, world_size: int, given: list[Cell], *args: Any, timeout: float) -> None:
        launches.append(given)
        for cell in given:
            if cell.norm == "post":
                raise RanksFailed(
                    '--- rank 1 raised:\nTraceback:\n  File "a.py"\n    f()\nValueError: broken\nmore\n'
                    '--- rank 0 raised:\nTraceback:\n  File "b.py"\nlater'
                )
            matrix.append(journal, matrix.result(cell, status="passed"))

    (tmp_path / "log").mkdir()
    journal = tmp_path / "results.jsonl"
    monkeypatch.setattr(matrix, "run_ranks", run_ranks)
    left = matrix._launch(cells, tmp_path, journal)
    assert left == cells[2:] and matrix._launch(left, tmp_path, journal) == []
    found = matrix.read(journal)
    assert [found[cell.name]["status"] for cell in cells] == ["passed", "failed", "passed"]
    assert found[cells[1].name]["reason"] == "ValueError: broken"
    assert [len(cells) for cells in launches] == [3, 1]


def test_a_cell_is_refused_by_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix.refusal(EAGER, tmp_path) is None
    monkeypatch.setattr(matrix, "RECIPE", [*matrix.RECIPE, "--model.n_kv_heads=1"])
    assert matrix.refusal(Cell("fsdp2", "none", "eager", "off", "pre"), tmp_path) is None
    journal = tmp_path / "results.jsonl"
    matrix.run_all([EAGER], tmp_path / "folder", journal)
    line = matrix.read(journal)[EAGER.name]
    assert line["status"] == "refused"
    assert line["reason"].startswith("parallelism.tensor_parallel_degree = 2: does not divide model.n_kv_heads 1")
    table = matrix.render({EAGER.name: line})
    assert "| tp2 | none | pre: refused [1]; post, sandwich: not run |" in table
    assert "0 passed, 1 refused, 0 failed, 269 not run" in table and f"\n1. {line['reason']}" in table


def test_a_line_that_was_not_finished_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first, second = (matrix.result(cell, status="passed") for cell in CELLS[:2])
    matrix.append(path, first)
    with path.open("a") as file:
        file.write('{"cell": "one/none/ea')  # stopped while it wrote
    assert list(matrix.read(path)) == [first["cell"]]
    matrix.append(path, second)
    assert list(matrix.read(path)) == [first["cell"], second["cell"]]
    assert path.read_text().count("\n") == 2


def test_what_has_a_result_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ran: list[str] = []

    def run_all(cells: list[Cell], folder: Path, journal: Path) -> None:
        for cell in cells:
            ran.append(cell.name)
            matrix.append(journal, matrix.result(cell, status="failed", reason="a reason"))

    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(matrix, "run_all", run_all)
    matrix.PAGE.write_text(f"before\n<!-- {MARK}:begin -->\nold\n<!-- {MARK}:end -->\nafter\n")
    chosen = ["--mesh", "one", "--only", "*/eager/off/*"]
    assert matrix.main(chosen) == 1 and len(ran) == 9
    assert "failed: one/none/eager/off/pre: a reason" in capsys.readouterr().err
    written = matrix.PAGE.read_text()
    assert written.startswith("before\n") and written.endswith("after\n") and "9 failed" in written
    matrix.main(chosen)
    matrix.main([*chosen, "--table"])
    assert len(ran) == 9
    matrix.main([*chosen, "--force"])
    assert len(ran) == 18 and len(matrix.read(matrix.RESULTS)) == 9
    older = {name: {**line, "torch": "2.0"} for name, line in matrix.read(matrix.RESULTS).items()}
    matrix.write(older, matrix.RESULTS)
    matrix.main(chosen)
    assert len(ran) == 27


def test_a_pattern_that_matches_nothing_is_an_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        matrix.main(["--only", "tp3/*"])
    assert ended.value.code == 2
    assert "--only tp3/*: matches no cell, such as one/none/eager/off/pre" in capsys.readouterr().err
