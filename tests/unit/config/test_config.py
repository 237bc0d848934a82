"""Reading, merging and typing of recipes, apart from any component."""

import pickle
import random
from pathlib import Path

import pytest

from titan_prores.config import sources
from titan_prores.config.errors import ConfigError, ConfigErrors, MissingError, nearest, shown
from titan_prores.config.keys import dotted, split_key
from titan_prores.config.resolve import Resolver
from titan_prores.config.sections import Section, setting
from titan_prores.config.sources import parse_override


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(files))}.toml"


class Inner(Section):
    number: int = setting(help="a number")
    word: str = "x"


class Typed(Section):
    count: int = setting(1, "a count", ge=0)
    ratio: float = 0.5
    on: bool = False
    word: str = "x"
    maybe: int | None = None
    words: tuple[str, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    tables: tuple[Inner, ...] = ()
    table: dict[str, int] = {}  # noqa: RUF012


def typed(**raw):
    resolver = Resolver(sources.Tree())
    return resolver.section(Typed, raw, ("typed",)), [str(error) for error in resolver.errors]


def test_values_are_not_coerced():
    section, errors = typed(ratio=1, words=["a", "b"], pair=[1, 2.5], tables=[{"number": 3}], table={"a": 1})
    assert errors == []
    assert section.ratio == 1.0 and type(section.ratio) is float
    assert section.words == ("a", "b") and section.pair == (1.0, 2.5)
    assert section.tables == (Inner(number=3),) and section.table == {"a": 1}
    with pytest.raises(Exception, match="frozen"):
        section.count = 2
    for raw, problem in (
        ({"count": True}, "typed.count = true: must be of type int, not bool"),
        ({"count": 1.0}, "typed.count = 1.0: must be of type int, not float"),
        ({"count": "1"}, "typed.count = '1': must be of type int, not string"),
        ({"ratio": True}, "typed.ratio = true: must be of type float, not bool"),
        ({"ratio": "0.5"}, "typed.ratio = '0.5': must be of type float, not string"),
        ({"on": 1}, "typed.on = 1: must be of type bool, not int"),
        ({"on": "TRUE"}, "typed.on = 'TRUE': must be of type bool, not string; did you mean true?"),
        ({"word": 1}, "typed.word = 1: must be of type string, not int"),
        ({"words": "a"}, "typed.words = 'a': must be of type list of string, not string"),
        ({"words": ["a", 1]}, "typed.words.1 = 1: must be of type string, not int"),
        ({"maybe": 1.5}, "typed.maybe = 1.5: must be of type int, not float"),
        ({"pair": [1]}, "typed.pair.1: is required (allowed: float)"),
        ({"pair": [1, "a"]}, "typed.pair.1 = 'a': must be of type float, not string"),
        ({"tables": [{"number": "a"}]}, "typed.tables.0.number = 'a': must be of type int, not string"),
        ({"tables": [{}]}, "typed.tables.0.number: is required (allowed: int: a number)"),
        (
            {"tables": [{"number": 1, "wrod": 2}]},
            "typed.tables.0.wrod = 2: unknown key; did you mean typed.tables.0.word?",
        ),
        ({"table": {"a b": "c"}}, "typed.table.\"a b\" = 'c': must be of type int, not string"),
        ({"count": -1}, "typed.count = -1: must be greater than or equal to 0"),
        ({"ratio": float("nan")}, "typed.ratio = nan: must be a finite number"),
    ):
        assert typed(**raw) == (None, [problem])
    assert len(typed(count="a", on=3, wodr="b")[1]) == 3


def test_a_check_that_breaks_is_an_error_and_no_crash():
    class Broken(Section):
        @classmethod
        def presets(cls, given):
            return {}["nothing"]

    resolver = Resolver(sources.Tree())
    assert resolver.section(Broken, {}, ("model",)) is None
    (error,) = resolver.errors
    assert "model: the checks of" in str(error) and "KeyError: 'nothing'" in str(error)


@pytest.mark.parametrize("key", ["a", "a.b", 'a."b.c"', '"é"', '""', "a-b_c.1", 'metrics."pkg.mod:Thing"', '"a\\nb"'])
def test_keys_round_trip(key):
    assert dotted(split_key(key)) == key


@pytest.mark.parametrize("text", ["", "a b", "a..b", ".a", "a = 1\nb", "a#", "é", '"a'])
def test_no_keys(text):
    assert split_key(text) is None


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("--a.b=3", {"a": {"b": 3}}),
        ("--a.b=word", {"a": {"b": "word"}}),
        ("--a.b=two words", {"a": {"b": "two words"}}),
        ('--a.b="3"', {"a": {"b": "3"}}),
        ("--a.b=x=y", {"a": {"b": "x=y"}}),
        ("--a.b=", {"a": {"b": ""}}),
        ("--a.b=[1, 2]", {"a": {"b": [1, 2]}}),
        ('--a.b={ name = "c", d = 1e-3 }', {"a": {"b": {"name": "c", "d": 1e-3}}}),
        ('--a."b.c"=true', {"a": {"b.c": True}}),
        ("--a.é=1", {"a": {"é": 1}}),
        ("--a.b=1\nc = 2", {"a": {"b": "1\nc = 2"}}),
        ("--a=/some/path", {"a": "/some/path"}),
    ],
)
def test_overrides(argument, values):
    tree = parse_override(argument)
    assert tree.values == values
    assert set(tree.origins.values()) == {argument.partition("=")[0]}


