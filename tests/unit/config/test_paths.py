"""What a path in a recipe counts from, and which paths are refused because they cannot be what they say."""

import glob
import os
import re
from pathlib import Path

import pytest

from titan_prores.config import registry, sources
from titan_prores.config.engine_sections import ENGINE_SECTIONS
from titan_prores.config.errors import ConfigErrors
from titan_prores.config.keys import inline
from titan_prores.config.kinds import KINDS
from titan_prores.config.paths import PathInRun, ReadGlob, ReadPath, WritePath
from titan_prores.config.recipe import changes_since
from titan_prores.config.resolve import Resolver, resolve
from titan_prores.config.sections import Section, setting
from titan_prores.config.setting_types import declared, type_name
from titan_prores.tools.sweep import plan

DEFAULTS = registry.DEFAULTS


class Inner(Section):
    path: Path = Path("x")


class Paths(Section):
    read: ReadPath = "x"
    write: WritePath | None = None
    files: tuple[ReadGlob, ...] = ()
    table: dict[str, WritePath] = setting(default_factory=dict)
    below: PathInRun = "x"
    plain: Path = Path("x")
    inner: list[Inner] = setting(default_factory=list)
    either: tuple[str, ...] | dict[str, WritePath] = ()
    words: str = "x"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with a recipe, another that is the working directory, and a function that reads the section `s`."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def read(text: str, *overrides: str):
        (tmp_path / "recipes" / "r.toml").write_text(f"[s]\n{text}\n")
        resolver = Resolver(sources.load(tmp_path / "recipes" / "r.toml", overrides))
        section = resolver.section(Paths, resolver.tree.values["s"], ("s",))
        return section, [str(error) for error in resolver.errors]

    return tmp_path, read


def test_what_a_path_counts_from(places):
    folder, read = places
    beside = folder / "recipes"
    for written, found in {
        "a/b": "a/b",
        "/a/b": "/a/b",
        ".hidden": ".hidden",
        "..a": "..a",
        "./a/b": f"{beside}/a/b",
        "../a": f"{folder}/a",
        "./../a": f"{folder}/a",
        "../../": f"{folder.parent}",
        ".": f"{beside}",
        "..": f"{folder}",
        ".//a": f"{beside}/a",
        "./a/../b": f"{beside}/a/../b",
    }.items():
        text = f"""
            read = "{written}"\nwrite = "{written}"\nfiles = ["{written}", "x"]\ntable.k = "{written}"
            plain = "{written}"\ninner = [{{ path = "{written}" }}]\neither.k = "{written}"
            below = "{written}"\nwords = "{written}"
        """
        section, errors = read(text)
        assert errors == []
        assert (section.read, section.write, section.files) == (found, found, (found, "x")), written
        assert (section.table, section.either) == ({"k": found}, {"k": found})
        assert section.plain == section.inner[0].path == Path(found)
        assert section.below == section.words == written, "neither counts from a file"


def test_on_the_command_line_both_are_the_working_directory(places):
    folder, read = places
    section, _ = read('read = "./a"\nfiles = ["./a"]', "--s.read=./b", "--s.write=../c", '--s.files=["./d", "e"]')
    here = folder / "here"
    assert (section.read, section.write, section.files) == ("b", f"{folder}/c", ("d", "e"))
    section, _ = read("", "--s.read=.", "--s.write=./../c", '--s.files=[".//d/./e", "././f"]')
    assert (section.read, section.write, section.files) == (f"{here}", f"{folder}/c", ("d/./e", "f"))


def test_a_path_counts_from_the_file_that_it_is_written_in(places):
    folder, _ = places
    (folder / "base").mkdir()
    (folder / "base" / "b.toml").write_text('[s]\nread = "./a"\nwrite = "./a"\nfiles = ["./1", "./2"]')
    (folder / "recipes" / "r.toml").write_text('base = "../base/b.toml"\n[s]\nwrite = "./a"')
    tree = sources.load(folder / "recipes" / "r.toml")
    section = Resolver(tree).section(Paths, tree.values["s"], ("s",))
    assert section.read == f"{folder}/base/a" and section.write == f"{folder}/recipes/a"
    assert section.files == (f"{folder}/base/1", f"{folder}/base/2")


def test_wildcards_of_a_folders_own_name_are_not_ones(places):
    folder, _ = places
    odd = folder / "a[1]*"
    odd.mkdir()
    (odd / "x.txt").touch()
    (odd / "r.toml").write_text('[s]\nfiles = ["./*.txt", "./x.txt"]\nread = "./x.txt"')
    tree = sources.load(odd / "r.toml")
    section = Resolver(tree).section(Paths, tree.values["s"], ("s",))
    assert glob.glob(section.files[0]) == [f"{odd}/x.txt"]
    assert section.files[1] == section.read == f"{odd}/x.txt"


