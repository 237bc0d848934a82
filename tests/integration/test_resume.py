"""Stop and resume, as a user does it: bitwise on the same ranks, within rounding on others."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from tests.integration.launch import CORPUS, debug, fork, launch, losses, rows

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[int, Path]:
    """Rank count -> run folder of 20 steps without a stop, with checkpoints of steps 10 and 20."""
    runs = {}
    for ranks in (1, 2):
        runs[ranks] = folder / f"straight-{ranks}"
        fork(*debug(runs[ranks]), ranks=ranks)
        assert sorted(losses(runs[ranks])) == list(range(1, 21))
    return runs


def resumed(folder: Path, straight: Path, name: str, ranks: int, *overrides: str) -> Path:
    """Go on from the straight run's checkpoint of step 10, in a folder that holds nothing else."""
    run = folder / name
    (run / "checkpoint").mkdir(parents=True)
    shutil.copytree(straight / "checkpoint/step-00000010", run / "checkpoint/step-00000010")
    fork(*debug(run, "--checkpoint.resume=must", *overrides), ranks=ranks)
    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_stop_and_resume_is_bitwise_the_straight_run(ranks: int, folder: Path, straight: dict[int, Path]) -> None:
    run = folder / f"stopped-{ranks}"
    stopped = launch(*debug(run, "--training.stop_after=10"), ranks=ranks)
    assert "starting at step 0" in stopped.text and sorted(losses(run)) == list(range(1, 11))
    again = fork(*debug(run), ranks=ranks)
    assert "resuming at step 10, the newest of 1" in again.text
    assert losses(run) == losses(straight[ranks])
    validation = [row for row in rows(run) if "validation_loss" in row]
    assert validation == [row for row in rows(straight[ranks]) if "validation_loss" in row]
    norms = [row["grad_norm"] for row in rows(run) if "loss" in row]
    assert norms == [row["grad_norm"] for row in rows(straight[ranks]) if "loss" in row]
    done = fork(*debug(run), ranks=ranks)
    assert "nothing left to train" in done.text and losses(run) == losses(straight[ranks])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(1000)
def test_stop_and_resume_is_bitwise_with_compile_and_activation_checkpointing(ranks: int, folder: Path) -> None:
    """Compiled code is the same in every process, whatever was compiled before it."""
    transforms = ["--transforms.compile.enabled=true", '--transforms.activation_checkpoint.mode="selective"']
    validates = ranks == 1  # compiling for that too takes as long again
    if not validates:
        transforms += ["--validation.enabled=false", "--transforms.compile.backend=aot_eager"]

    def run(name: str, *overrides: str) -> str:
        finished = fork(*debug(folder / name, *transforms, *overrides), ranks=ranks, timeout=300)
        # A layer and the loss, and both without gradients.
        assert "compile: 2 graphs after 2 steps" in finished.text
        assert ("2 more graphs for validation" in finished.text) == validates
        assert "compiled again" not in finished.text
        return finished.text

    straight, stopped = f"compiled-{ranks}", f"compiled-stopped-{ranks}"
    run(straight)
    run(stopped, "--training.stop_after=10")
    assert "resuming at step 10" in run(stopped)
    assert losses(folder / stopped) == losses(folder / straight)
    norms = {name: [row["grad_norm"] for row in rows(folder / name) if "loss" in row] for name in (straight, stopped)}
    assert norms[stopped] == norms[straight]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_on_other_ranks(before: int, after: int, folder: Path, straight: dict[int, Path]) -> None:
    """Same samples, so the next ten losses are those of the run that stays, up to rounding."""
    run = resumed(folder, straight[before], f"from-{before}-to-{after}", after)
    control = {step: loss for step, loss in losses(straight[before]).items() if step > 10}
    found = losses(run)
    assert found.keys() == control.keys()
    assert max(abs(found[step] - control[step]) for step in control) <= 1e-5