TEXT = '''\
# comment with a line separator \u2028 in it
base = []
[model]
description = """
[training]
steps = 1
"""
nested = { name = "a", inner = { x = 1, y = [1, 2] } }
"quoted key" = 1
  indented.dotted . key = 2
[training]   # a comment ] with """ in it
steps = 5
matrix = [
  [1, 2],
  ["a", "b"]
]
after = 1
[a."b.c".d]
x = 1
[[list]]
x = 1
[[list]]
  x = 2
  [list.sub]
  y = 3
'''


def test_every_value_knows_its_line(tmp_path):
    file = write(tmp_path, lines=TEXT)
    origins = sources.load(file).origins
    lines = {dotted(key): int(origin.rpartition(":")[2]) for key, origin in origins.items()}
    assert lines == {
        "model": 3,
        "model.description": 4,
        "model.nested": 8,
        "model.nested.name": 8,
        "model.nested.inner": 8,
        "model.nested.inner.x": 8,
        "model.nested.inner.y": 8,
        'model."quoted key"': 9,
        "model.indented": 10,
        "model.indented.dotted": 10,
        "model.indented.dotted.key": 10,
        "training": 11,
        "training.steps": 12,
        "training.matrix": 13,
        "training.after": 17,
        "a": 18,
        'a."b.c"': 18,
        'a."b.c".d': 18,
        'a."b.c".d.x': 19,
        "list": 20,
        "list.0": 20,
        "list.0.x": 21,
        "list.1": 22,
        "list.1.x": 23,
        "list.1.sub": 24,
        "list.1.sub.y": 25,
    }


