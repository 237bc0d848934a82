"""What the README shows works as it stands there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch
from torch import nn

from titan_prores.config import registry, sources
from titan_prores.config.resolve_recipe import resolve
from titan_prores.prores import ResidualAdd
from titan_prores.tools.sweep import plan

REPOSITORY = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


def defined(tests: Path) -> set[str]:
    """Names of test files, and of the test functions in them, that pytest would collect."""
    found = set()
    for path in tests.rglob("test_*.py"):
        found.add(path.name)
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
            found |= {each.name for each in inside if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return {name for name in found if name.startswith("test_")}


def test_every_test_that_it_names_exists() -> None:
    text = (REPOSITORY / "README.md").read_text()
    named = set(re.findall(r"`(test_[^`]*)`", text))
    assert not named - defined(REPOSITORY / "tests")
    table = text.split("### Runs that are stopped, killed or damaged\n")[1].strip().split("\n\n")[0].splitlines()
    assert table[0].split("|")[-2].strip() == "test" and len(table) > 10
    for row in table[2:]:
        proofs = row.split("|")[-2]
        assert re.fullmatch(r" `test_\w+(\.py)?`(, `test_\w+(\.py)?`)* ", proofs), f"no test proves this: {row}"


def test_a_test_that_is_not_there_would_be_missed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_one(): ...\ndef helper():\n    def test_inside(): ...\n# def test_two(): ...\n"
        "class TestThree:\n    def test_four(self): ..."
    )
    assert defined(tmp_path) == {"test_a.py", "test_one", "test_four"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.add = nn.Linear(4, 4), ResidualAdd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, self.f(x))


class MyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_plain_loop() -> None:
    loop = next(block for block in blocks("python") if "Schedule(" in block)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 8
    x = torch.randn(2, 4)
    optimizer = type("", (), {"step": lambda s: None, "zero_grad": lambda s: None})()
    names = {
        "MyTransformer": MyTransformer,
        "batches": [(x, x)] * 4,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": optimizer,
    }
    exec(loop, names)
    assert names["prores"].values.tolist() == [torch.tensor(3 / (1000 * n)).item() for n in (1, 2, 3)]


def test_the_recipe_and_the_component(tmp_path: Path) -> None:
    recipe = next(block for block in blocks("toml") if "flavor" in block)
    component = next(block for block in blocks("python") if "@register" in block)
    own = next(block for block in blocks("toml") if "my_parts" in block)
    (tmp_path / "my_parts.py").write_text(component)
    imported, own = own.split("\n", 1)
    (tmp_path / "my.toml").write_text(
        f"{imported}\n{recipe.replace('[lr_scheduler]', own).replace('warmup_steps = 6000', '')}"
    )
    tree = sources.load(tmp_path / "my.toml", ["--optimizer.lr=3e-4"], registry.DEFAULTS)
    resolved = resolve(tree, 8)
    assert resolved.slots["lr_scheduler"].config.period == 500
    assert resolved.slots["model"].config.n_layers == 24 and resolved.slots["optimizer"].config.lr == 3e-4


def test_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(next(block for block in blocks("toml") if "[[grids]]" in block))
    sweep = plan.load(tmp_path / "sweep.toml")
    # The baselines of seed 0 are runs of the first grid, whichever is the best.
    for metric in (lambda run: None, lambda run: float(run.values["seed"])):
        assert len(sweep.runs(metric)) == 2 * 3 + 2 * 3 * 2 - 2
