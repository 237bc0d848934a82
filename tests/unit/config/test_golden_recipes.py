"""Every shipped recipe resolves to what tests/unit/config/golden holds: a change of a default is seen for all of them.

A recipe that stands on no other has a file of its own, with every value. Of the others inherited.toml has what differs
from the first recipe that they stand on. Run pytest on this file with --update-golden to rewrite them.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from titan_prores.config import sources
from titan_prores.config.errors import ConfigErrors
from titan_prores.config.keys import dotted
from titan_prores.config.recipe import flatten
from titan_prores.config.resolve import resolve
from titan_prores.config.sources import tomllib

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "train_configs"
GOLDEN = Path(__file__).parent / "golden"
INHERITED = GOLDEN / "inherited.toml"
PATHS = sorted(FOLDER.rglob("*.toml"))
TABLES = {path: tomllib.loads(path.read_text(encoding="utf-8")) for path in PATHS}
# A sweep, or what it stands on, says which recipe it is about; it is none.
RECIPES = [path for path in PATHS if "recipe" not in sources.load(path).values]
NAMES = {path: path.relative_to(FOLDER).with_suffix("").as_posix() for path in RECIPES}
ROOTS = [path for path in RECIPES if "base" not in TABLES[path]]


@cache
def resolved(path: Path) -> dict[str, Any]:
    """The recipe, for the smallest power of two of ranks that it fits."""
    tree = sources.load(path, defaults=ROOT / "components" / "defaults.toml")
    for power in range(11):
        try:
            return {"ranks": 2**power, **resolve(tree, 2**power).to_dict()}
        except ConfigErrors as several:
            errors = several
    raise errors


def difference(path: Path) -> dict[str, Any]:
    """What differs from the first recipe that this one stands on, but for its own name and folder."""
    base = TABLES[path]["base"]
    first = (path.parent / (base if isinstance(base, str) else base[0])).resolve()
    before, now = flatten(resolved(first)), flatten(resolved(path))
    changed = {dotted(key): value for key, value in now.items() if key[0] != "job" and before.get(key) != value}
    gone = [dotted(key) for key in before if key not in now]
    return {**changed, **({"gone": gone} if gone else {})}


@pytest.mark.parametrize("path", ROOTS, ids=NAMES.get)
def test_recipe_that_stands_alone(path, request):
    file = GOLDEN / f"{NAMES[path].replace('/', '--')}.toml"
    if request.config.getoption("--update-golden", default=False):
        file.parent.mkdir(exist_ok=True)
        file.write_text(tomli_w.dumps(resolved(path)), encoding="utf-8")
    assert file.is_file(), f"no golden file: run pytest {Path(__file__).relative_to(ROOT)} --update-golden"
    assert resolved(path) == tomllib.loads(file.read_text(encoding="utf-8"))


def test_recipes_that_stand_on_others(request):
    found = {NAMES[path]: difference(path) for path in RECIPES if path not in ROOTS}
    if request.config.getoption("--update-golden", default=False):
        INHERITED.write_text(tomli_w.dumps(found), encoding="utf-8")
    assert found == tomllib.loads(INHERITED.read_text(encoding="utf-8"))


def test_no_golden_file_without_a_recipe():
    stems = {NAMES[path].replace("/", "--") for path in ROOTS}
    assert {file.stem for file in GOLDEN.glob("*.toml")} == stems | {"inherited"}
    assert len(RECIPES) == len(set(NAMES.values())) >= 1


def test_shipped_recipes_explain_themselves():
    for path in TABLES:
        assert path.read_text(encoding="utf-8").startswith("# "), f"{path.name} begins with a comment: what it is for"
    for path in RECIPES:
        assert TABLES[path]["job"]["description"], path
    folders = [TABLES[path]["job"]["dump_folder"] for path in RECIPES]
    assert len(folders) == len(set(folders)), "two recipes would write into one folder"


def test_defaults_stand_alone():
    """A recipe that says nothing runs."""
    recipe = resolve(sources.load(None, defaults=ROOT / "components" / "defaults.toml"))
    assert recipe.slots["model"].name == "llama"
    assert [spec.name for spec in recipe.sets["parallelism"]] == ["fsdp", "tensor_parallel"]
    assert recipe.sets["transforms"] == ()
