"""What a run leaves behind, parts of one's own, and how failures end."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration.launch import REPOSITORY, Forks, debug, finish, fork, launch, losses, processes_of, rows, start

pytestmark = pytest.mark.timeout(300)

GOLDEN = Path(__file__).with_name("golden_losses.json")


def test_debug_run_leaves_what_it_should(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = launch(
        *debug(
            run,
            "--metrics.tensorboard.enabled=true",
            "--metrics.layer_grad_norm.every_steps=1",
            "--profiling.enable_profiling=true",
            "--training.deterministic=true",
            "--training.gc_freq=5",
        )
    )
    for name in ("recipe.toml", "env.json", "train.log", "metrics.jsonl", "tensorboard", "checkpoint", "profile_trace"):
        assert (run / name).exists(), name
    for word in ("validation   loss", "tokens/s", f"run folder   {run}", "finished     step 20"):
        assert word in finished.out
    steps = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    for row in steps:
        t, k = row["step"] - 1, row["step"]  # update k shows what it used
        assert row["tokens"] == k * 16 * 64
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["lr"] == pytest.approx(3e-3 * (t / 5 if t < 5 else (20 - t) / 2 if 20 - t < 2 else 1))
        assert row["alpha"] == pytest.approx([min(t / (2 * layer), 1) for layer in (1, 2, 3, 4)], rel=1e-6)
        assert (row["alpha_min"], row["alpha_max"]) == (min(row["alpha"]), max(row["alpha"]))
        assert len(row["layer_grad_norm"]) == 4 and row["tokens_per_second"] > 0 and row["memory_gib"] > 0
    assert steps[0]["layer_grad_norm"] == [0.0] * 4  # alpha = 0
    validation = [row for row in rows(run) if "validation_loss" in row]
    assert [row["step"] for row in validation] == [10, 20]
    assert validation[1]["validation_perplexity"] == pytest.approx(math.exp(validation[1]["validation_loss"]))
    assert validation[1]["validation_loss"] < validation[0]["validation_loss"] < math.log(257)
    environment = json.loads((run / "env.json").read_text())
    assert environment["versions"]["torch"] and environment["mesh"]["dp_shard"] == 1
    # The resolved recipe is a recipe: it asks for the very same run.
    again = fork("--config", str(run / "recipe.toml"))
    assert "nothing left to train" in again.text and "changed since" not in again.text


@pytest.mark.slow
def test_precisions(tmp_path: Path) -> None:
    """bf16 compute with fp32 weights stays near fp32; pure bf16 trains."""
    last = {}
    for name, overrides in {
        "fp32": [],
        "mixed": ["--training.mixed_precision_param=bfloat16"],
        "pure": ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"],
    }.items():
        fork(*debug(tmp_path / name, *overrides, "--checkpoint.interval=10"), ranks=2)
        found = losses(tmp_path / name)
        last[name] = found[20]
        assert found[20] < found[1] - 1
    assert last["fp32"] != last["mixed"] != last["pure"]
    assert last["mixed"] == pytest.approx(last["fp32"], rel=0.01)
    assert last["pure"] == pytest.approx(last["fp32"], rel=0.1)


@pytest.mark.slow
def test_losses_of_the_debug_recipe_are_the_golden_ones(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Relative 1e-4; `pytest --update-golden` rewrites them."""
    import torch

    found = {}
    for name, overrides in {"prores": [], "baseline": ["--transforms.prores.enabled=false"]}.items():
        fork(*debug(tmp_path / name, "--training.local_batch_size=4", *overrides))
        found[name] = list(losses(tmp_path / name).values())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    for name, values in found.items():
        assert values == pytest.approx(golden[name], rel=1e-4), f"{name} (golden values from torch {golden['torch']})"


