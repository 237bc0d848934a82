"""Keys of earlier versions: refused in a recipe with their new name, read in what checkpoints and results hold."""

from __future__ import annotations

import pytest

from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigErrors
from titan_prores.config.recipe import changes_since
from titan_prores.config.renamed_keys import RENAMED_KEYS, with_new_keys
from titan_prores.config.resolve import resolve


def test_stored_tables_get_the_new_keys() -> None:
    stored = {"checkpoint": {"keep_every": 6, "interval": 3}, "training": {"steps": 7}}
    assert with_new_keys(stored) == {"checkpoint": {"keep_every_steps": 6, "interval": 3}, "training": {"steps": 7}}
    assert stored["checkpoint"]["keep_every"] == 6, "the tables given stay as they are"
    assert with_new_keys({"checkpoint": {"keep_every": 6, "keep_every_steps": 9}})["checkpoint"] == {
        "keep_every_steps": 9
    }
    assert with_new_keys({"checkpoint": "dcp"}) == {"checkpoint": "dcp"} and with_new_keys({}) == {}


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_recipe_that_has_an_old_key_is_told_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigErrors, match=rf"{old} = 6: was renamed to {new}$"):
        resolve(sources.load(None, [f"--{old}=6"], registry.DEFAULTS))


def test_a_renamed_key_is_no_change() -> None:
    recipe = resolve(sources.load(None, ["--checkpoint.keep_every_steps=6"], registry.DEFAULTS))
    earlier = recipe.to_dict()
    table = earlier["checkpoint"]
    earlier["checkpoint"] = {("keep_every" if key == "keep_every_steps" else key): table[key] for key in table}
    assert changes_since(recipe, with_new_keys(earlier)) == ([], [])
    assert len(changes_since(recipe, earlier)[1]) == 2, "what would be said without it"
