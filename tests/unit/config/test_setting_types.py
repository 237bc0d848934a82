"""A component's Config may use the usual types: each is set from TOML and written back, or refused when registered."""

import datetime
import enum
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from annotated_types import Len
from pydantic import BaseModel, Field, PositiveInt

from titan_prores.config import registry, sources
from titan_prores.config.component_spec import dump, resume_rules
from titan_prores.config.errors import ConfigError
from titan_prores.config.keys import inline
from titan_prores.config.resolve import Resolver
from titan_prores.config.sections import Section, setting
from titan_prores.config.setting_types import type_name, unusable
from titan_prores.config.sources import tomllib


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(Section):
    number: int = setting(help="a number")
    paths: list[Path] = setting(default_factory=list)


class Usual(Section):
    words: list[str] = setting(["x"], "words")
    fixed: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    unique: set[str] = setting(default_factory=set)
    frozen: frozenset[int] = frozenset()
    sequence: Sequence[str] = ()
    bare: list = setting(default_factory=list)
    table: dict[str, list[int]] = setting(default_factory=dict)
    mapping: Mapping[str, float] = setting(default_factory=dict)
    anything: dict[str, Any] = setting(default_factory=dict)
    path: Path = Path("a/b")
    color: Color = Color.RED
    colors: list[Color] = setting(default_factory=list)
    maybe: Optional[list[str]] = None  # noqa: UP045
    choice: list[str] | str = "x"
    other: dict[str, int] | list[list[int]] | None = None
    mode: Literal["a", "b"] | int = "a"
    inner: Inner | None = None
    inners: list[Inner] = setting(default_factory=list)
    named: dict[str, Inner] = setting(default_factory=dict)
    positive: PositiveInt = 1
    short: Annotated[list[str], Len(0, 2)] = setting(default_factory=list)
    nested: dict[str, list[tuple[int, str]]] = setting(default_factory=dict)


GIVEN = {
    "words": (["a", "b"], ["a", "b"]),
    "fixed": ([3, 4], (3, 4.0)),
    "many": (["a"], ("a",)),
    "unique": (["b", "a", "b"], {"a", "b"}),
    "frozen": ([2, 1], frozenset({1, 2})),
    "sequence": (["a"], ("a",)),
    "bare": ([1, "a", [2]], [1, "a", (2,)]),
    "table": ({"k": [1, 2]}, {"k": [1, 2]}),
    "mapping": ({"k": 1}, {"k": 1.0}),
    "anything": ({"k": [1, {"l": [2]}]}, {"k": (1, {"l": (2,)})}),
    "path": ("c", Path("c")),
    "color": ("blue", Color.BLUE),
    "colors": (["red", "blue"], [Color.RED, Color.BLUE]),
    "maybe": (["a"], ["a"]),
    "choice": (["a"], ["a"]),
    "other": ([[1], [2]], [[1], [2]]),
    "mode": (3, 3),
    "inner": ({"number": 1, "paths": ["a"]}, Inner(number=1, paths=[Path("a")])),
    "inners": ([{"number": 1}], [Inner(number=1)]),
    "named": ({"k": {"number": 1}}, {"k": Inner(number=1)}),
    "positive": (2, 2),
    "short": (["a"], ["a"]),
    "nested": ({"k": [[1, "a"]]}, {"k": [(1, "a")]}),
}


def resolved(section, raw):
    resolver = Resolver(sources.Tree())
    return resolver.section(section, raw, ("s",)), [str(error) for error in resolver.errors]


