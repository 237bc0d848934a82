"""Nothing a run leaves in its folder is lost or torn, and what it writes can be read back."""

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from titan_prores.config import registry, sources
from titan_prores.config.engine_sections import Training
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.keys import dotted, inline, split_key
from titan_prores.config.kinds import SLOTS
from titan_prores.config.resolve import resolve
from titan_prores.config.sources import tomllib
from titan_prores.output import run_folder
from titan_prores.output.environment import git_state
from titan_prores.output.recipe_file import annotated_toml
from titan_prores.output.run_folder import RunFolder

PARTS = '''
from titan_prores import setting
from titan_prores.config import contracts, registry
from titan_prores.config.kinds import KINDS, SLOTS

for kind in SLOTS.values():
    class Component:
        """Stands in for any component."""
        class Config(KINDS[kind].base_section()):
            text: str = 'a "quoted" # text'
            many: tuple[str, ...] = ()
            tables: tuple[dict[str, str], ...] = ()
            absent: float | None = None
            ratio: float = setting(1e-5)
    for method in ("__init__", *contracts.methods(KINDS[kind].contract_class())):
        setattr(Component, method, lambda self, *a, **k: None)
    Component.__qualname__ = f"Component_{kind}"
    registry.register(kind, "stand_in")(Component)
'''


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("recipe")
    (tmp_path / "parts.py").write_text(PARTS)
    slots = "\n".join(f'[{section}]\nname = "stand_in"' for section in SLOTS if section != "model")
    (tmp_path / "given.toml").write_text(f"""
import = "./parts.py"
[model]
name = "stand_in"
many = ["one", "two"]
tables = [{{ pattern = "norm", why = "no decay" }}, {{ pattern = "bias" }}]
[training]
steps = 7
{slots}
""")
    tree = sources.load(tmp_path / "given.toml", ["--training.seed=3"])
    yield resolve(tree)
    for kind in SLOTS.values():  # other tests go over every registered component
        registry._table[kind].pop("stand_in")


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run", is_main=True)
    folder.open()
    yield folder
    folder.close()


def test_making_one_touches_nothing(tmp_path):
    run = RunFolder(tmp_path / "a" / "b", is_main=True)
    assert (run.recipe_file, run.metrics_file) == (run.path / "recipe.toml", run.path / "metrics.jsonl")
    other_rank = RunFolder(tmp_path / "a" / "b", is_main=False)
    other_rank.open()
    other_rank.write_env({})
    assert list(tmp_path.iterdir()) == []


def test_recipe_says_where_values_came_from_and_is_a_recipe(run, resolved):
    run.write_recipe(resolved)
    text = run.recipe_file.read_text()
    lines = text.splitlines()
    assert "seed = 3  # --training.seed" in lines
    assert "local_batch_size = 8  # default" in lines
    assert any(line.startswith("steps = 7  # ") and "given.toml:8" in line for line in lines)
    assert any(line.startswith("many = [  # ") and "given.toml:5" in line for line in lines)
    again = resolve(sources.load(run.recipe_file))
    assert again == resolved
    assert again.to_dict() == resolved.to_dict()


def test_shipped_defaults_survive_the_round_trip(run):
    defaults = registry.DEFAULTS
    resolved = resolve(sources.load(None, defaults=defaults))
    run.write_recipe(resolved)
    assert resolve(sources.load(run.recipe_file, defaults=defaults)) == resolved


NASTY = [chr(code) for code in (*range(1, 0x20), *range(0x7F, 0xA1), 0x2028, 0x2029, 0xFEFF, 0x1F600)]
NASTY += ['"', '"""', "'", "\\", "#", "]", "[x]", " = ", "\r\n", "{x}", "%s", ""]


