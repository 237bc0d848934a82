"""titan-prores checkpoint, on checkpoints as the component writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_prores.checkpoint.folder import CheckpointFolder, record
from titan_prores.tools.checkpoint import main


def publish(folder: CheckpointFolder, step: int, weight: float, **recipe: object) -> Path:
    unfinished = folder.prepare(step)
    dcp.save({"weight": torch.full((3,), weight), "same": torch.ones(2)}, checkpoint_id=unfinished, no_dist=True)
    meta = {
        "step": step,
        "samples": 8 * step,
        "mesh": {"dp_shard": 2, "tp": 1},
        "data": "abc",
        "finite": True,
        "global_batch_size": 8,
        "validation_loss": 5.0 - weight,
        "recipe": {"optimizer": {"lr": 1e-3, **recipe}},
    }
    return folder.publish(step, meta, {path.name: record(path) for path in unfinished.iterdir()})


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    folder = CheckpointFolder(tmp_path / "run/checkpoint")
    for step, weight in ((10, 1.0), (20, 3.0), (30, 2.5)):
        publish(folder, step, weight)
    return folder


def test_list_takes_a_run_folder_too(folder: CheckpointFolder, capsys: pytest.CaptureFixture) -> None:
    assert main(["list", str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert main(["list", str(folder.path.parent)]) == 0
    assert capsys.readouterr().out == out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["10", "20", "30"] and [row[-4] for row in rows] == [
        "4.0000",
        "2.0000",
        "2.5000",
    ]
    assert all("dp_shard 2" in " ".join(row) for row in rows)


def test_damage_shows_in_list_and_verify(folder: CheckpointFolder, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", str(folder.path)]) == 0
    (file,) = folder.at(20).glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["list", str(folder.path)]) == 0  # sizes are right
    assert main(["verify", str(folder.path), "--step", "10"]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder.path)]) == 1
    out = capsys.readouterr().out
    assert "step 10: as it was written\nstep 20: DAMAGED\n" in out and f"{file} does not hold" in out
    file.unlink()
    assert main(["list", str(folder.path)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_diff_names_what_differs(folder: CheckpointFolder, capsys: pytest.CaptureFixture) -> None:
    assert main(["diff", str(folder.at(10)), str(folder.at(10))]) == 0
    assert capsys.readouterr().out == "no difference\n"
    other = CheckpointFolder(folder.path.parent / "other")
    publish(other, 10, 1.5, lr=2e-3)
    assert main(["diff", str(folder.at(10)), str(other.at(10))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "recipe  optimizer.lr: 0.001 -> 0.002",
        "tensor  weight: differs by at most 5.000e-01",
        "2 differences",
    ]


def test_prune(folder: CheckpointFolder, capsys: pytest.CaptureFixture) -> None:
    assert main(["prune", str(folder.path), "--keep-latest", "1", "--keep-best", "1", "--dry-run"]) == 0
    assert "would remove step 10\n2 left" in capsys.readouterr().out and folder.steps() == [10, 20, 30]
    assert main(["prune", str(folder.path), "--keep-latest", "1", "--keep-best", "1"]) == 0
    assert "removed step 10\n2 left" in capsys.readouterr().out and folder.steps() == [20, 30]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "nowhere"], "has no checkpoints"),
        (["verify", "{folder}", "--step", "11"], "there is no checkpoint of this step (allowed: 10, 20, 30)"),
        (["diff", "{folder}", "{folder}"], "not a checkpoint"),
        (["diff", "{folder}/step-00000010", "{folder}/step-00000011"], "not a checkpoint"),
    ],
)
def test_wrong_commands(
    arguments: list[str], said: str, folder: CheckpointFolder, capsys: pytest.CaptureFixture
) -> None:
    assert main([argument.format(folder=folder.path) for argument in arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_read(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    assert main(["list", str(folder.path)]) == 2
    assert capsys.readouterr().err == f"error: {folder.path}: Permission denied\n"
