"""Every example of docs/extending.md is checked as its own recipe, and trains (slow)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch import fork
from titan_prores import NORM_SCHEMES, WEIGHT_INITS, cli
from titan_prores.config import registry
from titan_prores.config.kinds import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {text.split("\n", 1)[0]: text for text in PAGE.split("\n## ")[1:]}
EXAMPLES = {title: dict(re.findall(r"```(python|toml)\n(.*?)```", text, re.S)) for title, text in SECTIONS.items()}
# What a run shows only with the component of the example, by its heading.
SHOWS = {"Metric": "embedding_norm", "Loss": "z_loss", "Validator": "validation_accuracy"}


def written(title: str, folder: Path) -> Path:
    """The recipe of an example, beside its component and what it reads."""
    (folder / "my_parts.py").write_text(EXAMPLES[title]["python"])
    (folder / "texts.csv").write_text("text\n" + "\n".join(f'"{"a sentence of its own, " * 40}{n}"' for n in range(30)))
    recipe = folder / "my.toml"
    head = f'base = "{ROOT}/train_configs/debug.toml"\nimport = ["./my_parts.py"]\n'
    recipe.write_text(head + EXAMPLES[title]["toml"])
    return recipe


@pytest.fixture(autouse=True)
def no_component_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = {kind: {name: registry.lookup(kind, name) for name in registry.names(kind)} for kind in KINDS}
    monkeypatch.setattr(registry, "_table", known)
    schemes, inits = dict(NORM_SCHEMES), dict(WEIGHT_INITS)
    yield
    for table, before in ((NORM_SCHEMES, schemes), (WEIGHT_INITS, inits)):
        for name in table.keys() - before.keys():
            del table[name]


@pytest.mark.parametrize("title", EXAMPLES)
def test_check(title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(title, tmp_path)
    assert cli.main(["--config", str(recipe), "--check"]) == 0
    report = capsys.readouterr().out
    last = 2 + EXAMPLES[title]["toml"].count("\n")
    assert re.search(rf"# \S*my\.toml:{last}$", report, re.MULTILINE), "the last line of the recipe counts"


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_train(title: str, tmp_path: Path) -> None:
    recipe = written(title, tmp_path)
    arguments = [f"--job.dump_folder={tmp_path}/run", f"--dataset.cache_folder={tmp_path}/cache"]
    arguments += ["--training.stop_after=2", "--metrics.jsonl.enabled=true"]
    if "[dataset]" not in EXAMPLES[title]["toml"]:
        corpus = ROOT / "tests" / "data" / "corpus.txt"
        arguments += ["--dataset.name=text", f"--dataset.files=['{corpus}']", "--dataset.txt_document=paragraph"]
        arguments += ["--dataset.validation_fraction=0.1"]
    fork("--config", str(recipe), *arguments)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation" not in row] == [1, 2]
    if title in SHOWS:
        assert any(SHOWS[title] in row for row in rows)


def test_every_kind_has_an_example() -> None:
    registered = set(re.findall(r'@register\("(\w+)"', PAGE))
    assert registered | {"parallelism", "checkpoint"} == set(KINDS)
    assert {"Norm placement", "Weight initialization"} <= EXAMPLES.keys()
    assert not re.search(r"from titan_prores\.\w", PAGE), "a plug-in needs nothing deeper than the public face"