OWN_PARTS = '''
import numpy as np
from titan_prores import DatasetSection, register, Section, setting


@register("residual_schedule", "all-or-nothing")
class AllOrNothing:
    """A layer is switched on when its turn comes."""

    class Config(Section):
        every: int = setting(3, "updates between layers", unit="optimizer steps", gt=0)

    def __init__(self, config, *, n_layers):
        self.every, self.n_layers = config.every, n_layers

    def alpha(self, step):
        return (np.arange(self.n_layers) * self.every <= step).astype(np.float64)


@register("lr_scheduler", "sawtooth")
class Sawtooth:
    """Up and down again."""

    class Config(Section):
        period: int = setting(4, "length of a tooth", gt=0)

    def __init__(self, config, *, total_steps):
        self.period = config.period

    def factor(self, step):
        return (step % self.period + 1) / self.period


@register("dataset", "counting")
class Counting:
    """Numbers, one a document."""

    class Config(DatasetSection):
        limit: int = setting(5000, "how far to count", gt=0)

    def __init__(self, config):
        self.config = config

    def documents(self):
        yield from (f"this is number {number}" for number in range(self.config.limit))

    def fingerprint(self):
        return f"counting to {self.config.limit}"
'''


def test_components_of_ones_own_from_outside_the_checkout(tmp_path: Path) -> None:
    """An alpha schedule, an LR schedule and a data set in a folder of a user's, with no change here."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "parts.py").write_text(OWN_PARTS)
    (project / "own.toml").write_text(f'''
base = "{REPOSITORY / "train_configs/debug.toml"}"
import = "./parts.py"
[dataset]
name = "counting"
cache_folder = "{tmp_path / "cache"}"
[lr_scheduler]
name = "sawtooth"
[transforms.prores]
residual_schedule = {{ name = "all-or-nothing", every = 2 }}
[job]
dump_folder = "run"
''')
    fork("--config", "own.toml", ranks=2, cwd=project)
    steps = [row for row in rows(project / "run") if "loss" in row]
    assert [row["lr"] for row in steps[:5]] == pytest.approx([3e-3 * f for f in (0.25, 0.5, 0.75, 1, 0.25)])
    assert [row["alpha"] for row in steps[:4]] == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert steps[-1]["loss"] < 4
    wrong = fork("--config", "own.toml", "--transforms.prores.residual_schedule.evry=2", cwd=project, status=2)
    assert "did you mean transforms.prores.residual_schedule.every?" in wrong.err
    assert "all-or-nothing" in fork("--config", "own.toml", "--check", cwd=project).out


FAULTY_PARTS = '''
import os, signal, torch
import torch.distributed as dist
from titan_prores import lookup, Metric, register, Section, setting


@register("metrics", "trouble")
class Trouble(Metric):
    """Fails as told."""

    class Config(Section):
        rank: int = setting(1, "which rank")
        step: int = setting(3, "in which step")
        how: str = setting("raise", "raise, kill or sleep")

    def measure(self, step, model):
        c = self.config
        if step == c.step and dist.get_rank() == c.rank:
            if c.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if c.how == "sleep":
                import time
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun would give it half a minute to act on it
                time.sleep(3600)
            raise ValueError("the sprocket has come off")
        return {}


@register("loss", "sometimes_nan")
class SometimesNaN(lookup("loss", "cross_entropy")):
    """Cross-entropy, but not a number for one microbatch in 4 optimizer steps."""

    calls = 0

    class Config(Section):
        bad_calls: tuple[int, ...] = setting((9,), "which microbatches of rank 0, from 1")

    def __init__(self, config):
        self.bad = config.bad_calls

    def __call__(self, logits, labels):
        value = super().__call__(logits, labels)
        if torch.is_grad_enabled() and dist.get_rank() == 0:
            self.calls += 1
            if self.calls in self.bad:
                return value * float("nan")
        return value
'''


@pytest.fixture
def faulty(tmp_path: Path) -> list[str]:
    (tmp_path / "faulty.py").write_text(FAULTY_PARTS)
    return debug(tmp_path / "run", f"--import={tmp_path / 'faulty.py'}", "--training.local_batch_size=4")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "own_launcher"), [("raise", False), ("raise", True), ("kill", True)])
def test_a_failure_on_one_rank_ends_all_with_one_summary(
    how: str, own_launcher: bool, faulty: list[str], tmp_path: Path
) -> None:
    own = [*faulty, "--metrics.trouble.enabled=true", f"--metrics.trouble.how={how}"]
    finished = launch(*own, ranks=2, status=1, own_launcher=own_launcher)
    if how == "raise":
        assert finished.err.count("rank 1 failed in step 3: ValueError: the sprocket has come off") == 1
        assert "at faulty.py:" in finished.err  # where it was raised, not where it was called
        assert "stopped: rank 1 failed first, in step 3" in finished.err
        failed = {"error": "the sprocket has come off", "error_type": "ValueError", "rank": 1, "stage": "step 3"}
    else:
        assert finished.err.splitlines()[-1].startswith("error: rank 1 was killed by SIGKILL")
        failed = {"error_type": "PeerError", "rank": 0}
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert {key: status[key] for key in failed} == failed
    if own_launcher:
        assert "Traceback" not in finished.err
        assert ("the sprocket has come off" in (tmp_path / "run/train.log").read_text()) == (how == "raise")
    else:  # torchrun's own summary agrees
        assert re.search(r"Root Cause .*\n\[0\]:\n.*\n.*\n\s+rank\s+: 1 ", finished.err), finished.err
    assert sorted(losses(tmp_path / "run")) in ([1, 2], [1, 2, 3])


@pytest.mark.slow
def test_the_late_rank_is_named(faulty: list[str], tmp_path: Path) -> None:
    finished = launch(
        *faulty,
        "--metrics.trouble.enabled=true",
        "--metrics.trouble.how=sleep",
        "--comm.train_timeout_seconds=6",
        ranks=2,
        status=None,
    )
    assert finished.status not in (0, None)
    assert "late: rank 1 (step 3" in finished.err


@pytest.mark.slow
def test_interrupt_leaves_no_process_and_can_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*debug(run, "--training.steps=5000", "--dataset.num_workers=1"), ranks=2, own_launcher=True)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len(rows_so_far(run)) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert len(processes_of(process)) >= 5  # the launcher, two ranks, a worker each
    process.send_signal(signal.SIGINT)
    finished = finish(process)  # fails when a process is left
    assert finished.status == 75
    status = json.loads((run / "status.json").read_text())
    stopped_at = status["step"]
    assert status["state"] == "stopped" and status["signal"] == "SIGINT" and stopped_at >= 4
    assert max(p.name for p in (run / "checkpoint").iterdir()) == f"step-{stopped_at:08d}"
    assert "everything saved" in finished.text
    assert "Traceback" not in finished.err and "second signal" not in finished.err
    end = stopped_at + 5
    again = fork(*debug(run, "--training.steps=5000", f"--training.stop_after={end}"), ranks=2)
    assert f"resuming at step {stopped_at}" in again.text
    assert sorted(losses(run)) == list(range(1, end + 1))
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_a_second_one_ends_at_once(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = Forks(*debug(run, "--training.steps=5000"))
    while not (run / "metrics.jsonl").exists() or not rows_so_far(run):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert finish(process).status == 75
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and status["signal"] == number.name
    assert (run / f"checkpoint/step-{status['step']:08d}").is_dir()

    slow = tmp_path / "slow.py"
    slow.write_text(SLOW_VALIDATION)
    process = Forks(*debug(tmp_path / "slow", f"--import={slow}", "--validation.name=slow", "--validation.freq=1"))
    while not (tmp_path / "validating").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    time.sleep(1.5)  # a second one within a second is taken for the same
    assert process.poll() is None
    process.send_signal(number)
    assert finish(process).status == 128 + number


SLOW_VALIDATION = """
import pathlib, time
from titan_prores import lookup, register