def test_a_path_that_lies_beside_the_file_is_named(places):
    folder, read = places
    (folder / "recipes" / "data.txt").touch()
    _, errors = read('read = "data.txt"\nfiles = ["*.txt", "none.txt"]\nwrite = "data.txt"')
    problem = "is not there: it counts from the working directory, and lies beside this file"
    file = folder / "recipes" / "r.toml"
    assert errors == [
        f"{file}:2: s.read = 'data.txt': {problem}; did you mean ./data.txt?",
        f"{file}:3: s.files.0 = '*.txt': {problem}; did you mean ./*.txt?",
    ]
    (folder / "here" / "data.txt").touch()
    assert read('read = "data.txt"\nfiles = ["*.txt"]')[1] == []


@pytest.mark.parametrize(("key", "suffix"), [("base", "toml"), ("import", "py")])
def test_base_and_import_follow_the_same_rule(key, suffix, places):
    folder, _ = places
    top = folder / "recipes" / "r.toml"
    (folder / "recipes" / f"other.{suffix}").touch()

    def load(text):
        top.write_text(f"{key} = {text}")
        return resolve(sources.load(top, defaults=DEFAULTS))

    load(f'"./other.{suffix}"')
    load(inline(str(folder / "recipes" / f"other.{suffix}")))
    for text in (f'"other.{suffix}"', f'["other.{suffix}"]'):
        with pytest.raises(ConfigErrors, match=rf"r.toml:1: {key} = .*lies beside this file; did you mean ./other"):
            load(text)
    (folder / "here" / f"mine.{suffix}").touch()
    load(f'"mine.{suffix}"')
    with pytest.raises(ConfigErrors, match="no such file"):
        load(f'"./mine.{suffix}"')


def test_paths_in_a_folder_that_is_not_utf8(tmp_path, monkeypatch):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    folder.mkdir()
    (folder / "p.py").touch()
    (folder / "r.toml").write_text('import = "./p.py"\n[job]\ndump_folder = "./out"')
    with pytest.raises(ConfigErrors, match=r"job.dump_folder = './out': counts from a folder whose name is not UTF-8"):
        resolve(sources.load(folder / "r.toml", defaults=DEFAULTS))
    (folder / "r.toml").write_text('import = "./p.py"')
    with pytest.raises(ConfigErrors, match=r"import = './p.py': counts from a folder whose name is not UTF-8"):
        resolve(sources.load(folder / "r.toml", defaults=DEFAULTS))
    (folder / "r.toml").write_text("")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigErrors, match=r"import = 'p.py': counts from a folder whose name is not UTF-8"):
        resolve(sources.load(Path("r.toml"), ["--import=p.py"], DEFAULTS))
    assert resolve(sources.load(Path("r.toml"), ["--job.dump_folder=./out"], DEFAULTS)).job.dump_folder == "out"


IMPOSSIBLE = {
    "s3://bucket/run": "is a URL, and nothing is read from or written to s3: here",
    "s3:/bucket/run": "is a URL",
    "gs://b": "is a URL",
    "hf://datasets/a": "is a URL",
    "https://host/x.txt": "is a URL",
    "file:///tmp/x": "is a URL",
    " s3://b": "is a URL",
    "~": "~ is not expanded here (allowed: the folder written out); did you mean /home/me?",
    "~/out": "did you mean /home/me/out?",
    "~root/x": "~ is not expanded here",
    "out/~/x": "~ is not expanded here",
    "$HOME/out": "variables are not expanded here (allowed: the folder written out)",
    "${HOME}/x": "variables are not expanded here",
    "out/$SLURM_JOB_ID": "variables are not expanded here",
}
FINE = ["a:b/c", "lr=1:2", "a~", "~a", "file~/x", "a$", "$(x)", "C:/x", "é", "a b", "{x}", "%s", "12:/x"]


@pytest.fixture
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_what_cannot_be_a_path_is_refused_by_key(text, places, home):
    folder, read = places
    for key, value in {
        "read": inline(text),
        "write": inline(text),
        "below": inline(text),
        "plain": inline(text),
        "files.0": None,
        "table.k": None,
        "inner.0.path": None,
    }.items():
        written = {"files.0": f"files = [{inline(text)}]", "inner.0.path": f"inner = [{{ path = {inline(text)} }}]"}
        section, [error] = read(written.get(key, f"{key} = {value or inline(text)}"))
        assert section is None and error.startswith(f"{folder}/recipes/r.toml:2: s.{key} = {text!r}: ")
        assert IMPOSSIBLE[text] in error


@pytest.mark.parametrize("text", FINE)
def test_odd_names_are_names(text, places, home):
    assert places[1](f"write = {inline(text)}\nfiles = [{inline(text)}]")[1] == []


def every_section():
    """Those of the engine and of the built-in components."""
    sections = dict(ENGINE_SECTIONS)
    for kind in KINDS:
        for name in registry.names(kind):
            if (component := registry.lookup(kind, name)).__module__.startswith(registry.BUILTIN_PACKAGE):
                sections[f"{kind}.{name}"] = component.Config
    return sections


def built_in_paths():
    for place, section in every_section().items():
        for key, info in section.model_fields.items():
            if "path" in type_name(declared(info)).split():
                yield f"{place}.{key}"


