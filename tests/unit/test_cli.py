"""The command line: parsing, help, and what --check says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_prores import cli
from titan_prores.build import build_components
from titan_prores.components.model.llama import Llama
from titan_prores.config import registry, sources
from titan_prores.config.command_line import Options, parse
from titan_prores.config.engine_sections import SECTIONS
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.help import describe, list_components
from titan_prores.config.kinds import KINDS
from titan_prores.config.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
DEBUG = str(ROOT / "train_configs" / "debug.toml")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "a.toml"], Options(config=Path("a.toml"))),
        (["--config=a=b.toml", "--check"], Options(config=Path("a=b.toml"), check=True)),
        (["--config=a", "--check", "--world-size", "8"], Options(config=Path("a"), check=True, world_size=8)),
        (["--config=a", "--check", "--world-size=8"], Options(config=Path("a"), check=True, world_size=8)),
        (["--help"], Options(help="")),
        (["-h", "model.llama"], Options(help="model.llama")),
        (["--list-components"], Options(list_components="")),
        (["--list-components", "model"], Options(list_components="model")),
        (
            ["--a.b=1", "--config", "x", "--a.c", "2", "--d.e", "-1", "--import=./p.py"],
            Options(config=Path("x"), overrides=["--a.b=1", "--a.c=2", "--d.e=-1", "--import=./p.py"]),
        ),
        (["--config", "x", "--a.b="], Options(config=Path("x"), overrides=["--a.b="])),
    ],
)
def test_parse(arguments, expected):
    assert parse(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ([], ["--config"]),
        (["--config"], ["--config"]),
        (["--config="], ["--config"]),
        (["--config", "--check"], ["--config"]),
        (["--config=a", "--world-size=2"], ["--world-size"]),
        (["--config=a", "--check", "--world-size=-2", "x", "--y", "--a.b"], ["--world-size", "x", "--y", "--a.b"]),
    ],
)
def test_parse_refuses_all_at_once(arguments, keys):
    with pytest.raises(ConfigErrors) as caught:
        parse(arguments)
    assert [error.key for error in caught.value.errors] == keys


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {command} " in usage for command in cli.COMMANDS)
    assert all(len(line) <= 120 for line in usage.splitlines())
    assert cli.main(["train", "--help"]) == 0
    options = capsys.readouterr().out
    assert all(flag in options for flag in ("--config", "--check", "--world-size", "--list-components", "--help"))
    assert cli.main(["--help", "training"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("[training]  The training loop.\n")
    assert "  steps: int = 1000 optimizer steps   [> 0]\n      number of optimizer steps of the run" in text
    assert '  dtype: "float32" | "bfloat16" = "float32"\n' in text
    assert "  stop_after: int = (not set), in optimizer steps   [> 0]\n" in text


def test_help_of_components():
    assert "  decay_ratio: float = 0.1   [>= 0, <= 1]\n" in describe("lr_scheduler.wsd")
    assert "  dim: int = 64 from flavor debug   [> 0]\n" in describe("model.llama")
    assert "  path: path (required)\n" in describe("tokenizer.tiktoken_file")
    assert '  special_tokens: list of string | table of int = ["<|endoftext|>"]\n' in describe(
        "tokenizer.tiktoken_file"
    )
    assert "        patterns: list of string (required)\n" in describe("optimizer.adamw")  # inside `groups`
    assert '  residual_schedule: residual_schedule = { name = "linear" }\n' in describe("transform.prores")
    assert "(no keys)" in describe("loss.cross_entropy")
    # By the section's name too; and without a name, what there is.
    assert describe("validation.perplexity") == describe("validator.perplexity")
    assert describe("transforms.prores") == describe("transform.prores")
    for section in SECTIONS:
        assert describe(section)
    assert describe("metrics").startswith("[metrics]") and "  jsonl " in describe("metrics")


def test_help_of_a_section_shows_the_component_it_holds():
    for section, kind, name in (("validation", "validator", "perplexity"), ("dataset", "dataset", "python_stdlib")):
        text = describe(section)
        assert text.startswith(f'[{section}]  name = "{name}"\n{describe(f"{kind}.{name}")}')
        assert text.endswith(f"{list_components(kind)}See --help {kind}.<name> for the keys of one.\n")


def test_help_of_a_component_named_alone():
    assert describe("prores") == describe("transform.prores")
    with pytest.raises(
        ConfigError, match=r"several components \(allowed: lr_scheduler.linear, residual_schedule.linear\)"
    ):
        describe("linear")
    with pytest.raises(ConfigError, match=r"did you mean transform\.prores\?"):
        describe("prorse")


PLUGIN = '''
from titan_prores import Section, register, setting

@register("lr_scheduler", "sawtooth_of_help")
class Sawtooth:
    """Up and down again."""
    class Config(Section):
        period: int = setting(7, "length of a tooth", gt=0)
    def __init__(self, config, *, total_steps): pass
    def factor(self, step): return 1.0
'''


def test_help_and_lists_know_what_a_recipe_imports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(registry, "_table", {kind: dict(named) for kind, named in registry._table.items()})
    (tmp_path / "parts.py").write_text(PLUGIN)
    (tmp_path / "my.toml").write_text('import = ["./parts.py"]\nlr_scheduler.name = "sawtooth_of_help"')
    assert cli.main(["--help", "sawtooth_of_help"]) == 2
    assert "neither a section" in capsys.readouterr().err
    recipe = ["--config", str(tmp_path / "my.toml")]
    shown = []
    for topic in ("lr_scheduler.sawtooth_of_help", "sawtooth_of_help", "lr_scheduler"):
        assert cli.main(["--help", topic, *recipe]) == 0
        shown.append(capsys.readouterr().out)
    assert "  period: int = 7   [> 0]\n" in shown[0] and shown[1] == shown[0] and shown[0] in shown[2]
    assert cli.main(["--list-components", "lr_scheduler", *recipe]) == 0
    assert "  sawtooth_of_help  Up and down again.\n" in capsys.readouterr().out
    assert cli.main(["--help", "lr_scheduler", "--import=./nothing.py"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topic", "nearest"), [("trainign", "training"), ("modle.llama", "model"), ("model.lama", "llama"), ("x", None)]
)
def test_help_of_nothing(topic, nearest):
    with pytest.raises(ConfigError) as caught:
        describe(topic)
    assert caught.value.nearest == nearest and str(caught.value).startswith("--help")


def test_list_components():
    text = list_components()
    for kind, about in KINDS.items():
        assert f"{kind}: {about.summary}\n" in text
        for name in registry.names(kind):
            assert re.search(rf"^  {re.escape(name)} +\S", text, re.MULTILINE)
    assert list_components("loss") == (
        f"loss: {KINDS['loss'].summary}\n  cross_entropy  Cross-entropy of the next token, computed in fp32.\n"
    )
    with pytest.raises(ConfigError, match=r"did you mean lr_scheduler\?"):
        list_components("lr_schedulers")


def check(capsys, *arguments: str) -> str:
    assert cli.main(["--config", DEBUG, "--check", *arguments]) == 0
    assert not torch.distributed.is_initialized(), "the fake process group is gone"
    return capsys.readouterr().out


def test_check_of_the_debug_recipe(capsys, tmp_path):
    report = check(capsys)
    assert "steps = 20  # train_configs/debug.toml:" in report
    line = r"# train_configs/debug.toml:\d+"
    assert re.search(rf'^name = "linear"  {line}\nT = 2.0  {line}$', report, re.MULTILINE)
    assert "dim = 64  # flavor debug" in report and 'name = "bytes"  # components/defaults.toml:8' in report
    # 257 x 64 twice, 4 blocks of 4 x 64^2 + 3 x 64 x 176 + 2 x 64, and the last norm.
    parameters = 2 * 257 * 64 + 4 * (4 * 64**2 + 3 * 64 * 176 + 2 * 64) + 64
    assert f"parameters       {parameters:,} (0.23M)" in report
    assert "mesh             dp_replicate 1 x dp_shard 1 x tp 1 = 1 rank\n" in report
    assert "transforms       1. prores: 8 residual adds scaled, linear (T = 2)\n" in report
    assert "tensor_parallel" not in report.partition("\ntransforms ")[2] and "\n                 2. fsdp: " in report
    assert "tokens per step  1,024 = 1 data rank x 4 sequences x 64 tokens x 4 micro-batches\n" in report
    assert "tokens in total  20,480 in 20 steps\n" in report
    assert re.search(rf"^  parameters +{4 * parameters:,} ", report, re.MULTILINE)
    # Up to the numbers it is a recipe, the same one.
    (tmp_path / "again.toml").write_text(report.split("\n\nmesh")[0])
    again = sources.load(tmp_path / "again.toml").values
    assert again["transforms"]["prores"]["residual_schedule"] == {"name": "linear", "T": 2.0}


def test_check_for_eight_ranks(capsys):
    whole = check(capsys)
    report = check(
        capsys, "--world-size=8", "--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=2"
    )
    assert "mesh             dp_replicate 2 x dp_shard 4 x tp 1 = 8 ranks\n" in report
    assert "HSDP, 2 replicas of 4 shards" in report
    assert "tokens per step  1,024 = 8 data ranks x 2 sequences x 64 tokens x 1 micro-batch\n" in report

    def held(text: str, what: str) -> int:
        return int(re.search(rf"^  {what} +([\d,]+) ", text, re.MULTILINE)[1].replace(",", ""))

    for what in ("parameters", "gradients", "optimizer"):
        # A quarter, but that rows do not always divide evenly.
        assert held(whole, what) / 4 <= held(report, what) < held(whole, what) / 4 * 1.02
    assert "parameters       234,176" in report and "parameters       234,176" in whole  # of the model as a whole


def test_check_for_three_axes(capsys):
    report = check(capsys, "--world-size=8", "--parallelism.tensor_parallel_degree=2")
    assert "mesh             dp_replicate 1 x dp_shard 4 x tp 2 = 8 ranks\n" in report
    order = [report.index(f" {n}. {name}: ") for n, name in enumerate(("prores", "tensor_parallel", "fsdp"), 1)]
    assert order == sorted(order)
    assert "tokens per step  1,024 = 4 data ranks x" in report
    # 257 rows are 129 for the first of two ranks, where fsdp splits the 64 columns; norms are not split by tp.
    parameters = 2 * 129 * 64 // 4 + 4 * ((4 * 64**2 + 3 * 64 * 176) // 8 + 2 * 64 // 4) + 64 // 4
    for what in ("parameters", "gradients"):
        assert re.search(rf"^  {what} +{4 * parameters:,} ", report, re.MULTILINE)


def test_check_of_what_is_not_on_this_machine(capsys, tmp_path):
    """Sizes are told, and what a run would refuse to start without; a run does refuse."""
    missing = [
        "--tokenizer.name=hf_file",
        f"--tokenizer.path={tmp_path}/tokenizer.json",
        "--dataset.name=text",
        f"--dataset.files=['{tmp_path}/*.txt']",
    ]
    report = check(capsys, *missing, "--model.vocab_size=300")
    assert "parameters       239,680 (0.24M)" in report
    needs = [line for line in report.splitlines() if line.startswith("a run needs ")]
    assert len(needs) == 2 and "tokenizer.path" in needs[0] and "dataset.files" in needs[1]
    for arguments in ([*missing], [*missing, "--model.vocab_size=300", "--lr_scheduler.warmup_steps=50"]):
        assert cli.main(["--config", DEBUG, "--check", *arguments]) == 2, "no vocabulary known, or something else wrong"
        assert "a run needs" not in capsys.readouterr().out
    with pytest.raises(ConfigErrors, match=r"tokenizer\.path(.|\n)*dataset\.files"):
        tree = sources.load(Path(DEBUG), [*missing, "--model.vocab_size=300"], registry.DEFAULTS)
        build_components(resolve(tree), {"dp_replicate": 1, "dp_shard": 1, "tp": 1})


class Peeking(Llama):
    """Looks at a value, which fake tensors do not have."""

    def forward(self, tokens_BS):
        return super().forward(tokens_BS) * float(tokens_BS.sum() >= 0)


def test_check_of_a_model_that_needs_values(capsys):
    report = check(capsys, "--model.name=tests.unit.test_cli:Peeking")
    assert "activations are not included, as the model does not run without values" in report
    assert "  activations " not in report and "  total " in report


def test_what_check_adds_up(capsys):
    report = check(capsys, "--world-size=2", "--transforms.compile.enabled=true")
    lines = report.split("\nbytes per rank ")[1].splitlines()[1:]
    sizes = [(line.split()[0], int(line.split()[1].replace(",", ""))) for line in lines]
    assert [name for name, _ in sizes] == [
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "peak",
        *["buffers"] * 3,
        "total",
    ]
    assert sizes[-1][1] == sum(size for _, size in sizes[:-1])
    assert "until its backward pass; at most: compiled code keeps less" in report
    assert "largest gather   " in report and "largest gather" not in check(capsys), "one rank gathers nothing"


def test_world_size_comes_from_torchrun(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "= 2 ranks\n" in check(capsys)
    assert "= 4 ranks\n" in check(capsys, "--world-size=4")


def test_a_model_that_no_tensor_can_hold(capsys):
    assert cli.main(["--config", DEBUG, "--check", "--model.dim=1000000000000"]) == 2
    assert "model: cannot be built" in capsys.readouterr().err


def test_a_reader_that_has_had_enough():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "scripts/train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