def test_any_text_survives_in_values_keys_and_origins(run, resolved, tmp_path):
    table = {f"a{text}b": text for text in NASTY}
    assert tomllib.loads(f"x = {inline(table)}") == {"x": table}
    for text in NASTY:
        assert split_key(dotted(("a", text))) == ("a", text)
    parent = tmp_path / "a\x01\u2028b"  # where values come from is written too
    parent.mkdir()
    file = parent / "given.toml"
    file.write_text('base = "../recipe/given.toml"\n[job]\ndescription = "x"\n')
    (tmp_path / "recipe").mkdir()
    run.write_recipe(resolved)
    (tmp_path / "recipe" / "given.toml").write_text(run.recipe_file.read_text())
    lists = f"--model.many={inline(NASTY)}", f"--model.tables=[{inline(table)}]"
    nasty = resolve(sources.load(file, [*lists, f"--model.text={inline(''.join(NASTY))}"]))
    run.write_recipe(nasty)
    written = run.recipe_file.read_bytes().decode()
    assert tomllib.loads(written)["model"] == nasty.to_dict()["model"]
    assert nasty.slots["model"].config.many == tuple(NASTY)
    assert resolve(sources.load(run.recipe_file)) == nasty
    assert 'description = "x"  # ' in written and "a\\u0001\\u2028b/given.toml:3" in written


def test_a_folder_whose_name_is_not_utf8(run, resolved, tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/d\xff")
    os.mkdir(folder)
    run.write_recipe(resolved)
    file = Path(folder) / "given.toml"
    file.write_text(run.recipe_file.read_text())
    there = resolve(sources.load(file, ["--training.seed=7"]))
    run.write_recipe(there)
    assert "d\\uDCFF/given.toml" in run.recipe_file.read_text()
    with pytest.raises(ConfigErrors, match=r"job.description = .*not UTF-8 text") as caught:
        config_errors(sources.load(file, ["--job.description=d\udcff"]))
    assert len(caught.value.errors) == 1
    with pytest.raises(ConfigErrors, match="has bytes in its name that are not UTF-8"):
        config_errors(sources.load(file, ['--job."d\udcff"=1']))


def config_errors(tree):
    raise ConfigErrors(tree.errors)


def test_older_files_are_kept(run, resolved):
    from dataclasses import replace

    run.write_recipe(resolved)
    run.write_recipe(resolved)
    assert not (run.path / "recipe.1.toml").exists(), "the same recipe again is no other one"
    texts = [run.recipe_file.read_text()]
    for seed in (4, 5):
        run.write_recipe(replace(resolved, training=Training(seed=seed)))
        texts.append(run.recipe_file.read_text())
    kept = [(run.path / name).read_text() for name in ("recipe.1.toml", "recipe.2.toml", "recipe.toml")]
    assert kept == texts
    run.write_env({"dp_shard": 2}, {"note": 1})
    run.write_env({"dp_shard": 4})
    assert json.loads((run.path / "env.1.json").read_text())["mesh"] == {"dp_shard": 2}
    assert json.loads(run.env_file.read_text())["mesh"] == {"dp_shard": 4}


def test_env_facts(run):
    run.write_env({"dp_shard": 2}, {"note": "x"})
    facts = json.loads(run.env_file.read_text())
    assert facts["note"] == "x"
    assert facts["versions"]["torch"].startswith("2.") and facts["versions"]["titan-prores"]
    assert facts["cpu"] and facts["start_time"] and facts["command_line"]


def test_git_state(tmp_path):
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"] is True
    (tmp_path / "inside").mkdir()
    assert git_state(tmp_path / "inside") is None, "somebody else's commit says nothing about this code"


def test_a_second_live_run_is_refused(run):
    code = (
        "import sys; from pathlib import Path; from titan_prores.output.run_folder import RunFolder\n"
        "from titan_prores import ConfigError\n"
        "try: RunFolder(Path(sys.argv[1]), is_main=True).open()\n"
        "except ConfigError as error: print(error)\n"
        "else: print('opened')"
    )

    def other_process():
        done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
        return done.stdout

    text = other_process()
    assert text.startswith("job.dump_folder") and "another run that is still alive" in text
    run.close()
    assert other_process() == "opened\n"


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"job\.dump_folder = .*cannot be written"):
        RunFolder(tmp_path / "file" / "run", is_main=True).open()
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder(tmp_path / "file", is_main=True).open()


def write_rows(run, steps, torn=""):
    with run.metrics_file.open("a") as stream:
        stream.writelines(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in steps)
        stream.write(torn)


