"""The folder of checkpoints: what is whole, what is damaged and said to be, what may go."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_prores.checkpoint.folder import CheckpointFolder, FileRecord, record
from titan_prores.components.checkpoint.dcp import DistributedCheckpoint
from titan_prores.config.errors import ConfigError
from titan_prores.output.run_folder import RunFolder

META = {"samples": 0, "global_batch_size": 1, "recipe": {}, "mesh": {}, "finite": True}


def publish(folder: CheckpointFolder, step: int, content: bytes = b"weights", **meta: object) -> Path:
    unfinished = folder.prepare(step)
    (unfinished / "__0_0.distcp").write_bytes(content)
    (unfinished / ".metadata").write_bytes(b"where each is")
    records = {name: record(unfinished / name) for name in ("__0_0.distcp", ".metadata")}
    return folder.publish(step, {"step": step, **META, **meta}, records)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoint")


def test_published_checkpoint_is_whole(folder: CheckpointFolder) -> None:
    assert folder.steps() == []
    path = publish(folder, 10)
    publish(folder, 123_456_789)
    assert folder.steps() == [10, 123_456_789] and path == folder.at(10) and path.name == "step-00000010"
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json", "meta.json"]
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
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(5))]
    for name in names:
        (unfinished / name).write_bytes(name.encode())
    path = folder.publish(5, {"step": 5, **META}, {name: record(unfinished / name) for name in names})
    for name in names:
        (path / name).write_bytes(b"x" * len(name))
    found = [folder.problems(5, hashes=True, part=part, parts=3) for part in range(3)]
    assert sorted(map(len, found)) == [2, 2, 2]
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


def test_retention_knows_what_was_validated_after_it_was_saved(folder: CheckpointFolder) -> None:
    publish(folder, 10, validation_loss=2.0)
    for step in (20, 30, 40):
        publish(folder, step)
    assert folder.expendable(1, keep_best=1) == [20, 30]
    assert folder.expendable(1, keep_best=1, losses={20: 1.0, 10: 0.5, 50: 0.1}) == [10, 30], "meta.json comes first"


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
    assert manifest["step"] == 10 and set(manifest["files"]) == {".metadata", "__0_0.distcp", "meta.json"}


@pytest.mark.parametrize("name", ["/etc/hostname", "../../secret", "..", "", "sub/file", "nul\0"])
def test_a_manifest_names_no_file_elsewhere(folder: CheckpointFolder, name: str, tmp_path: Path) -> None:
    path = publish(folder, 10) / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {"bytes": 0, "sha256": ""}
    path.write_text(json.dumps(content))
    (problem,) = folder.problems(10, hashes=True)
    assert f"names {name!r}, which is not a file of the checkpoint" in problem


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(folder: CheckpointFolder, kind: str, tmp_path: Path) -> None:
    """A link may lead to /dev/zero, and a pipe may never end."""
    path = publish(folder, 10, b"") / "__0_0.distcp"
    path.unlink()
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert folder.problems(10, hashes=True) == [f"{path} is not a regular file"]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"meta.json": {"bytes": 1, "sha256": ""}},
        [],
        None,
        {"a": None},
        {"a": {"bytes": "7", "sha256": ""}},
        {"a": {"bytes": -1, "sha256": ""}},
        {"a": {"bytes": True, "sha256": ""}},
        {"a": {"bytes": 1, "sha256": 3}},
    ],
)
def test_what_is_no_manifest_is_damage(folder: CheckpointFolder, files: object) -> None:
    path = publish(folder, 10)
    (path / "manifest.json").write_text(json.dumps({"step": 10, "files": files}))
    for hashes in (True, False):
        assert len(folder.problems(10, hashes=hashes)) == 1


@pytest.mark.parametrize("wrong", [{"recipe": None}, {"mesh": 3}, {"samples": "x"}, {"samples": -8}, {"step": 9}])
def test_what_is_no_meta_is_damage(folder: CheckpointFolder, wrong: dict[str, object]) -> None:
    """Also where its hash fits, which whoever made it can write too."""
    path = publish(folder, 10)
    (path / "meta.json").write_text(json.dumps({"step": 10, **META, **wrong}))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["meta.json"] = asdict(record(path / "meta.json"))
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert len(folder.problems(10, hashes=True)) == 1


def test_a_loss_that_is_no_number_is_not_the_best(folder: CheckpointFolder) -> None:
    for step, loss in ((1, 1.0), (2, float("nan")), (3, 0.5), (4, float("-inf")), (5, 3.0)):
        publish(folder, step, validation_loss=loss)
    assert folder.expendable(keep_latest=1, keep_best=1) == [1, 2, 4]


def test_numbers_that_are_not_finite_go_once_there_are_later_ones_that_are(folder: CheckpointFolder) -> None:
    for step, finite in ((1, True), (2, False), (3, True), (4, False)):
        publish(folder, step, finite=finite)
    assert folder.expendable(keep_latest=1) == [1, 2]


def test_links_and_files_in_the_way_are_removed_as_such(folder: CheckpointFolder, tmp_path: Path) -> None:
    elsewhere = publish(folder, 10).rename(tmp_path / "elsewhere")
    folder.at(10).symlink_to(elsewhere)
    (folder.path / ".unfinished-file").write_text("")
    (folder.path / ".unfinished-link").symlink_to(elsewhere)
    folder.remove(10)
    folder.prepare(11)
    assert [path.name for path in folder.path.iterdir()] == [".unfinished-step-00000011"]
    assert (elsewhere / "manifest.json").is_file(), "what a link leads to is not ours"


def test_one_step_has_one_name(folder: CheckpointFolder) -> None:
    publish(folder, 4).rename(folder.path / "step-000000004")
    assert folder.steps() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_folder_without_room_is_no_reason_not_to_resume(number, tmp_path, monkeypatch):
    def fails(number):
        def temporary_file(**_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)

    checkpoint = DistributedCheckpoint(
        DistributedCheckpoint.Config(), run=RunFolder(tmp_path, is_main=True), mesh=SimpleNamespace()
    )
    fails(number)
    checkpoint._check_writable()
    fails(errno.EACCES)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        checkpoint._check_writable()


def test_braces_in_a_path_are_plain_text(tmp_path):
    run = RunFolder(tmp_path / "out{x}%s", is_main=True)
    for step in (2, 4):
        publish(CheckpointFolder(run.path / "checkpoint"), step)
    alone = SimpleNamespace(on_main=lambda call: call(), gather=lambda mine: [mine], rank=0, size=1)
    checkpoint = DistributedCheckpoint(DistributedCheckpoint.Config(), run=run, mesh=alone)
    assert checkpoint.choose() == (4, f"resuming at step 4, the newest of 2 in {run.path}/checkpoint")