def test_bom_and_windows_line_ends(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[a]\r\nx = 1\r\n\r\ny = 2\r\n")
    tree = sources.load(tmp_path / "x.toml")
    assert tree.values == {"a": {"x": 1, "y": 2}}
    assert tree.origins[("a", "y")].endswith("x.toml:4")


def test_inheritance_later_wins_tables_merge_lists_are_replaced(tmp_path):
    (tmp_path / "sub").mkdir()
    top = write(
        tmp_path,
        top='base = ["./one.toml", "./sub/two.toml"]\n[t]\nown = 1',
        one="[t]\na = 1\nb = 1\nlist = [{ x = 1 }, { x = 2 }]",
    )
    write(tmp_path / "sub", two='base = "../three.toml"\n[t]\nb = 2\nlist = [{ y = 1 }]')
    write(tmp_path, three="[t]\na = 3\nc = 3")
    tree = sources.load(top, ["--t.c=4", "--u.v=5"])
    assert tree.values == {"t": {"own": 1, "a": 3, "b": 2, "c": 4, "list": [{"y": 1}]}, "u": {"v": 5}}
    place = {dotted(key): origin.removeprefix(f"{tmp_path}/") for key, origin in tree.origins.items()}
    assert place["t.a"] == "three.toml:2" and place["t.b"] == "sub/two.toml:3" and place["t.own"] == "top.toml:3"
    assert place["t.c"] == "--t.c" and place["u.v"] == "--u.v"
    assert "t.list.0.y" in place and "t.list.1" not in place and "t.list.0.x" not in place


def test_a_base_of_two_bases_counts_once(tmp_path):
    top = write(
        tmp_path,
        top='base = ["./b.toml", "./c.toml"]',
        b='base = "./d.toml"\nx = 1',
        c='base = "./d.toml"\ny = 1',
        d="x = 0\ny = 0\nz = 0",
    )
    assert sources.load(top).values == {"x": 1, "y": 1, "z": 0}  # and not x = 0 by reading d over b


def test_imports_are_gathered_once_with_their_folder(tmp_path):
    top = write(tmp_path, top='base = "./b.toml"\nimport = ["./p.py", "m"]', b='\nimport = "./p.py"')
    found = [(entry.reference, entry.folder, entry.where[-1]) for entry in sources.load(top, ["--import=n"]).imports]
    assert found == [("./p.py", tmp_path, "2"), ("./p.py", tmp_path, "2"), ("m", tmp_path, "2"), ("n", None, "t")]


def test_another_name_outdates_settings(tmp_path):
    file = write(tmp_path, x='[c]\nname = "a"\nshared = 1\nonly_a = 2\ninner = { z = 3 }')
    assert sources.load(file).outdated == set()
    assert sources.load(file, ["--c.name=a"]).outdated == set()
    tree = sources.load(file, ["--c.name=b", "--c.only_b=4"])
    assert tree.outdated == {("c", "shared"), ("c", "only_a"), ("c", "inner"), ("c", "inner", "z")}
    # What is given together with the name, in whichever order, is meant for the new component.
    tree = sources.load(file, ["--c.only_a=5", "--c.name=b"])
    assert ("c", "only_a") not in tree.outdated
    # Also where the one before is named by the defaults, and a base gives its settings.
    top = write(tmp_path, top='base = "./b.toml"\n[c]\nname = "b"', b="[c]\nonly_a = 1", defaults='[c]\nname = "a"')
    assert sources.load(top, defaults=tmp_path / "defaults.toml").outdated == {("c", "only_a")}


def test_faults_do_not_hide_each_other(tmp_path):
    with pytest.raises(ConfigErrors) as caught:
        sources.load(tmp_path / "none.toml", ["--=1", "--a=[", "--b.c=1"])
    assert [error.key for error in caught.value.errors] == ["--config", "--=1", "a"]
    file = write(tmp_path, x="[a]\nb = 1\n[c]\nd = 1")
    tree = sources.load(file, ["--a.b.c=1", "--c=2", "--base=3"])
    assert [error.key for error in tree.errors] == ["a.b", "c", "base"]
    assert tree.values == {"a": {"b": 1}, "c": {"d": 1}}


def test_nearest():
    keys = ["steps", "seq_len", "local_batch_size", "data_parallel_shard_degree", "350M", "bfloat16", "linear-sqrt"]
    for wrong, right in (
        ("stpes", "steps"),
        ("step", "steps"),
        ("seqlen", "seq_len"),
        ("Steps", "steps"),
        ("batch_size", "local_batch_size"),
        ("shard_degree", "data_parallel_shard_degree"),
        ("350m", "350M"),
        ("bf16", "bfloat16"),
        ("linear_sqrt", "linear-sqrt"),
        ("xyz", None),
        ("", None),
        ("s", None),
    ):
        assert nearest(wrong, keys) == right, wrong
    assert nearest("a", []) is None


def test_messages():
    error = ConfigError("a.b", "is wrong", value=True, allowed=[1, 2], nearest="a.c", where="x.toml:3")
    assert str(error) == "x.toml:3: a.b = true: is wrong (allowed: 1, 2); did you mean a.c?"
    assert str(ConfigError("b", "is wrong").under("a")) == "a.b: is wrong"
    assert str(ConfigError("", "is wrong").under("a")) == "a: is wrong"
    assert ConfigError("b", "is wrong").at("x:1").at("y:2").where == "x:1"
    assert str(ConfigError("", "is wrong", where="x.toml")) == "x.toml: is wrong"
    assert str(ConfigErrors([error, error])) == f"{error}\n{error}"
    assert shown({"a": [True, "x", 1.5]}) == "{a = [true, 'x', 1.5]}"
    assert "\n" not in shown("a\nb\x1b[31m") and "\x1b" not in shown("a\nb\x1b[31m")
    assert len(shown("x" * 10_000)) < 250 and len(shown(10**5000)) < 250


def test_an_error_cannot_be_changed_and_travels_whole():
    error = MissingError("a", "is wrong", nearest="b")
    with pytest.raises(AttributeError, match="key of a MissingError cannot be changed"):
        error.key = "b"
    other = error.under("x").but(value=None)
    assert str(error) == "a: is wrong; did you mean b?" and type(other) is MissingError
    for each in (error, other):
        assert str(pickle.loads(pickle.dumps(each))) == str(each)


def test_noise_never_crashes(tmp_path):
    """Random lines made of pieces of TOML parse, or fail with ConfigErrors."""
    pieces = [
        "[a]",
        "[[a]]",
        "a",
        "b.c",
        '"',
        "=",
        "1",
        "[",
        "]",
        "{",
        "}",
        ",",
        "\n",
        "#",
        "'''",
        "true",
        "é",
        "\\",
        "é.b",
        " ",
    ]
    draw = random.Random(0)
    parsed = 0
    for _ in range(1500):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 14)))
        (tmp_path / "x.toml").write_text(text)
        try:
            sources.load(tmp_path / "x.toml", ["--" + text])
            parsed += 1
        except ConfigErrors:
            pass
    assert 20 < parsed < 1480


def test_a_recipe_that_is_shipped_is_named_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = sources.load(Path("quickstart")).values
    assert shipped["training"]["steps"] and shipped == sources.load(sources.SHIPPED / "quickstart.toml").values
    (tmp_path / "my.toml").write_text('base = "quickstart"\ntraining.seed = 7')
    found = sources.load(tmp_path / "my.toml").values
    assert found["training"] == {**shipped["training"], "seed": 7} and "description" not in found["job"]
    with pytest.raises(ConfigErrors, match=r"no such file; did you mean quickstart\?"):
        sources.load(Path("quikstart"))
    (tmp_path / "quickstart").write_text("[training]\nsteps = 3")  # a file of one's own of that name comes first
    assert sources.load(Path("quickstart")).values == {"training": {"steps": 3}}
