"""The harness's own judgement: what it must notice, without a launch."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from tests.integration import torture
from tests.integration.torture import KINDS, Lost, check_rows, check_samples, is_whole, plan, read_samples


def test_plan_is_a_function_of_the_seed() -> None:
    def first(seed: int) -> list[torture.ChainPlan]:
        return list(itertools.islice(plan(seed), 8))

    assert first(3) == first(3) != first(4)
    faults = [fault for chain in first(3) for fault in chain.faults]
    assert [fault.number for fault in faults] == list(range(len(faults)))
    weights = sum(kind.weight for kind in KINDS.values())
    assert {fault.kind for fault in faults[:weights]} == set(KINDS)
    assert {fault.kind for chain in itertools.islice(plan(0, ["flip", "kill"]), 3) for fault in chain.faults} == {
        "flip",
        "kill",
    }
    every = [each for chain in first(3) for each in chain.rounds]
    assert {each.mode for each in every} == set(torture.async_modes()) and {each.workers for each in every} == {0, 2}


ROWS = [{"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 0.1, "tokens": step} for step in range(1, 7)]
EXPECTED = {row["step"]: row for row in ROWS}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (ROWS[:2] + ROWS[3:], "has step 4 where step 3 belongs"),
        (ROWS[:3] + ROWS[2:], "has step 3 where step 4 belongs"),
        (ROWS[1:], "has step 2 where step 1 belongs"),
        (ROWS[:3], "ends at step 3, and 4 were done"),
        ([*ROWS[:5], ROWS[5] | {"loss": 5.0 / 6 + 1e-15}], "step 6: loss is"),
        ([*ROWS[:5], ROWS[5] | {"loss": "NaN"}], "step 6: loss is"),
        ([*ROWS, ROWS[0] | {"step": 7}], "step 7 is past the end"),
        ([ROWS[0] | {"grad_norm": 1.5}, *ROWS[1:]], "step 1: grad_norm is"),
    ],
)
def test_rows_that_are_not_the_undisturbed_ones(found: list, message: str) -> None:
    with pytest.raises(Lost, match=message):
        check_rows(found, EXPECTED, at_least=4)
    check_rows(ROWS, EXPECTED, at_least=6)
    check_rows(ROWS[:4], EXPECTED, at_least=4)


SAMPLES = {4: ["a", "b", "c", "d"], 5: ["e", "f", "a", "b"], 6: ["g", "g", "h", "i"]}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({5: {0: ["e", "f", "a", "b"]}}, "began with step 5, not 4"),
        ({4: {0: SAMPLES[4]}, 6: {0: SAMPLES[6]}}, "left one out"),
        ({4: {0: ["a", "b", "c", "x"]}}, "step 4: consumed a sample that is not of this step"),
        ({4: {0: ["a", "b"], 1: ["a", "b"]}}, "or one twice"),
        ({4: {0: ["a", "b"], 1: ["c"]}, 5: {0: SAMPLES[5]}}, "step 4: consumed 3 of 4"),
        ({4: {0: SAMPLES[4]}, 5: {0: ["e"]}}, "step 5: consumed 1 of 4"),
    ],
)
def test_samples_that_are_not_the_undisturbed_ones(found: dict, message: str) -> None:
    with pytest.raises(Lost, match=message):
        check_samples(found, SAMPLES, 4, complete=True)


def test_samples_that_are_the_undisturbed_ones() -> None:
    check_samples({4: {0: ["c", "a"], 1: ["d", "b"]}, 5: {0: ["e"], 1: []}}, SAMPLES, 4, complete=False)
    check_samples({6: {0: ["g", "h"], 1: ["i", "g"]}}, SAMPLES, 6, complete=True)
    check_samples({}, SAMPLES, 4, complete=True)


def test_ranks_of_one_data_rank_have_the_same_samples(tmp_path: Path) -> None:
    def consumed(rank: int, samples: list[str]) -> None:
        row = {"step": 1, "part": 0, "samples": samples}
        (tmp_path / f"samples-{rank}-0.jsonl").write_text(json.dumps(row) + "\n")

    consumed(0, ["a"])
    consumed(1, ["a", "b"])  # one rank was killed a little earlier
    assert read_samples(tmp_path) == {1: {0: ["a", "b"]}}
    consumed(1, ["b", "b"])
    with pytest.raises(Lost, match="two ranks of data rank 0"):
        read_samples(tmp_path)


def test_whole_checkpoints(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000012"
    checkpoint.mkdir()
    content = {"meta.json": b'{"step": 12}', "__0_0.distcp": b"tensors"}
    files = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in content.items()}
    content["manifest.json"] = json.dumps({"files": files}).encode()

    def written() -> Path:
        for name, each in content.items():
            (checkpoint / name).write_bytes(each)
        return checkpoint

    assert is_whole(written())
    for name, each in content.items():
        for damaged in (b"", each[:-1], b"\xff" + each[1:]):
            (written() / name).write_bytes(damaged)
            assert not is_whole(checkpoint), (name, damaged)
        (written() / name).unlink()
        assert not is_whole(checkpoint), name
    assert not is_whole(written().rename(tmp_path / "step-00000013"))


def test_report_counts_what_was_survived_lost_and_missed(tmp_path: Path) -> None:
    states = [("flip", "survived"), ("flip", "lost"), ("kill", "missed"), ("kill", "survived")]
    records = [
        torture.Record(number, kind, 0, 1, "one", "thread", "when", state)
        for number, (kind, state) in enumerate(states)
    ]
    assert torture.happened(records) == 3
    _, rows = torture.table(records)
    assert [row[:4] for row in rows] == [["flip", "1", "1", "0"], ["kill", "1", "0", "1"], ["all", "2", "1", "1"]]
    torture.write_report(tmp_path / "r.md", 5, records, 60)
    assert "Seed 5" in (tmp_path / "r.md").read_text() and "| flip | 1 | 1 | 0 |" in (tmp_path / "r.md").read_text()
    torture.write_report(tmp_path / "r.json", 5, records, 60)
    facts = json.loads((tmp_path / "r.json").read_text())
    assert facts["seed"] == 5 and [fault["state"] for fault in facts["faults"]] == [state for _, state in states]


@pytest.mark.parametrize("wrong", [["--faults=0"], ["--report=x.txt"], ["--only=flop"], ["--keep=/proc"]])
def test_wrong_command_lines(wrong: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        torture.main(wrong)
    assert ended.value.code == 2 and "Traceback" not in capsys.readouterr().err
    assert torture.main(["--list"]) == 0 and "torchrun restarts" in capsys.readouterr().out
