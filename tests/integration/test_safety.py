"""Paths and files that somebody chose to do harm, in runs as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.launch import debug, fork, losses

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

WORDS = "$(touch ran) `touch ran`;touch ran"


def test_paths_of_a_recipe_are_no_shell_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are literal, as pathlib takes them; what a shell would fill in is refused."""
    home, work = tmp_path / "home", tmp_path / "work"
    for made in (home, work):
        made.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for key in ("job.dump_folder", "dataset.cache_folder"):
        for wrong in ("~/run", "$HOME/run", "${HOME}/run"):
            refused = fork(*debug(work / "run", f"--{key}={wrong}"), cwd=work, status=2).err
            assert f"{key} = '{wrong}': " in refused and not list(work.iterdir())
    run = work / "folder" / WORDS
    own = [
        f"--job.dump_folder=folder/{WORDS}",
        f"--dataset.cache_folder=cache/{WORDS}",
        f"--checkpoint.folder={WORDS}",
        f"--job.description={WORDS}",
        "--metrics.tensorboard.enabled=true",
        f"--metrics.tensorboard.folder={WORDS}-tb",
        "--profiling.enable_profiling=true",
        "--profiling.profile_freq=3",
        f"--profiling.save_traces_folder={WORDS}-tr",
    ]
    for until in (3, 5):
        fork(*debug(run, *own, f"--training.stop_after={until}", "--checkpoint.interval=3"), cwd=work)
    assert sorted(losses(run)) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in work.iterdir()) == ["cache", "folder"]
    assert {WORDS, f"{WORDS}-tb", f"{WORDS}-tr"} <= {path.name for path in run.iterdir()}
    assert (run / WORDS / "step-00000003" / "meta.json").is_file()
    assert not list(home.iterdir()) and not list(tmp_path.rglob("ran"))


def test_crafted_token_index_is_named_before_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fork(*debug(run, "--training.stop_after=1"))
    (path,) = (tmp_path / "cache").rglob("index.json")
    index = json.loads(path.read_text())
    shard = index["splits"]["train"]["shards"][0]
    (tmp_path / "secret.bin").write_bytes((path.parent / shard["file"]).read_bytes())
    for edit, problem in (
        ({"file": "../../secret.bin"}, f"{path} is not an index of token shards (splits.train.shards.0.file: "),
        ({"tokens": -shard["tokens"]}, f"{path} is not an index of token shards (splits.train.shards.0.tokens: "),
        ({"tokens": 2 * shard["tokens"]}, f"{shard['file']} has "),
    ):
        changed = json.loads(path.read_text())
        changed["splits"]["train"]["shards"][0] = {**shard, **edit}
        path.write_text(json.dumps(changed))
        refused = fork(*debug(run, "--dataset.verify=sizes"), status=2)
        assert problem in refused.err and f"delete the folder {path.parent}" in refused.err
        assert "Traceback" not in refused.text and refused.err.count("error: ") == 1
    (path.parent / shard["file"]).unlink()
    (path.parent / shard["file"]).symlink_to(tmp_path / "secret.bin")
    path.write_text(json.dumps(index))
    refused = fork(*debug(run), status=2)
    assert f"{shard['file']} is not a regular file" in refused.err and "Traceback" not in refused.text
