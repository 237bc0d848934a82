"""Runs with a trained or an adaptive schedule stop, resume and go back as any other: logits and state come along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.launch import debug, fork, losses, rows
from tests.integration.test_nonfinite import PARTS

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SCHEDULE = "--transforms.prores.residual_schedule"
SCHEDULES = {
    "learned": [f"{SCHEDULE}.name=learned", f"{SCHEDULE}.lr=0.05", f"{SCHEDULE}.start=0.3"],
    # Layers wait for one another past step 10, at which runs are stopped.
    "adaptive": [
        f"{SCHEDULE}.name=adaptive",
        f"{SCHEDULE}.warmup_steps=3",
        f"{SCHEDULE}.min_steps=3",
        f"{SCHEDULE}.max_steps=8",
        f"{SCHEDULE}.every_steps=1",
        f"{SCHEDULE}.smoothing=0.2",
        f"{SCHEDULE}.tolerance=0.3",
    ],
}
SHOWN = ("step", "loss", "grad_norm", "alpha", "adaptive_layers", "adaptive_change")


def shown(run: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    """What the steps of a run show that does not depend on the time."""
    return [{key: row.get(key) for key in SHOWN} for row in rows(run, name) if "loss" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, Path]:
    """Schedule -> run folder of 20 steps on one process without a stop, with checkpoints of steps 10 and 20."""
    for name, overrides in SCHEDULES.items():
        fork(*debug(folder / name, *overrides))
    return {name: folder / name for name in SCHEDULES}


def test_schedules_move_before_and_after_the_stop(straight: dict[str, Path]) -> None:
    """Else there would be nothing to resume."""
    alphas = {name: {row["step"]: row["alpha"] for row in shown(run)} for name, run in straight.items()}
    for last in (10, 20):
        assert len({tuple(alpha) for step, alpha in alphas["learned"].items() if last - 10 < step <= last}) > 5
    layers = {row["step"]: row["adaptive_layers"] for row in shown(straight["adaptive"])}
    assert 1 < layers[10] < layers[20]
    meta = json.loads((straight["adaptive"] / "checkpoint/step-00000010/meta.json").read_text())
    state = meta["transforms"]["prores"]
    assert len(state["begun"]) == layers[10] and state["mean"] > 0 and max(state["begun"]) <= 10
    bounds = [earlier + 8 for earlier in state["begun"]]
    assert [first for first in state["begun"][1:] if first not in bounds], "none of the decisions was measured"


@pytest.mark.parametrize("name", SCHEDULES)
def test_stop_and_resume_is_bitwise_the_straight_run(name: str, folder: Path, straight: dict[str, Path]) -> None:
    run = folder / f"{name}-stopped"
    fork(*debug(run, *SCHEDULES[name], "--training.stop_after=10"))
    assert "resuming at step 10" in fork(*debug(run, *SCHEDULES[name])).text
    assert shown(run) == shown(straight[name])


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_resume_on_two_ranks_and_back(name: str, layout: str, folder: Path, straight: dict[str, Path]) -> None:
    run, degree = folder / f"{name}-{layout}", {"fsdp2": "data_parallel_shard", "tp2": "tensor_parallel"}[layout]
    step = "checkpoint/step-00000010"
    shutil.copytree(straight[name] / step, run / step)
    must = "--checkpoint.resume=must"
    fork(*debug(run, *SCHEDULES[name], must, f"--parallelism.{degree}_degree=2", "--training.stop_after=15"), ranks=2)
    fork(*debug(run, *SCHEDULES[name], must))
    control = {row["step"]: row for row in shown(straight[name]) if row["step"] > 10}
    found = {row["step"]: row for row in shown(run)}
    assert found.keys() == control.keys()
    for step, row in control.items():
        assert found[step]["loss"] == pytest.approx(row["loss"], abs=1e-5, rel=0)
        assert found[step]["alpha"] == pytest.approx(row["alpha"], abs=1e-5 if name == "learned" else 0, rel=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_going_back_takes_the_schedule_along(name: str, folder: Path) -> None:
    """Steps that are trained again, up to the bad batch, are those of the first time, bit for bit."""
    (folder / "parts.py").write_text(PARTS)
    run = folder / f"{name}-rewind"
    bad = [
        "--training.local_batch_size=4",
        f"--import={folder / 'parts.py'}",
        "--loss.name=allergic",
        "--training.on_nonfinite=rewind",
    ]
    finished = fork(*debug(run, *SCHEDULES[name], *bad, "--checkpoint.interval=5"))
    assert "going back to the checkpoint of step" in finished.text
    again = {row["step"]: row for row in shown(run)}
    compared = 0
    for aside in run.glob("metrics.after-step-*.jsonl"):
        earlier = [row for row in shown(run, aside.name) if isinstance(row["loss"], float)]
        assert [again[row["step"]] for row in earlier] == earlier
        compared += len(earlier)
    assert compared > 0, "or the text of the tests has changed"
    assert all(isinstance(loss, float) for loss in losses(run).values())


def test_another_table_is_refused_by_name_and_a_moved_one_goes_on(folder: Path) -> None:
    table = folder / "alpha.csv"
    table.write_text("step,alpha_1,alpha_2,alpha_3,alpha_4\n0,0,0,0,0\n8,1,1,0.5,0.5\n16,1,1,1,1\n")
    given = [f"{SCHEDULE}.name=from_table", f"{SCHEDULE}.path={str(table)!r}"]
    run = folder / "table"
    fork(*debug(run, *given, "--training.stop_after=10"))
    assert [row["alpha"] for row in shown(run)][:9:4] == [[0.0] * 4, [0.5, 0.5, 0.25, 0.25], [1.0, 1.0, 0.5, 0.5]]
    text = table.read_text()
    table.write_text(text.replace("8,1,1,0.5", "8,1,1,0.6"))
    refused = fork(*debug(run, *given), status=2)
    assert "transforms.prores.residual_schedule.sha256" in refused.err and "must stay so" in refused.err
    table.unlink()
    assert "no such file" in fork(*debug(run, *given), status=2).err
    (folder / "moved.csv").write_text(text)
    moved = fork(*debug(run, given[0], f"{SCHEDULE}.path={str(folder / 'moved.csv')!r}"))
    assert "resuming at step 10" in moved.text and shown(run)[-1]["alpha"] == [1.0] * 4