def test_every_usual_type_is_set_and_written_back():
    assert unusable(Usual) is None and GIVEN.keys() == Usual.model_fields.keys()
    for name, (raw, value) in GIVEN.items():
        section, errors = resolved(Usual, {name: raw})
        assert errors == [] and getattr(section, name) == value, (name, errors)
        assert type(getattr(section, name)) is type(value)
    everything, errors = resolved(Usual, {name: raw for name, (raw, _) in GIVEN.items()})
    assert errors == []
    for section in (everything, Usual()):
        written = tomllib.loads(f"s = {inline(dump(section))}")["s"]
        assert resolved(Usual, written) == (section, [])
    assert dump(everything)["unique"] == ["a", "b"], "in an order that is the same each time"
    defaults = {key[0]: rule.default for key, rule in resume_rules(Usual(), "same").items()}
    assert defaults["unique"] == [] and defaults["color"] == "red" and defaults["path"] == "a/b"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"words": "a"}, "s.words = 'a': must be of type list of string, not string"),
        ({"words": ["a", 1]}, "s.words.1 = 1: must be of type string, not int"),
        ({"words": {"a": 1}}, "s.words = {a = 1}: must be of type list of string, not table"),
        ({"unique": [1]}, "s.unique.0 = 1: must be of type string, not int"),
        ({"unique": [["a"]]}, "s.unique.0 = ['a']: must be of type string, not list"),
        ({"sequence": "abc"}, "s.sequence = 'abc': must be of type list of string, not string"),
        ({"table": {"k": [1, "a"]}}, "s.table.k.1 = 'a': must be of type int, not string"),
        ({"path": 1}, "s.path = 1: must be of type path, not int"),
        ({"color": "bleu"}, 's.color = \'bleu\': not one of the choices (allowed: "red", "blue"); did you mean blue?'),
        ({"colors": ["red", 1]}, 's.colors.1 = 1: not one of the choices (allowed: "red", "blue")'),
        ({"choice": 1}, "s.choice = 1: must be of type list of string | string"),
        ({"other": [[1], ["a"]]}, "s.other = [[1], ['a']]: must be of type table of int | list of list of int"),
        (
            {"inners": [{"number": 1}, {"nubmer": 2, "number": 3}]},
            "s.inners.1.nubmer = 2: unknown key; did you mean s.inners.1.number?",
        ),
        ({"named": {"k": {"number": "a"}}}, "s.named.k.number = 'a': must be of type int, not string"),
        ({"nested": {"k": [[1, 2]]}}, "s.nested.k.0.1 = 2: must be of type string, not int"),
        ({"positive": 0}, "s.positive = 0: must be greater than 0"),
        ({"short": ["a", "b", "c"]}, "s.short = ['a', 'b', 'c']: must have at most 2 values"),
    ],
)
def test_what_does_not_fit_is_said_once(raw, message):
    assert resolved(Usual, raw) == (None, [message])


class Plain(BaseModel):
    x: int = 1


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        (bytes, "a recipe cannot hold: bytes"),
        (datetime.date, "date"),
        (complex, "complex"),
        (Plain, "Plain"),
        (list[Plain], "Plain"),
        (dict[int, str], "a table with keys of type int"),
        (Iterable[int], "Iterable"),
        (dict[str, list[bytes | None]], "bytes"),
        (enum.Enum("Odd", {"A": 1.5}), "1.5"),
        ("Nowhere", "types that cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_type_that_no_recipe_can_hold_is_refused_when_registered(annotation, why):
    class Odd:
        def __init__(self, config, *, total_steps): ...
        def factor(self, step): ...

    Odd.Config = type("Config", (Section,), {"__annotations__": {"odd": annotation}, "__module__": __name__})
    with pytest.raises(ConfigError) as caught:
        registry.register("lr_scheduler", "odd_types")(Odd)
    assert why in str(caught.value)
    assert "odd_types" not in registry.names("lr_scheduler")


def test_an_alias_is_refused():
    class Aliased(Section):
        x: int = Field(1, alias="y")

    assert "alias" in unusable(Aliased)


def test_names_of_types():
    names = {name: type_name(info.annotation) for name, info in Usual.model_fields.items()}
    assert names["words"] == names["unique"] == names["maybe"] == "list of string"
    assert names["color"] == '"red" | "blue"' and names["path"] == "path" and names["fixed"] == "[int, float]"
    assert names["mode"] == '"a" | "b" | int' and names["table"] == "table of list of int"
