"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from titan_prores import config, registry
from titan_prores.prores import ResidualAdd
from titan_prores.recipe import resolve
from titan_prores.sweep import plan

REPOSITORY = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


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
        "MyTransformer": MyTransformer, "batches": [(x, x)] * 4, "loss_fn": nn.functional.mse_loss,
        "optimizer": optimizer,
    }  # fmt: skip
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
    tree = config.load(tmp_path / "my.toml", ["--optimizer.lr=3e-4"], registry.builtin_folder() / "defaults.toml")
    resolved = resolve(tree, 8)
    assert resolved.slots["lr_scheduler"].config.period == 500
    assert resolved.slots["model"].config.n_layers == 24 and resolved.slots["optimizer"].config.lr == 3e-4


def test_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(next(block for block in blocks("toml") if "[[grids]]" in block))
    sweep = plan.load(tmp_path / "sweep.toml")
    assert len(sweep.runs(lambda run: None)) == 2 * 3 + 2 * 3 * 2
    assert len(sweep.runs(lambda run: float(run.values["seed"]))) == 2 * 3 + 2 * 3 * 2 - 2