def test_every_path_there_is_is_declared_as_one(places, home):
    assert set(built_in_paths()) == {
        "job.dump_folder",
        "profiling.save_traces_folder",
        "profiling.save_memory_snapshot_folder",
        *(f"dataset.{name}.cache_folder" for name in ("huggingface", "python_stdlib", "text")),
        "dataset.text.files",
        "dataset.huggingface.path",
        "dataset.huggingface.data_files",
        "tokenizer.hf_file.path",
        "tokenizer.tiktoken_file.path",
        "residual_schedule.from_table.path",
        "checkpoint.dcp.folder",
        "checkpoint.dcp.init_from",
        "metrics.tensorboard.folder",
    }
    for place, section in every_section().items():
        for key, info in section.model_fields.items():
            if re.search(r"(^|_)(path|folder|dir|files?)$", key):
                assert "path" in type_name(declared(info)).split(), f"{place}.{key} is no path"
    with pytest.raises(ConfigErrors, match=r"--config = 's3:/b/r.toml': is a URL"):
        sources.load(Path("s3://b/r.toml"))
    (places[0] / "recipes" / "r.toml").write_text('base = "hf://x/r.toml"')
    with pytest.raises(ConfigErrors, match=r"r.toml:1: base = 'hf://x/r.toml': is a URL"):
        sources.load(places[0] / "recipes" / "r.toml")
    with pytest.raises(ConfigErrors, match=r"--import: import = '~/p.py': ~ is not expanded"):
        resolve(sources.load(None, ["--import=~/p.py"], DEFAULTS))


def test_a_url_where_the_library_takes_one(places):
    huggingface = registry.lookup("dataset", "huggingface").Config
    for files, n_errors in ((["https://host/x.json", "./a[0]/*.json"], 0), (["~/x.json"], 1)):
        resolver = Resolver(sources.Tree())
        section = resolver.section(huggingface, {"path": "json", "data_files": files}, ("dataset",))
        assert len(resolver.errors) == n_errors
        assert n_errors or section.data_files == ("https://host/x.json", "a[0]/*.json")


def test_a_sweep_counts_like_a_recipe(places):
    folder, _ = places
    (folder / "recipes" / "base.toml").touch()
    file = folder / "recipes" / "sweep.toml"
    text = """
recipe = "{}"
folder = "out"
results = "./results.jsonl.gz"
[settings.dataset]
files = ["./a.txt", "b.txt"]
[axes.table]
one = {{ transforms.prores.residual_schedule.path = "./1.csv", job.description = "x" }}
two = {{ transforms.prores.residual_schedule.path = "2.csv" }}
"""
    file.write_text(text.format("./base.toml"))
    sweep = plan.load(file)
    recipe = sweep.recipe_of(sweep.planned[0])
    assert [recipe, sweep.results] == [folder / "recipes" / name for name in ("base.toml", "results.jsonl.gz")]
    assert sweep.folder == Path("out")
    one, two = (sweep.overrides(run) for run in sweep.planned)
    assert f'--dataset.files=["{folder}/recipes/a.txt", "b.txt"]' in one
    assert f"--transforms.prores.residual_schedule.path={folder}/recipes/1.csv" in one
    assert '--transforms.prores.residual_schedule.path="2.csv"' in two
    file.write_text(text.format("base.toml"))
    with pytest.raises(ConfigErrors, match=r"recipe = 'base.toml': .*did you mean ./base.toml\?"):
        plan.load(file)


def test_the_same_run_resumes_from_elsewhere(places, monkeypatch):
    """A path that counts from the recipe is another one in a moved checkout; what it holds is compared elsewhere."""
    folder, _ = places
    table = "step,alpha_1,alpha_2,alpha_3,alpha_4\n0,0,0,0,0\n9,1,1,1,1\n"
    text = """
import = "./p.py"
[job]
dump_folder = "./out"
[tokenizer]
name = "tiktoken_file"
path = "./ranks"
[dataset]
name = "text"
files = ["./*.txt"]
cache_folder = "./cache"
[transforms.prores.residual_schedule]
name = "from_table"
path = "./table.csv"
[checkpoint]
init_from = "./step-1"
"""
    for checkout in ("old", "new"):
        (folder / checkout).mkdir()
        (folder / checkout / "p.py").touch()
        (folder / checkout / "table.csv").write_text(table)
        (folder / checkout / "r.toml").write_text(text)
    old = resolve(sources.load(folder / "old" / "r.toml", defaults=DEFAULTS))
    monkeypatch.chdir(folder)
    again = resolve(sources.load(Path("old/r.toml"), defaults=DEFAULTS))
    assert again == old, "whatever the working directory"
    new = resolve(sources.load(folder / "new" / "r.toml", defaults=DEFAULTS))
    errors, notes = changes_since(new, old.to_dict())
    assert errors == [] and len(notes) >= 6
    before = old.to_dict() | {"dataset": old.to_dict()["dataset"] | {"files": ["./*.txt"]}}  # as earlier versions did
    assert changes_since(old, before)[0] == []
    (folder / "new" / "table.csv").write_text(table.replace("9,1", "8,1"))
    changed = resolve(sources.load(folder / "new" / "r.toml", defaults=DEFAULTS))
    [error] = changes_since(changed, old.to_dict())[0]
    assert error.key == "transforms.prores.residual_schedule.sha256"