@register("validator", "slow")
class Slow(lookup("validator", "perplexity")):
    "Takes its time."

    def validate(self, *args, **kwargs):
        pathlib.Path(__file__).with_name("validating").touch()
        for _ in range(600):
            time.sleep(0.1)
        return super().validate(*args, **kwargs)
"""


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text(ENDLESS_TEXT)
    process = Forks(*debug(tmp_path / "run", f"--import={endless}", "--dataset={name = 'endless'}"))
    while not (tmp_path / "reading").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    finished = finish(process)
    assert finished.status == 75 and "stopped by SIGTERM in preparing data" in finished.text
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"], status["signal"]) == ("stopped", 0, "SIGTERM")


ENDLESS_TEXT = """
import itertools, pathlib
from titan_prores import DatasetSection, register


@register("dataset", "endless")
class Endless:
    "Never ends."

    Config = DatasetSection

    def __init__(self, config):
        pass

    def documents(self):
        pathlib.Path(__file__).with_name("reading").touch()
        return (f"document {n}" for n in itertools.count())

    def fingerprint(self):
        return "endless"
"""


def rows_so_far(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_nonfinite_loss_stops_or_is_passed_over(faulty: list[str], tmp_path: Path) -> None:
    stopped = fork(*faulty, "--loss.name=sometimes_nan", ranks=2, status=None)
    assert stopped.status not in (0, None) and "NonFiniteError: step 5: loss nan" in stopped.err
    again = [a.replace(str(tmp_path / "run"), str(tmp_path / "skip")) for a in faulty]
    fork(*again, "--loss.name=sometimes_nan", "--training.on_nonfinite=skip", ranks=2)
    steps = [row for row in rows(tmp_path / "skip") if "loss" in row]
    assert [row["step"] for row in steps if row.get("skipped")] == [5] and steps[4]["loss"] == "NaN"
    assert all(isinstance(row["loss"], float) for row in steps if row["step"] != 5) and len(steps) == 20
    endless = [a.replace(str(tmp_path / "run"), str(tmp_path / "endless")) for a in faulty]
    failed = fork(
        *endless,
        "--loss.name=sometimes_nan",
        "--training.on_nonfinite=skip",
        "--training.max_nonfinite_skips=2",
        "--loss.bad_calls=[9, 11, 13]",
        ranks=2,
        status=None,
    )
    assert failed.status not in (0, None) and "after 2 batches skipped in a row" in failed.err


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = Forks(*debug(run, "--training.steps=5000"))
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.1)
    second = fork(*debug(run), status=2)
    assert "job.dump_folder" in second.err and "another run" in second.err
    process.send_signal(signal.SIGINT)
    assert finish(process).status == 75


def test_wrong_recipe_exits_2_before_anything_is_written(tmp_path: Path) -> None:
    finished = launch(*debug(tmp_path / "run", "--training.stpes=5"), status=2)
    assert "did you mean training.steps?" in finished.err and not (tmp_path / "run").exists()
    finished = fork(*debug(tmp_path / "run", "--optimizer.groups=[{patterns=['*.wieght']}]"), status=2)
    assert "matches no trained parameter" in finished.err and not (tmp_path / "run").exists()


def test_check_prints_what_a_run_would_be_for_any_world_size() -> None:
    finished = fork(
        "--config",
        "train_configs/debug.toml",
        "--check",
        "--world-size=8",
        "--training.global_batch_size=32",
        "--parallelism.data_parallel_replicate_degree=2",
    )
    for word in (
        "dp_replicate 2 x dp_shard 4 x tp 1 = 8 ranks",
        "1. prores: 8 residual adds scaled, linear (T = 2)",
        "2. fsdp: HSDP, 2 replicas of 4 shards",
        "234,176",
        "32 = 8 data ranks x 4 sequences",
    ):
        assert word in finished.out.replace("2,048", "32"), word


LONELY = '''
import torch.distributed as dist
from titan_prores import ConfigError, Metric, register, Section, ValidatorSection


@register("metrics", "lonely")
class Lonely(Metric):
    """Finds a fault of the recipe on one rank alone, or fails where only rank 0 works."""

    class Config(Section):
        how: str

    def start(self, run, info):
        if self.config.how == "main":
            raise OSError("no pen to write with")

    def measure(self, step, model):
        if self.config.how == "rank" and dist.get_rank() == 1:
            raise ConfigError("data", "record 17 is bad")
        return {"loss": 0.0} if self.config.how == "key" else {}


@register("validator", "accuracy")
class Accuracy:
    """Another measure."""

    Config = ValidatorSection

    def __init__(self, config):
        pass

    def validate(self, context):
        return {"accuracy": 0.25}
'''


@pytest.mark.slow
def test_faults_that_one_rank_meets_alone_are_told(tmp_path: Path) -> None:
    (tmp_path / "lonely.py").write_text(LONELY)
    common = debug(tmp_path / "run", f"--import={tmp_path / 'lonely.py'}")
    told = fork(*common, "--metrics.lonely.how=rank", ranks=2, status=None)
    assert told.status not in (0, None) and told.err.count("error: data: record 17 is bad") == 1
    told = fork(*common, "--metrics.lonely.how=main", ranks=2, status=None)
    assert told.err.count("rank 0 failed in starting the metrics: OSError: no pen to write with") == 1
    told = fork(*common, "--metrics.lonely.how=key", status=1)
    assert "Lonely gives loss, which" in told.err or "a metric gives loss, which" in told.err


def test_a_validator_of_ones_own_measures_what_it_likes(tmp_path: Path) -> None:
    (tmp_path / "lonely.py").write_text(LONELY)
    finished = fork(
        *debug(
            tmp_path / "run",
            f"--import={tmp_path / 'lonely.py'}",
            "--validation.name=accuracy",
            "--training.stop_after=2",
        )
    )
    assert "validation   accuracy 0.2500" in finished.out
    assert rows(tmp_path / "run")[-1] == {"step": 2, "validation": True, "accuracy": 0.25}


@pytest.mark.slow
def test_a_probe_without_held_out_text_is_refused(tmp_path: Path) -> None:
    overrides = ["--dataset.validation_fraction=0", "--metrics.branch_ratio.every_steps=5"]
    finished = fork(*debug(tmp_path / "run"), *overrides, status=2)
    assert "training.seq_len = 64: the validation split has 0 tokens" in finished.err
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


Z_LOSS = '''
import torch, torch.nn.functional as F
from titan_prores import as_terms, LossTerms, Phase, register, Section, setting, Transform


@register("transform", "z_loss")
class ZLoss(Transform):
    """Adds the squared logarithm of the softmax's denominator to what training descends."""

    class Config(Section):
        weight: float = setting(0.1, "of the term")

    phase = Phase.REWRITE
    changes_model = False

    def apply(self, model, context):
        pass

    def wrap_loss(self, loss):
        def with_z_loss(logits, labels):
            found = as_terms(loss(logits, labels))
            z = logits.float().logsumexp(-1).square() * (labels != -100)
            return LossTerms(found.cross_entropy, {**found.others, "z_loss": self.config.weight * z.sum()})

        return with_z_loss


