"""A bad recipe or command line ends with status 2 and messages that say what, where and what would be right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_prores import cli

ROOT = Path(__file__).resolve().parents[3]

# name -> files to write (the first is the recipe), further arguments, and what the error lines must hold, line by line.
# A `{dir}` stands for the folder of the files.
BAD = {
    # --- the command line
    "misspelt key": (
        "",
        ["--training.stpes=5"],
        [["--training.stpes: training.stpes = 5: unknown key", "did you mean training.steps?"]],
    ),
    "key in no section": ("", ["--steps=5"], [["--steps: steps = 5: unknown key", "did you mean training.steps?"]]),
    "value left out at the end": ("", ["--training.steps"], [["--training.steps: needs a value"]]),
    "value left out before another": (
        "",
        ["--training.steps", "--optimizer.lr=1"],
        [["--training.steps: needs a value"]],
    ),
    "empty value": ("", ["--training.steps="], [["training.steps = ''", "must be of type int, not string"]]),
    "empty name": ("", ["--model.name="], [["--model.name: model.name = ''", "allowed: llama"]]),
    "dashes alone": ("", ["--"], [["--: unknown option", "--help"]]),
    "nothing but =": ("", ["--="], [["--=: is not an override", "--section.key=value"]]),
    "two dots": ("", ["--training..steps=5"], [["is not an override"]]),
    "section without key": ("", ["--training"], [["--training: unknown option"]]),
    "misspelt option": ("", ["--chekc"], [["--chekc: unknown option", "did you mean --check?"]]),
    "stray word": ("", ["train"], [["train: unknown option"]]),
    "option twice": ("", ["--config", "other.toml"], [["--config: is given twice"]]),
    "check with value": ("", ["--check=yes"], [["--check = 'yes': takes no value"]]),
    "world size that looks like a digit": ("", ["--world-size", "²"], [["--world-size = '²'", "an int from 1"]]),
    "world size 0": ("", ["--world-size=0"], [["--world-size = '0'", "an int from 1"]]),
    "world size beyond reason": ("", ["--world-size=9999999999"], [["--world-size = '9999999999'"]]),
    "base as override": ("", ["--base=x.toml"], [["--base: base = 'x.toml': belongs in a file"]]),
    "import of an int as override": ("", ["--import=5"], [["--import: import = 5: must be a string or a list"]]),
    "unfinished list": ("", ["--optimizer.groups=[1,"], [["optimizer.groups = '[1,'", "not valid TOML"]]),
    "capital True": ("", ["--training.deterministic=True"], [["must be of type bool, not string", "mean true?"]]),
    # --- files and TOML
    "not TOML": (
        "[training]\nsteps = 10\ndtype = float32\n",
        [],
        [["bad.toml:3: not valid TOML", "dtype = float32", "quotes"]],
    ),
    "table twice": ("[job]\n[training]\n[job]\n", [], [["bad.toml:3: not valid TOML", "twice"]]),
    "key twice": ("[training]\nsteps = 1\nsteps = 2\n", [], [["bad.toml:3: not valid TOML"]]),
    "nested without end": ("a = " + "[" * 5000, [], [["bad.toml: not valid TOML: nested too deeply"]]),
    "dotted without end": (".".join("a" * 3000) + " = 1", [], [["bad.toml:1: a: nested too deeply"]]),
    "not UTF-8": (b"a = '\xff'", [], [["bad.toml': is not UTF-8 text", "byte 5"]]),
    "int of 70 bits": (f"[training]\nseed = {2**70}\n", [], [["bad.toml:2: training.seed", "64 bits"]]),
    "int of 5000 digits": ("[training]\nseed = " + "9" * 5000, [], [["bad.toml", "thousands of digits"]]),
    "NUL": ('[job]\ndump_folder = "a\\u0000b"\n', [], [["bad.toml:2: job.dump_folder", "NUL"]]),
    "base missing": (
        {"bad.toml": 'base = "./bsae.toml"', "base.toml": ""},
        [],
        [["bad.toml:1: base = ", "bsae.toml': no such file", "did you mean ./base.toml?"]],
    ),
    "two bases missing": (
        '\nbase = ["./x.toml", "./y.toml"]',
        [],
        [["bad.toml:2", "x.toml': no such file"], ["bad.toml:2", "y.toml': no such file"]],
    ),
    "base is a folder": ('base = "."', [], [["bad.toml:1: base", "is a folder"]]),
    "base loop": (
        {"bad.toml": 'base = "./b.toml"', "b.toml": '\nbase = ["./bad.toml"]'},
        [],
        [["b.toml:2: base", "inherits from itself: bad.toml -> b.toml -> bad.toml"]],
    ),
    "base of ints": ("base = [1]", [], [["bad.toml:1: base = [1]: must be a string or a list of strings"]]),
    "base as table": ("[base]\nx = 1", [], [["bad.toml:1: base = {x = 1}: must be a string or a list of strings"]]),
    "base name with NUL": ('base = "a\\u0000"', [], [["bad.toml:1: base", "NUL"]]),
    "base name too long": (f'base = "{"a" * 5000}"', [], [["bad.toml:1: base", "cannot be read"]]),
    # --- shapes of tables
    "section as int": ("training = 3", [], [["bad.toml:1: training = 3: must be a table, not int"]]),
    "section as list": ("[[training]]\nsteps = 1", [], [["bad.toml:1: training", "must be a table, not list"]]),
    "component as word": (
        'model = "llama"',
        [],
        [["bad.toml:1: model = 'llama': is a table in components/defaults.toml", 'model.name = "llama"']],
    ),
    "transform as bool": (
        "[transforms]\nprores = true",
        [],
        [["bad.toml:2: transforms.prores = true: must be a table"]],
    ),
    "metric as int": ("[metrics]\nconsole = 5", [], [["bad.toml:2: metrics.console = 5: is a table in components"]]),
    "unknown metric as int": (
        "[metrics]\nconsol = 5",
        [],
        [["bad.toml:2: metrics.consol = 5: unknown key", "log_freq, or a table [metrics.<component>]"]],
    ),
    "scalar over table": (
        {"bad.toml": 'base = "./b.toml"\n[transforms]\nprores = 1', "b.toml": "[transforms.prores]"},
        [],
        [["bad.toml:3: transforms.prores = 1: is a table in", "b.toml:1"]],
    ),
    "table over scalar": (
        "[training]\nsteps = 5",
        ["--training.steps.x=1"],
        [["--training.steps.x: training.steps", "is a single value in", "bad.toml:2"]],
    ),
    "table over list": (
        '[[optimizer.groups]]\npatterns = ["*"]',
        ["--optimizer.groups.0.lr_scale=2"],
        [["optimizer.groups", "is a list in", "bad.toml:1", "the whole list"]],
    ),
    # --- values of the engine's sections
    "best of what is never validated": (
        "[checkpoint]\nkeep_best_k = 2\n[validation]\nenabled = false",
        [],
        [["bad.toml:2: checkpoint.keep_best_k = 2", "validation.enabled is false"]],
    ),
    "best without held-out text": (
        "checkpoint.keep_best_k = 2\ndataset.validation_fraction = 0.0",
        [],
        [["bad.toml:1: checkpoint.keep_best_k = 2", "dataset.validation_fraction = 0 holds no text out"]],
    ),
    "best of steps that are never validated": (
        "checkpoint = { keep_best_k = 2, interval = 3 }\nvalidation.freq = 5\ntraining.steps = 15",
        [],
        [["bad.toml:1: checkpoint.keep_best_k = 2", "saved every 3, validated every 5, both first in step 15 of 15"]],
    ),
    "sweep": (
        'recipe = "base.toml"\nfolder = "x"\nseeds = [1]\n[axes]\nlr = { key = "optimizer.lr", values = [1] }',
        [],
        [["bad.toml:1: this file is a sweep, not a recipe", "titan-prores sweep ", "it names, base.toml"]],
    ),
    "unknown section": ("[trainning]\nsteps = 1", [], [["bad.toml:1: trainning: unknown section", "mean training?"]]),
    "bool for int": ("[training]\nsteps = true", [], [["bad.toml:2: training.steps = true", "type int, not bool"]]),
    "float for int": ("[training]\nsteps = 1e3", [], [["training.steps = 1000.0", "type int, not float"]]),
    "string for int": ('[training]\nsteps = "5"', [], [["training.steps = '5'", "type int, not string"]]),
    "date for string": ("[job]\ndescription = 2024-01-01", [], [["= 2024-01-01: must be of type string, not date"]]),
    "nan": ("[training]\nmax_norm = nan", [], [["bad.toml:2: training.max_norm = nan", "must be a finite number"]]),
    "too big for a float": ("[training]\nmax_norm = 1e999", [], [["training.max_norm = inf", "finite"]]),
    "out of range": ("[training]\nsteps = 0", [], [["training.steps = 0: must be greater than 0"]]),
    "no such choice": (
        '[training]\ndtype = "bfloat61"',
        [],
        [["bad.toml:2: training.dtype = 'bfloat61'", '"float32", "bfloat16"', "mean bfloat16?"]],
    ),
    "empty folder": ('[job]\ndump_folder = ""', [], [["job.dump_folder = ''", "at least 1 character"]]),
    "unicode key": (
        '[training]\n"stéps" = 5',
        [],
        [['bad.toml:2: training."stéps" = 5: unknown key', "training.steps?"]],
    ),
    "quoted key with dots": ('[training]\n"a.b" = 5', [], [['bad.toml:2: training."a.b" = 5: unknown key']]),
    "key that is a word of torchtitan": (
        "[training]\nbatch_size = 8",
        [],
        [["bad.toml:2: training.batch_size = 8", "training.local_batch_size"]],
    ),
    "section of torchtitan": ("[debug]\nseed = 8", [], [["bad.toml:2: debug.seed = 8", "here it is training.seed"]]),
    "not here yet": ("[parallelism]\npipeline_parallel_degree = 2", [], [["pipeline_parallel_degree = 2", "not yet"]]),
    # --- mesh and batch
    "degree 0": (
        "[parallelism]\ntensor_parallel_degree = 0",
        [],
        [["bad.toml:2: parallelism.tensor_parallel_degree = 0", "at least 1, or -1"]],
    ),
    "two open degrees": (
        "[parallelism]\ntensor_parallel_degree = -1",
        [],
        [["data_parallel_shard_degree and parallelism.tensor_parallel_degree", "only one"]],
    ),
    "tensor parallelism that does not divide": (
        "[model]\nn_kv_heads = 2\n[parallelism]\ntensor_parallel_degree = 4",
        ["--world-size", "8"],
        [["bad.toml:4: parallelism.tensor_parallel_degree = 4: does not divide model.n_kv_heads 2 (allowed: 1, 2)"]],
    ),
    "rest for tensor parallelism that does not divide": (
        "[parallelism]\ntensor_parallel_degree = -1\ndata_parallel_shard_degree = 1",
        ["--world-size", "16"],
        [["bad.toml:2: parallelism.tensor_parallel_degree = 16: does not divide", "n_heads 4", "(allowed: 1, 2, 4)"]],
    ),
    "tensor parallelism that is off": (
        "[parallelism]\ntensor_parallel_degree = 2\n[parallelism.tensor_parallel]\nenabled = false",
        ["--world-size", "2"],
        [["bad.toml:2: parallelism.tensor_parallel_degree = 2: no parallelism that is on handles this axis"]],
    ),
    "degrees that do not fit": (
        "[parallelism]\ndata_parallel_shard_degree = 3",
        ["--world-size", "8"],
        [["bad.toml:1: parallelism", "data_parallel_shard_degree 3 does not fit 8 ranks"]],
    ),
    "rest that does not divide": (
        "[parallelism]\ndata_parallel_replicate_degree = 3",
        ["--world-size", "8"],
        [["bad.toml:1", "does not fit 8 ranks", "3, must divide 8"]],
    ),
    "batch that does not divide": (
        "[training]\nglobal_batch_size = 12",
        [],
        [["bad.toml:2: training.global_batch_size = 12", "local_batch_size 1, 2, 3, 4, 6, 12"]],
    ),
    "batch of 0": ("[training]\nglobal_batch_size = 0", [], [["training.global_batch_size = 0", "not a multiple"]]),
    "batch of 10^18 answers at once": (f"[training]\nglobal_batch_size = {10**18 + 1}", [], [["is not a multiple"]]),
    # --- plug-ins
    "import of ints": ("import = [1, 2]", [], [["bad.toml:1: import = [1, 2]: must be a string or a list of strings"]]),
    "plug-in missing": (
        {"bad.toml": '\nimport = "./prat.py"', "part.py": ""},
        [],
        [["bad.toml:2: import = './prat.py': no such file", "did you mean ./part.py?"]],
    ),
    "module missing": (
        'import = ["no.such.module"]',
        [],
        [["bad.toml:1: import = 'no.such.module'", "ModuleNotFound"]],
    ),
    "empty module": ('import = [""]', [], [["bad.toml:1: import = ''", "cannot be imported"]]),
    "plug-in that is no Python": (
        {"bad.toml": 'import = "./p.py"', "p.py": "x = = 1"},
        [],
        [["bad.toml:1: import = './p.py'", "SyntaxError", "p.py, line 1"]],
    ),
    "plug-in that raises": ({"bad.toml": 'import = "./p.py"', "p.py": "1 / 0"}, [], [["ZeroDivisionError"]]),
    "plug-in that exits": ({"bad.toml": 'import = "./p.py"', "p.py": "raise SystemExit(0)"}, [], [["SystemExit"]]),
    "two bad plug-ins": (
        {"bad.toml": 'import = ["./p.py", "./q.py"]', "p.py": "1 / 0", "q.py": "x"},
        [],
        [["'./p.py'", "ZeroDivisionError"], ["'./q.py'", "NameError"]],
    ),
    # --- components
    "name of nothing": (
        '[optimizer]\nname = "AdamX"',
        [],
        [["bad.toml:2: optimizer.name = 'AdamX'", "allowed: adamw", "did you mean adamw?"]],
    ),
    "name that is no string": (
        "[model]\nname = 3",
        [],
        [["bad.toml:2: model.name = 3: must be of type string, not int"]],
    ),
    "name of a set that is no string": (
        "[metrics.mine]\nname = 3",
        [],
        [["bad.toml:2: metrics.mine.name = 3", "string"]],
    ),
    "reference to nothing": (
        '[model]\nname = "os:nothing"',
        [],
        [["bad.toml:2: model.name = 'os:nothing'", "os has no"]],
    ),
    "reference to a function": ('[model]\nname = "os:getcwd"', [], [["bad.toml:2: model.name", "is not a class"]]),
    "reference to another class": (
        '[model]\nname = "pathlib:Path"',
        [],
        [["bad.toml:2: model.name", "Path lacks Config"]],
    ),
    "colon alone": ('[model]\nname = ":"', [], [["bad.toml:2: model.name = ':'", "cannot be imported"]]),
    "nested name": (
        '[transforms.prores]\nresidual_schedule = { name = "liner", T = 2 }',
        [],
        [["bad.toml:2: transforms.prores.residual_schedule.name = 'liner'", "did you mean linear?"]],
    ),
    "nested component as int": (
        "[transforms.prores]\nresidual_schedule = 3",
        [],
        [["bad.toml:2: transforms.prores.residual_schedule = 3: must be a table, not int"]],
    ),
    "nested key": (
        '[transforms.prores]\nresidual_schedule = { name = "linear", t = 2 }',
        [],
        [["bad.toml:2: transforms.prores.residual_schedule.t = 2: unknown key", "residual_schedule.T?"]],
    ),
    "length left out": (
        '[transforms.prores]\nresidual_schedule = "linear"',
        [],
        [["bad.toml:2: transforms.prores.residual_schedule", "either T or total"]],
    ),
    "enabled misspelt": (
        "[transforms.prores]\nenabeld = false\nresidual_schedule = 'fix-L'",
        [],
        [["bad.toml:2: transforms.prores.enabeld = false", "did you mean transforms.prores.enabled?"]],
    ),
    "enabled no bool": (
        '[parallelism.fsdp]\nenabled = "no"',
        [],
        [["bad.toml:2: parallelism.fsdp.enabled = 'no'", "bool"]],
    ),
    "transform that does not fit the model": (
        '[transforms.activation_checkpoint]\nmode = "every_k"\nevery_k = 99',
        [],
        [["bad.toml:3: transforms.activation_checkpoint.every_k = 99", "the model has 4 layers"]],
    ),
    "transform that needs another one": (
        '[transforms.activation_checkpoint]\nmode = "memory_budget"',
        [],
        [["bad.toml:2: transforms.activation_checkpoint.mode = 'memory_budget'", "needs the transform compile"]],
    ),
    "flavor": (
        '[model]\nflavor = "350m"\nnrom = "pre"',
        [],
        [["bad.toml:2: model.flavor = '350m'", "did you mean 350M?"], ["bad.toml:3: model.nrom", "model.norm?"]],
    ),
    "heads": ("[model]\ndim = 65", [], [["bad.toml:1: model: dim 65 / n_heads 4"]]),
    "entry of an array of tables": (
        '[[optimizer.groups]]\npatterns = ["*"]\n[[optimizer.groups]]\npatterns = ["x"]\nlr = 2',
        [],
        [["bad.toml:5: optimizer.groups.1.lr = 2: unknown key", "allowed: lr_scale, patterns"]],
    ),
    "type inside an array of tables": (
        '[[optimizer.groups]]\npatterns = ["*"]\nlr_scale = "2"',
        [],
        [["bad.toml:3: optimizer.groups.0.lr_scale = '2'", "type float, not string"]],
    ),
    "choice of types": (
        '[tokenizer]\nname = "tiktoken_file"\npath = "x"\nspecial_tokens = 3',
        [],
        [["bad.toml:4: tokenizer.special_tokens = 3: must be of type list of string | table of int"]],
    ),
    "required": ('[tokenizer]\nname = "tiktoken_file"', [], [["bad.toml:1: tokenizer.path: is required", "string"]]),
    # --- many at once
    "all of a pass": (
        "[training]\nsteps = 0\nsede = 1\n[job]\ndevice = 'gpu'\n[modle]\n",
        ["--comm.x=1", "--=2", "--model=5"],
        [
            ["bad.toml:2: training.steps"],
            ["bad.toml:3: training.sede", "training.seed?"],
            ["bad.toml:5: job.device"],
            ["bad.toml:6: modle", "model?"],
            ["--comm.x"],
            ["--=2"],
            ["--model: model = 5"],
        ],
    ),
    "all of the second pass": (
        "[optimizer]\nlr = -1\nbeta3 = 1\n[loss]\nname = 'mse'\n[lr_scheduler]\nwarmup_stpes = 2\n[transforms.porres]",
        [],
        [
            ["bad.toml:2: optimizer.lr = -1"],
            ["bad.toml:3: optimizer.beta3", "optimizer.beta"],
            ["bad.toml:5: loss.name"],
            ["bad.toml:7: lr_scheduler.warmup_stpes", "warmup_steps?"],
            ["bad.toml:8: transforms.porres.name", "prores?"],
        ],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    files, arguments, expected = BAD[case]
    if not isinstance(files, dict):
        files = {"bad.toml": files}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    status = cli.main(["--check", "--config", str(tmp_path / "bad.toml"), *arguments])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert "Traceback" not in err
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == len(expected), err
    assert lines[len(errors) :] == ([f"{len(errors)} errors"] if len(errors) > 1 else [])
    for parts in expected:
        assert any(all(part in line for part in parts) for line in errors), (parts, err)
    for line in errors:
        assert len(line) < 800  # a message, not a dump


def test_files_that_are_none(tmp_path, capsys):
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "debug.toml").touch()
    for path, problem in (
        (tmp_path, "is a folder, not a TOML file"),
        (tmp_path / "debgu.toml", "no such file; did you mean debug.toml?"),
        (tmp_path / "pipe.toml", "is not a regular file"),
        (tmp_path / "loop.toml", ""),
        (tmp_path / "debug.toml" / "x.toml", ""),
        (tmp_path / ("x" * 300), "cannot be read"),
    ):
        assert cli.main(["--config", str(path)]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission(tmp_path, capsys):
    (tmp_path / "x.toml").touch(mode=0)
    assert cli.main(["--config", str(tmp_path / "x.toml")]) == 2
    assert "cannot be read: Permission denied" in capsys.readouterr().err


def test_empty_command_line_and_bad_environment(capsys, monkeypatch):
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: titan-prores COMMAND")
    assert cli.main(["train"]) == 2
    assert "--config: is required" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert cli.main(["--config", str(ROOT / "train_configs" / "debug.toml"), "--check"]) == 2
    assert "WORLD_SIZE = 'many': not a valid number of ranks" in capsys.readouterr().err


def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["--nonsense"]) == 2
    assert capsys.readouterr().err == ""


def test_torch_is_not_loaded_for_a_fault_in_an_engine_section(tmp_path):
    # A torch that cannot be imported stands in the way.
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was loaded')")
    script = [
        sys.executable,
        str(ROOT / "scripts" / "train.py"),
        "--config",
        str(ROOT / "train_configs" / "debug.toml"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([*script, "--training.stpes=5"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --training.stpes: training.stpes = 5: unknown key; did you mean training.steps?\n"
    # The negative control: what needs torch meets it, and even that is no traceback.
    done = subprocess.run([*script, "--model.dmi=5"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "torch was loaded" in done.stderr and "Traceback" not in done.stderr