def test_resume_from_fsdp2_to_tensor_parallel_to_one_process(folder: Path) -> None:
    """Ten steps on each; after each change the losses are those of the run that goes on where it was."""
    steps = ("--training.steps=30",)
    runs = {name: folder / f"layouts-{name}" for name in ("fsdp2", "tp2", "one")}
    fork(*debug(runs["fsdp2"], *steps, "--training.stop_after=20"), ranks=2)
    for before, after, step, ranks, layout in (
        ("fsdp2", "tp2", 10, 2, ["--parallelism.tensor_parallel_degree=2"]),
        ("tp2", "one", 20, 1, []),
    ):
        name = f"checkpoint/step-{step:08d}"
        shutil.copytree(runs[before] / name, runs[after] / name)
        fork(*debug(runs[after], *steps, "--checkpoint.resume=must", *layout), ranks=ranks)
        control, found = losses(runs[before]), losses(runs[after])
        assert sorted(found) == list(range(step + 1, 31))
        changed = range(step + 1, step + 11)
        assert max(abs(found[step] - control[step]) for step in changed) <= 1e-5
    metas = {name: json.loads((run / "checkpoint/step-00000020/meta.json").read_text()) for name, run in runs.items()}
    assert [metas[name]["samples"] for name in ("fsdp2", "tp2", "one")] == [320] * 3
    assert metas["tp2"]["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "tp": 2}


def test_resume_with_other_microbatches_and_workers(folder: Path, straight: dict[int, Path]) -> None:
    run = resumed(
        folder, straight[1], "other-microbatches", 1, "--training.local_batch_size=4", "--dataset.num_workers=2"
    )
    control = losses(straight[1])
    assert max(abs(loss - control[step]) for step, loss in losses(run).items()) <= 1e-5


def test_resume_at_a_step_sets_later_work_aside(folder: Path, straight: dict[int, Path]) -> None:
    run = folder / "aside"
    shutil.copytree(straight[1], run)
    finished = fork(*debug(run, "--checkpoint.resume=10", "--training.stop_after=15"))
    assert "resuming at step 10, as checkpoint.resume says" in finished.text
    assert losses(run) == {step: loss for step, loss in losses(straight[1]).items() if step <= 15}
    aside = rows(run, "metrics.after-step-10.jsonl")
    assert [row["step"] for row in aside if "loss" in row] == list(range(11, 21))
    assert (run / "checkpoint/set-aside-1/step-00000020/meta.json").is_file()
    # The newest is of the new course, not the one set aside.
    assert "nothing left" in fork(*debug(run, "--training.stop_after=15")).text
    assert "resuming at step 15" in fork(*debug(run)).text
    assert losses(run) == losses(straight[1])


def test_what_would_lose_or_mix_runs_is_refused(folder: Path, straight: dict[int, Path]) -> None:
    run = folder / "refused"
    shutil.copytree(straight[1], run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "train.log"}

    def refused(*overrides: str) -> str:
        finished = fork(*debug(run, *overrides), status=2)
        assert "Traceback" not in finished.text
        return finished.err

    assert "would start again at step 0 over existing checkpoints" in refused("--checkpoint.resume=never")
    assert "no checkpoint of this step" in refused("--checkpoint.resume=7")
    message = refused("--model.n_layers=3", "--training.seed=1", "--transforms.prores.residual_schedule.T=3")
    for key in ("model.n_layers = 3: was 4", "training.seed = 1: was 0", "prores.residual_schedule.T = 3.0: was 2.0"):
        assert key in message
    assert "global_batch_size = -1: comes to 8 here and was 16" in refused("--training.global_batch_size=-1")
    # Also where the checkpoints are not looked at.
    for elsewhere in ("--checkpoint.enabled=false", "--checkpoint.folder=other"):
        assert "would start at step 0 over" in refused(elsewhere)
    assert "dataset.name = 'python_stdlib': was 'text'" in refused("--dataset.name=python_stdlib")
    # Where the text lies is free to change, what it says is not.
    (folder / "moved.txt").write_text(CORPUS.read_text())
    (folder / "changed.txt").write_text(CORPUS.read_text() + "\nOne more paragraph.\n")
    fork(*debug(run, f"--dataset.files=['{folder / 'moved.txt'}']"))
    changed = refused(f"--dataset.files=['{folder / 'changed.txt'}']")
    assert "not what it was" in changed and f"1 file new, such as {folder / 'changed.txt'}" in changed
    assert "nothing to resume" in fork(*debug(folder / "empty", "--checkpoint.resume=must"), status=2).err
    written_by_the_moved_run = ("recipe", "env", "status.json", "train.log", "events.")
    for path, content in before.items():
        assert path.name.startswith(written_by_the_moved_run) or path.read_bytes() == content, path


def test_a_step_to_resume_at_holds_for_the_first_attempt_of_torchrun(
    folder: Path, straight: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones would throw away what the run has done since."""
    run = folder / "attempts"
    shutil.copytree(straight[1], run)
    own = debug(run, "--checkpoint.resume=10", "--training.stop_after=15")
    assert "resuming at step 10, as checkpoint.resume says" in fork(*own).text
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = fork(*own)
    assert "resuming at step 15, the newest" in again.text and "moved to" not in again.text


def test_a_place_for_checkpoints_is_tried_before_the_run(folder: Path) -> None:
    for wrong in ("../shared", "/tmp/elsewhere", "."):
        refused = fork(*debug(folder / "place", f"--checkpoint.folder={wrong}"), status=2)
        assert "checkpoint.folder" in refused.err and "is not below the run folder" in refused.err
    (folder / "place").mkdir()
    (folder / "place/taken").write_text("")
    refused = fork(*debug(folder / "place", "--checkpoint.folder=taken/deeper"), status=2)
    assert "cannot be written: Not a directory" in refused.err


def test_free_changes_go_on_and_are_said(folder: Path, straight: dict[int, Path]) -> None:
    run = resumed(folder, straight[1], "free", 1, "--optimizer.lr=1e-3", "--metrics.log_freq=5")
    log = (run / "train.log").read_text()
    assert "changed since the checkpoint: optimizer.lr: 0.003 -> 0.001" in log
    assert "learning rate before -> now: step 11: 0.003 -> 0.001; step 12:" in log
    assert next(row["lr"] for row in rows(run) if "lr" in row) == pytest.approx(1e-3)


def test_half_written_checkpoint_is_not_trusted(folder: Path, straight: dict[int, Path]) -> None:
    run = folder / "half"
    shutil.copytree(straight[1], run)
    (run / "checkpoint/step-00000020").rename(run / "checkpoint/.unfinished-step-00000020")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "lo')  # a writer that was killed
    finished = fork(*debug(run))
    assert "resuming at step 10" in finished.text
    assert losses(run) == losses(straight[1])
    assert sorted(p.name for p in (run / "checkpoint").iterdir()) == ["step-00000010", "step-00000020"]


def test_checkpoint_says_what_it_is_of(straight: dict[int, Path]) -> None:
    meta = json.loads((straight[2] / "checkpoint/step-00000010/meta.json").read_text())
    assert meta["step"] == 10 and meta["samples"] == 160 and meta["mesh"]["dp_shard"] == 2
    assert meta["recipe"]["model"]["n_layers"] == 4 and meta["recipe"]["transforms"]["prores"]["enabled"] is True


DROPOUT = '''
import torch.nn.functional as F
from titan_prores import lookup, register


@register("model", "dropout_llama")
class DropoutLlama(lookup("model", "llama")):
    """Llama whose embedding is dropped out in part."""

    def __init__(self, config, **context):
        super().__init__(config, **context)
        self.tok_embeddings.register_forward_hook(lambda m, a, out: F.dropout(out, 0.2, self.training))
'''


def test_random_numbers_of_a_model_resume_bitwise(folder: Path, straight: dict[int, Path]) -> None:
    """They depend on seed, step and data rank alone, so there is no random state to save."""
    (folder / "dropout.py").write_text(DROPOUT)
    own = [f"--import={folder / 'dropout.py'}", "--model.name=dropout_llama"]
    fork(*debug(folder / "dropout-straight", *own), ranks=2)
    fork(*debug(folder / "dropout-stopped", *own, "--training.stop_after=10"), ranks=2)
    fork(*debug(folder / "dropout-stopped", *own), ranks=2)
    assert losses(folder / "dropout-stopped") == losses(folder / "dropout-straight")
    assert losses(folder / "dropout-straight") != losses(straight[2])


def test_default_batch_size_resumes_on_other_ranks_when_it_is_named(folder: Path) -> None:
    """-1 is local_batch_size x ranks: what it came to has to stay."""
    run = folder / "default-batch"
    own = ["--training.global_batch_size=-1", "--training.steps=6"]
    fork(*debug(run, *own, "--training.stop_after=3"), ranks=2)
    refused = fork(*debug(run, *own), status=2)
    assert "comes to 8 here and was 16 in the checkpoint: set it to 16" in refused.err
    fork(*debug(run, "--training.steps=6", "--training.global_batch_size=16"))
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]


def test_damaged_checkpoints_are_named_and_nothing_is_deleted(folder: Path, straight: dict[int, Path]) -> None:
    run = folder / "damaged"
    shutil.copytree(straight[1], run)
    step_10, step_20 = (run / f"checkpoint/step-000000{k}" for k in (10, 20))
    data = bytearray((step_20 / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (step_20 / "__0_0.distcp").write_bytes(data)
    finished = fork(*debug(run))
    assert "checkpoint of step 20 is damaged" in finished.text and "its hash differs" in finished.text
    assert "resuming at step 10" in finished.text and "damaged: step 20" in finished.text
    assert losses(run) == losses(straight[1])
    aside = run / "checkpoint/set-aside-1/step-00000020"
    assert (aside / "__0_0.distcp").read_bytes() == data, "the damaged one is kept for somebody to look at"

    refused = fork(*debug(run, "--checkpoint.resume=15"), status=2)
    assert "there is no checkpoint of this step" in refused.err and "has steps 10, 20" in refused.err
    (step_20 / "__0_0.distcp").write_bytes(data[:-1])
    for policy in ("always", "sizes"):
        refused = fork(*debug(run, "--checkpoint.resume=20", f"--checkpoint.verify={policy}"), status=2)
        assert "no checkpoint is whole (step 20 in" in refused.err and "bytes instead of" in refused.text
    (step_10 / "manifest.json").unlink()
    before = sorted(path for path in run.rglob("*") if "checkpoint" in path.parts)
    refused = fork(*debug(run), status=2)
    assert "no checkpoint is whole (step 20, step 10 in" in refused.err
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "no checkpoint is whole" in status["error"], (
        "or it would be requeued for ever"
    )
    assert sorted(path for path in run.rglob("*") if "checkpoint" in path.parts) == before
    trusted = fork(*debug(run, "--checkpoint.resume=10", "--checkpoint.verify=never"))
    assert "resuming at step 10" in trusted.text and losses(run) == losses(straight[1])


def test_fresh_start_from_weights_alone(folder: Path, straight: dict[int, Path]) -> None:
    """Optimizer, data and schedules start anew; on another layout too. What does not fit is named."""
    source = straight[1] / "checkpoint/step-00000020"
    runs = {ranks: folder / f"from-weights-{ranks}" for ranks in (1, 2)}
    for ranks, run in runs.items():
        own = [f"--checkpoint.init_from={source}", "--training.steps=6", "--transforms.prores.start=fresh"]
        started = fork(*debug(run, *own), ranks=ranks)
        assert f"weights taken from {source}" in started.text
        assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6] and rows(run)[0]["lr"] == 0
    # alpha starts at 0 again, so the first loss is that of the bare embedding; it ends where a trained model is.
    assert losses(runs[1])[6] < 0.9 * losses(straight[1])[6]
    assert losses(runs[2]) == pytest.approx(losses(runs[1]), abs=1e-5)

    warm = [f"--checkpoint.init_from={source}", "--transforms.prores.start=warm"]
    fork(*debug(folder / "from-weights-warm", *warm, "--training.stop_after=1"))
    ended = [row["validation_loss"] for row in rows(straight[1]) if "validation_loss" in row][-1]
    (went_on,) = (row["validation_loss"] for row in rows(folder / "from-weights-warm") if "validation_loss" in row)
    assert went_on == pytest.approx(ended, abs=1e-6), "with every alpha at 1, as the weights were trained"

    def refused(*own: str) -> str:
        return fork(*debug(folder / "from-none", *warm, *own), status=2).err

    unsaid = fork(*debug(folder / "from-none", warm[0]), status=2).err
    assert f"transforms.prores.start: has to be set, as the weights come from {source}, trained 20 steps with" in unsaid
    assert "it lacks layers.4.attention.wq.weight" in refused("--model.n_layers=5")
    assert "the model has no layers.3." in refused("--model.n_layers=3")
    assert "other shapes of layers.0.feed_forward" in refused("--model.ffn_dim=192")
    assert "init_from_missing matches no weight: nothing" in refused("--checkpoint.init_from_missing=['nothing']")
    assert "not a checkpoint" in fork(*debug(folder / "x", "--checkpoint.init_from=nowhere"), status=2).err
    more = ["--model.n_layers=5", "--checkpoint.init_from_missing=['layers.4.*']", "--training.stop_after=2"]
    fork(*debug(folder / "deeper", *warm, *more))


@pytest.mark.parametrize("ranks", [1, 2])
def test_altered_token_shard_is_named_before_training(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fork(*debug(run), ranks=ranks)
    (shard,) = (tmp_path / "cache").rglob("train-00000.bin")
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    own = debug(run, "--checkpoint.resume=10")
    refused = fork(*own, ranks=ranks, status=2)
    assert f"{shard} does not hold what was written" in refused.err
    assert (run / "checkpoint/step-00000020").is_dir()
    fork(*own, "--dataset.verify=sizes", ranks=ranks)
    shard.write_bytes(content[:-2])
    assert f"{shard} has " in fork(*own, "--dataset.verify=sizes", ranks=ranks, status=2).err


def test_crafted_checkpoint_runs_no_code(folder: Path, straight: dict[int, Path]) -> None:
    """Not even with hashes that fit, which whoever made it can write too."""
    run, victim = folder / "crafted", folder / "victim"
    shutil.copytree(straight[1], run)
    metadata = run / "checkpoint/step-00000020/.metadata"
    metadata.write_bytes(pickle.dumps(Touch(victim)))
    pickle.loads(metadata.read_bytes())
    assert victim.exists(), "it is what it is meant to be"
    victim.rmdir()
    failed = fork(*debug(run, "--checkpoint.verify=never", "--checkpoint.resume=20"), status=1)
    assert ".metadata asks for posix.mkdir, which has no place" in failed.err
    assert not victim.exists()


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_saving_does_not_touch_the_run(folder: Path) -> None:
    """Not even before the optimizer has taken a step, because its first batch was passed over."""
    (folder / "nan_first.py").write_text(NAN_FIRST)
    own = [f"--import={folder / 'nan_first.py'}", "--loss.name=nan_first", "--training.on_nonfinite=skip"]
    runs = {interval: folder / f"interval-{interval}" for interval in (1, 100)}
    for interval, run in runs.items():
        fork(*debug(run, *own, "--training.stop_after=5", f"--checkpoint.interval={interval}"))
    assert str(losses(runs[1])) == str(losses(runs[100])) and losses(runs[1])[1] == "NaN"
    again = folder / "from-empty-optimizer"
    shutil.copytree(runs[1] / "checkpoint/step-00000001", again / "checkpoint/step-00000001")
    fork(*debug(again, *own, "--training.stop_after=5"))
    assert losses(again) == {step: loss for step, loss in losses(runs[1]).items() if step > 1}


NAN_FIRST = '''
import torch
from titan_prores import lookup, register

CrossEntropy = lookup("loss", "cross_entropy")


@register("loss", "nan_first")
class NanFirst(CrossEntropy):
    """Cross-entropy, but not a number where the model is still as it was drawn."""

    def __call__(self, logits, labels):
        value = super().__call__(logits, labels)
        return value * float("nan") if torch.is_grad_enabled() and value / labels.numel() > 5.503 else value
'''


def test_frozen_parameters_stay_as_they_are_and_resume_bitwise(folder: Path) -> None:
    """On the same rank; on two ranks of tensor parallelism within rounding."""
    own = ["--model.name=tests.distributed.frozen:FrozenLlama"]
    runs = {name: folder / f"frozen-{name}" for name in ("straight", "stopped")}
    fork(*debug(runs["straight"], *own, "--training.stop_after=6"))
    text = fork(*debug(runs["stopped"], *own, "--training.stop_after=3")).text
    assert re.search(r"FrozenLlama: [\d.]+M parameters \([\d.]+M trained\)", text)
    moved = folder / "frozen-moved"
    shutil.copytree(runs["stopped"], moved)
    fork(*debug(runs["stopped"], *own, "--training.stop_after=6"))
    assert losses(runs["stopped"]) == losses(runs["straight"])
    fork(*debug(moved, *own, "--training.stop_after=6", "--parallelism.tensor_parallel_degree=2"), ranks=2)
    assert losses(moved) == pytest.approx(losses(runs["straight"]), abs=1e-5)