@register("loss", "smoothed")
class Smoothed:
    """A scalar that is not the cross-entropy."""

    class Config(Section):
        pass

    def __init__(self, config):
        pass

    def __call__(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", label_smoothing=0.5)
'''


@pytest.mark.slow
def test_a_term_of_the_training_loss_is_trainings_alone(tmp_path: Path) -> None:
    """In step 1 the learning rate is 0 and all weights are equal: rows may differ in the term and gradients alone."""
    (tmp_path / "parts.py").write_text(Z_LOSS)
    own = {
        "plain": [],
        "z": ["--transforms.z_loss.enabled=true"],
        "compiled": ["--transforms.z_loss.enabled=true", "--transforms.compile.backend=aot_eager"],
        "smoothed": ["--loss.name=smoothed"],
    }
    found = {}
    for name, ranks in (("plain", 1), ("z", 1), ("compiled", 2), ("smoothed", 1)):
        run = tmp_path / name
        given = debug(run, f"--import={tmp_path / 'parts.py'}", *own[name], "--training.stop_after=2")
        text = fork(*given, ranks=ranks).text
        assert ("loss: what smoothed gives is not the cross-entropy" in text) == (name == "smoothed")
        found[name] = rows(run)
    step, validation = ({name: each[k] for name, each in found.items()} for k in (0, -1))
    for name in ("z", "compiled"):
        assert step[name]["loss"] == pytest.approx(step["plain"]["loss"], rel=1e-5)
        assert step[name]["perplexity"] == pytest.approx(math.exp(step["plain"]["loss"]), rel=1e-4)
        # Untrained logits are close to 0: the logarithm of 257 of them is ln 257.
        assert step[name]["z_loss"] == pytest.approx(0.1 * math.log(257) ** 2, rel=0.02)
        assert step[name]["grad_norm"] > 1.01 * step["plain"]["grad_norm"], "the term is descended"
    assert step["compiled"]["z_loss"] == pytest.approx(step["z"]["z_loss"], rel=1e-5)
    assert "z_loss" not in step["plain"] and not any("z_loss" in row for row in validation.values())
    assert "perplexity" not in step["smoothed"] and step["smoothed"]["loss"] != step["plain"]["loss"]
    for name in ("z", "smoothed"):  # one update with another gradient, and the same measure
        plain = validation["plain"]["validation_loss"]
        assert validation[name]["validation_loss"] == pytest.approx(plain, abs=0.05) != step[name]["loss"]
