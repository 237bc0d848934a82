"""Every shipped recipe resolves to what tests/unit/golden holds: a change of a default is seen for all of them.

`pytest tests/unit/test_golden_recipes.py --update-golden` rewrites the files.
"""

from pathlib import Path

import pytest
import tomli_w

from titan_prores import config
from titan_prores.config import tomllib
from titan_prores.errors import ConfigErrors
from titan_prores.recipe import Recipe, resolve

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "train_configs").rglob("*.toml"))
GOLDEN = Path(__file__).parent / "golden"
NAMES = {
    path: path.relative_to(ROOT / "train_configs").with_suffix("").as_posix().replace("/", "--") for path in RECIPES
}


def smallest(path: Path) -> tuple[Recipe, int]:
    """The recipe, resolved for the smallest power of two of ranks that it fits."""
    tree = config.load(path, defaults=ROOT / "components" / "defaults.toml")
    for power in range(11):
        try:
            return resolve(tree, 2**power), 2**power
        except ConfigErrors as several:
            errors = several
    raise errors


@pytest.mark.parametrize("path", RECIPES, ids=NAMES.get)
def test_recipe(path, request):
    recipe, ranks = smallest(path)
    file = GOLDEN / f"{NAMES[path]}.toml"
    found = {"ranks": ranks, **recipe.to_dict()}
    if request.config.getoption("--update-golden", default=False):
        file.parent.mkdir(exist_ok=True)
        file.write_text(tomli_w.dumps(found), encoding="utf-8")
    assert file.is_file(), f"no golden file: run pytest {Path(__file__).relative_to(ROOT)} --update-golden"
    assert found == tomllib.loads(file.read_text(encoding="utf-8"))


def test_no_golden_file_without_a_recipe():
    assert {file.stem for file in GOLDEN.glob("*.toml")} == set(NAMES.values())
    assert len(NAMES) == len(set(NAMES.values())) >= 1


def test_shipped_recipes_explain_themselves():
    for path in RECIPES:
        assert path.read_text(encoding="utf-8").startswith("# "), f"{path.name} begins with a comment: what it is for"
        assert config.load(path).values["job"]["description"]


def test_defaults_stand_alone():
    """A recipe that says nothing runs."""
    recipe = resolve(config.load(None, defaults=ROOT / "components" / "defaults.toml"))
    assert recipe.slots["model"].name == "llama"
    assert [part.name for part in recipe.sets["parallelism"]] == ["fsdp", "tensor_parallel"]
    assert recipe.sets["transforms"] == ()
