"""from_table: values between breakpoints by hand, every fault by line and value, and the content that must stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.recipe import changes_since
from titan_prores.config.resolve import resolve
from titan_prores.prores import TableSchedule

DEBUG = Path(__file__).parents[3] / "train_configs" / "debug.toml"
KEY = "transforms.prores.residual_schedule"
TABLE = "step,alpha_1,alpha_2,alpha_3,alpha_4\n10,0.5,0.25,0,1\n20,1,0.25,0,1\n40,1,1,0.5,0\n"
BY_HAND = {
    0: [0.5, 0.25, 0, 1],
    10: [0.5, 0.25, 0, 1],
    15: [0.75, 0.25, 0, 1],
    20: [1, 0.25, 0, 1],
    25: [1, 0.4375, 0.125, 0.75],
    40: [1, 1, 0.5, 0],
    10**9: [1, 1, 0.5, 0],
}


def recipe_of(path: Path | str, *overrides: str):
    own = [f"--{KEY}.name=from_table", f"--{KEY}.path={str(path)!r}", *overrides]
    return resolve(sources.load(DEBUG, own, registry.DEFAULTS))


def build(path: Path | str, n_layers: int = 4, *overrides: str):
    transform = next(spec for spec in recipe_of(path, *overrides).sets["transforms"] if spec.name == "prores")
    return transform.config.residual_schedule.build(n_layers=n_layers)


def written(folder: Path, text: str | bytes, name: str = "alpha.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


VARIANTS = {
    "plain": TABLE,
    "BOM": "\ufeff" + TABLE,
    "CRLF and empty lines": TABLE.replace("\n", "\r\n\r\n"),
    "spaces": TABLE.replace(",", " , "),
    "quotes": TABLE.replace("0.25", '"2.5e-1"'),
}


@pytest.mark.parametrize("text", VARIANTS.values(), ids=VARIANTS)
def test_by_hand(text: str, tmp_path: Path) -> None:
    schedule = build(written(tmp_path, text))
    for step, expected in BY_HAND.items():
        np.testing.assert_allclose(schedule.alpha(step), expected, rtol=1e-15, atol=0)
        assert schedule.alpha(step).dtype == np.float64
    np.testing.assert_array_equal(TableSchedule.parse(text.encode()).alpha(25), schedule.alpha(25))


def test_one_breakpoint_is_a_constant(tmp_path: Path) -> None:
    schedule = build(written(tmp_path, "step,alpha_1\n7,0.3"), n_layers=1)
    assert [schedule.alpha(step).tolist() for step in (0, 7, 99)] == [[0.3]] * 3


HEAD = "step,alpha_1,alpha_2\n"
FAULTS = {
    "empty": ("", "no breakpoint"),
    "header alone": (HEAD, "no breakpoint"),
    "no header": ("0,0,0\n", "line 1: the header has '0' in the place of step"),
    "layers out of order": (
        "step,alpha_2,alpha_1\n0,0,0\n",
        "'alpha_2' in the place of alpha_1 (allowed: step,alpha_1",
    ),
    "no layers": ("step\n0\n", "line 1: the header has '' in the place of alpha_1"),
    "too few": (HEAD + "0,0,0\n5,1\n", "line 3: 2 fields (allowed: 3"),
    "too many": (HEAD + "0,0,0,0\n", "line 2: 4 fields (allowed: 3"),
    "step twice": (HEAD + "0,0,0\n5,1,1\n\n5,1,1\n", "line 5: step = '5' (allowed: an int from 6"),
    "step back": (HEAD + "5,0,0\n4,1,1\n", "line 3: step = '4' (allowed: an int from 6"),
    "negative step": (HEAD + "-1,0,0\n", "line 2: step = '-1' (allowed: an int from 0"),
    "half a step": (HEAD + "0.5,0,0\n", "line 2: step = '0.5'"),
    "huge step": (HEAD + "9" * 19 + ",0,0\n", "line 2: step = '999"),
    "digits of another script": (HEAD + "٣,0,0\n", "line 2: step = '٣'"),
    "above 1": (HEAD + "0,0,1.5\n", "line 2: alpha_2 = '1.5' (allowed: a number from 0 to 1)"),
    "below 0": (HEAD + "0,-0.1,0\n", "line 2: alpha_1 = '-0.1'"),
    "nan": (HEAD + "0,nan,0\n", "line 2: alpha_1 = 'nan'"),
    "inf": (HEAD + "0,0,inf\n", "line 2: alpha_2 = 'inf'"),
    "underscore": (HEAD + "0,0,0_1\n", "line 2: alpha_2 = '0_1'"),
    "no number": (HEAD + "0,0,\n", "line 2: alpha_2 = ''"),
    "word": (HEAD + "0,zero,0\n", "line 2: alpha_1 = 'zero'"),
    "open quote": (HEAD + '0,"0,0\n', "line 2: unexpected end of data"),
    "not UTF-8": (HEAD.encode() + b"0,\xff,0\n", "byte 23 is not UTF-8"),
    "another depth": (HEAD + "0,0,0\n", "its table is for 2 layers, the model has 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_line_value_and_what_is_allowed(fault: str, tmp_path: Path) -> None:
    text, message = FAULTS[fault]
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        build(path)
    assert caught.value.key == f"{KEY}.path" and caught.value.value == str(path)
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.csv", "no such file"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(ConfigError, match=message):
            build(path)


def test_the_path_is_literal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, TABLE, "alpha.csv")
    for path in ("*.csv", "$(echo alpha).csv"):
        with pytest.raises(ConfigError, match="no such file"):
            build(path)
        assert build(written(tmp_path, TABLE, path).name).alpha(0)[0] == 0.5


def test_the_content_must_stay_and_not_the_place(tmp_path: Path) -> None:
    earlier = recipe_of(written(tmp_path, TABLE)).to_dict()
    errors, notes = changes_since(recipe_of(written(tmp_path, TABLE, "moved.csv")), earlier)
    assert errors == [] and [note.split(":")[0] for note in notes] == [f"{KEY}.path"]
    errors, _ = changes_since(recipe_of(written(tmp_path, TABLE.replace("0.25", "0.26"))), earlier)
    assert [error.key for error in errors] == [f"{KEY}.sha256"] and "must stay so" in str(errors[0])


def test_a_hash_that_is_given_is_held_to(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE)
    found = recipe_of(path).to_dict()["transforms"]["prores"]["residual_schedule"]["sha256"]
    assert build(path, 4, f"--{KEY}.sha256={found}").alpha(20).tolist() == BY_HAND[20]
    with pytest.raises(ConfigError, match=f"has another: {found}"):
        build(path, 4, f"--{KEY}.sha256={'0' * 64}")


def test_the_path_is_required() -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolve(sources.load(DEBUG, [f"--{KEY}.name=from_table"], registry.DEFAULTS))
    assert [(error.key, error.problem) for error in caught.value.errors] == [(f"{KEY}.path", "is required")]