def steps_in(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_what_a_killed_writer_left_is_removed_by_the_next_run(run):
    run.close()
    (run.path / "status.json.host.7.tmp").write_text("half")
    run.open()
    run.close()
    assert not list(run.path.glob("*.tmp"))


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(run):
    (run.path / "x").mkdir()
    with pytest.raises(IsADirectoryError):
        run.write_file("x", b"content")
    assert not list(run.path.glob("*.tmp"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_status_is_written_on_a_disk_without_room(number, run, monkeypatch):
    run.write_status("running", 3)

    def full(file, content):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder, "write_atomically", full)
    run.write_status("failed", 4)
    assert json.loads((run.path / "status.json").read_text())["state"] == "failed"


def test_validations_by_step(run):
    assert run.validations() == {}
    row = {"step": 2, "validation": True, "validation_loss": 1.5}
    write_rows(run, [1, 2], torn=json.dumps(row) + '\n{"step": 3, "validation": tr')
    assert run.validations() == {2: row}


def test_set_aside_metrics(run):
    assert run.set_aside_metrics(3) == 0
    write_rows(run, [1, 2, 3, 3, 4, 5, 6], torn='{"step": 7, "lo')
    assert run.set_aside_metrics(4) == 2
    side = run.path / "metrics.after-step-4.jsonl"
    assert (steps_in(run.metrics_file), steps_in(side)) == ([1, 2, 3, 3, 4], [5, 6])
    assert run.set_aside_metrics(4) == 0

    write_rows(run, [5])
    assert run.set_aside_metrics(4) == 1
    assert steps_in(side) == [5, 6], "what an earlier resume put aside stays"
    assert steps_in(run.path / "metrics.after-step-4.1.jsonl") == [5]
    assert not list(run.path.glob("*.tmp"))


def test_set_aside_keeps_a_whole_last_row_without_its_line_end(run):
    write_rows(run, [1, 2], torn='{"step": 3}')
    assert run.set_aside_metrics(3) == 0
    assert steps_in(run.metrics_file) == [1, 2, 3] and run.metrics_file.read_text().endswith("\n")


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b"\0" * 512, b"\xff\xfe", b"garbage\n\0\0\n\n[3]\n", b"garbage\n\n"]
)
def test_set_aside_drops_what_is_no_row_at_the_end(tail, run):
    write_rows(run, [1, 2])
    whole = run.metrics_file.read_bytes()
    run.metrics_file.write_bytes(whole + tail)
    assert run.set_aside_metrics(5) == 0
    assert run.metrics_file.read_bytes() == whole


def test_set_aside_loses_nothing_when_it_is_interrupted(run, monkeypatch):
    write_rows(run, [1, 2, 3])
    before = run.metrics_file.read_bytes()
    real, calls = os.fsync, []

    def full_disk(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError):
        run.set_aside_metrics(1)
    assert run.metrics_file.read_bytes() == before


def test_annotated_toml_of_nested_tables_and_odd_keys():
    class Fake:
        origins = {"a.b.x": "file:1", "a.list": "file:2", "a.after.y": "file\n3"}  # noqa: RUF012

        def to_dict(self):
            rows = [{"p": "norm", "q": {"r": 1}}, {"p": "a very long pattern " * 9}]
            return {"a": {"b": {"x": 'y # "z"', "odd key": 1}, "list": rows, "after": {"y": [1, [2, 3]]}}}

    text = annotated_toml(Fake())
    assert sources.tomllib.loads(text) == Fake().to_dict()
    assert """x = "y # \\"z\\""  # file:1""" in text
    assert '"odd key" = 1  # default' in text
    assert "file\\u000A3" in text and "file:2" in text


def test_files_that_somebody_else_wrote_run_nothing(run, resolved):
    """A pickle, JSON without end and a step that is no number, wherever a run looks for what an earlier one left."""
    victim = run.path / "victim"
    harmful = type("Harmful", (), {"__reduce__": lambda self: (victim.touch, ())})
    pickled = pickle.dumps(harmful())
    for content in (pickled, b"[" * 10**6, b'{"step": "x"}', b"\xff\x00"):
        for name in ("metrics.jsonl", "status.json", "env.json", "recipe.toml", "latest_checkpoint"):
            (run.path / name).write_bytes(content + b"\n")
        assert run.noted_checkpoint() is None
        assert run.set_aside_metrics(3) == 0
        run.write_status("running", 3)
        run.write_env({"dp_shard": 1})
        run.write_recipe(resolved)
    assert not victim.exists()
    pickle.loads(pickled)
    assert victim.exists()  # as a program that unpickles would
