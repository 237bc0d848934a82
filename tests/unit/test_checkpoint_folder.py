"""The folder of checkpoints: what is whole, what is damaged and said to be, what may go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.checkpoint._folder import CheckpointFolder, FileRecord, record


def publish(folder: CheckpointFolder, step: int, content: bytes = b"weights", **meta: object) -> Path:
    unfinished = folder.prepare(step)
    (unfinished / "__0_0.distcp").write_bytes(content)
    records = {"__0_0.distcp": record(unfinished / "__0_0.distcp")}
    return folder.publish(step, {"step": step, "finite": True, **meta}, records)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoint")


def test_published_checkpoint_is_whole(folder: CheckpointFolder) -> None:
    assert folder.steps() == []
    path = publish(folder, 10)
    publish(folder, 123_456_789)
    assert folder.steps() == [10, 123_456_789] and path == folder.at(10) and path.name == "step-00000010"
    assert sorted(p.name for p in path.iterdir()) == ["__0_0.distcp", "manifest.json", "meta.json"]
    for hashes in (False, True):
        assert folder.problems(10, hashes=hashes) == []
    assert folder.records(10)["__0_0.distcp"] == record(path / "__0_0.distcp")


def test_record_is_the_sha256_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")  # the example of FIPS 180-2
    assert record(tmp_path / "file") == FileRecord(
        3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty"])
def test_damage_is_named(folder: CheckpointFolder, name: str, damage: str) -> None:
    path = publish(folder, 10) / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-2])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"")
    problems = folder.problems(10, hashes=True)
    assert len(problems) == 1 and (name in problems[0] or name == "manifest.json")
    if damage != "flip":
        assert folder.problems(10, hashes=False)
    assert folder.steps() == [10]


def test_every_file_is_looked_at_by_one_of_the_parts(folder: CheckpointFolder) -> None:
    unfinished = folder.prepare(5)
    names = [f"__{rank}_0.distcp" for rank in range(5)]
    for name in names:
        (unfinished / name).write_bytes(name.encode())
    path = folder.publish(5, {"step": 5}, {name: record(unfinished / name) for name in names})
    for name in names:
        (path / name).write_bytes(b"x" * len(name))
    found = [folder.problems(5, hashes=True, part=part, parts=3) for part in range(3)]
    assert sorted(map(len, found)) == [1, 2, 2]
    assert all(any(name in problem for each in found for problem in each) for name in names)


def test_what_the_ranks_did_not_write_is_not_published(folder: CheckpointFolder) -> None:
    unfinished = folder.prepare(1)
    (unfinished / "__0_0.distcp").write_bytes(b"a")
    with pytest.raises(RuntimeError, match=r"differ in __0_0\.distcp"):
        folder.publish(1, {"step": 1}, {})
    assert folder.steps() == []


def test_leftovers_of_a_killed_save_go_with_the_next(folder: CheckpointFolder) -> None:
    folder.prepare(1)
    (folder.path / ".unfinished-removal-7").mkdir()
    publish(folder, 2)
    assert [p.name for p in folder.path.iterdir()] == ["step-00000002"]


def test_damaged_checkpoint_of_the_same_step_is_moved_aside(folder: CheckpointFolder) -> None:
    (publish(folder, 3) / "meta.json").unlink()
    publish(folder, 3, b"again")
    assert (folder.at(3) / "__0_0.distcp").read_bytes() == b"again"
    assert (folder.path / "set-aside-1/step-00000003/__0_0.distcp").read_bytes() == b"weights"


def test_meta_of_another_step_is_damage(folder: CheckpointFolder) -> None:
    publish(folder, 3).rename(folder.at(4))
    with pytest.raises(ValueError, match="is not of step 4"):
        folder.meta(4)
    assert folder.problems(4, hashes=False)


def test_retention(folder: CheckpointFolder) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.5, 50: 1.7}
    for step, loss in losses.items():
        publish(folder, step, validation_loss=loss)
    assert folder.expendable(0) == []
    assert folder.expendable(1) == [10, 20, 30, 40]
    assert folder.expendable(2) == [10, 20, 30]
    assert folder.expendable(1, keep_every=20) == [10, 30]
    assert folder.expendable(1, keep_best=1) == [10, 30, 40]
    assert folder.expendable(1, keep_best=2) == [10, 30]
    assert folder.expendable(1, keep_every=30, keep_best=1) == [10, 40]


def test_damaged_and_nonfinite_checkpoints_do_not_count(folder: CheckpointFolder) -> None:
    """The last good one stays, however many broken ones are newer; broken ones are left for somebody to look at."""
    publish(folder, 10)
    publish(folder, 20)
    publish(folder, 30, finite=False)
    (publish(folder, 40) / "__0_0.distcp").write_bytes(b"")
    assert folder.expendable(1) == [10]
    folder.remove(10)
    assert folder.steps() == [20, 30, 40] and folder.expendable(1) == []


def test_manifest_is_readable_json(folder: CheckpointFolder) -> None:
    manifest = json.loads((publish(folder, 10) / "manifest.json").read_text())
    assert manifest["step"] == 10 and set(manifest["files"]) == {"__0_0.distcp", "meta.json"}
