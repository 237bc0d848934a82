"""Frozen parameters: what `--check` counts of them, and what is refused. Parity is in tests/distributed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from components.model.llama import Llama, LlamaConfig
from titan_prores import config, registry
from titan_prores.check import report
from titan_prores.errors import ConfigError
from titan_prores.recipe import resolve

ROOT = Path(__file__).parents[2]
FROZEN = "--model.name=tests.distributed.frozen:FrozenLlama"


class AllFrozen(Llama):
    Config = LlamaConfig

    def __init__(self, config: LlamaConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self.requires_grad_(False)


def check(*overrides: str, world_size: int = 1) -> str:
    tree = config.load(ROOT / "train_configs/debug.toml", overrides, registry.builtin_folder() / "defaults.toml")
    return report(resolve(tree, world_size), world_size)


def size(text: str, what: str) -> int:
    return int(re.search(rf"^  {what} +([\d,]+)", text, re.MULTILINE)[1].replace(",", ""))


@pytest.mark.parametrize("ranks", [["1"], ["2", "--parallelism.tensor_parallel_degree=2"]])
def test_check_counts_gradients_and_optimizer_state_of_trained_parameters(ranks: list[str]) -> None:
    text = check(FROZEN, *ranks[1:], world_size=int(ranks[0]))
    total, trained = re.search(r"^parameters +([\d,]+) \(.*M\) \(([\d,]+) trained\)$", text, re.MULTILINE).groups()
    total, trained = int(total.replace(",", "")), int(trained.replace(",", ""))
    assert 0 < trained < total
    if ranks[0] == "1":
        assert (size(text, "parameters"), size(text, "gradients")) == (4 * total, 4 * trained)
    assert 2 * size(text, "gradients") <= size(text, "optimizer") <= 2 * size(text, "gradients") + 4096  # and step
    assert size(text, "gradients") < size(text, "parameters")
    assert size(text, "activations") > 0
    whole = check(*ranks[1:], world_size=int(ranks[0]))
    assert "trained)" not in whole and size(text, "activations") < size(whole, "activations")


def test_a_model_without_trained_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: every parameter is frozen, so there is nothing to train"):
        check("--model.name=tests.unit.test_frozen:AllFrozen")


def test_a_group_of_frozen_parameters_alone_is_refused() -> None:
    groups = '--optimizer.groups=[{patterns = ["tok_embeddings.*"], lr_scale = 2.0}]'
    check(groups)
    with pytest.raises(Exception, match=r"optimizer\.groups\[0\]\.patterns.*matches no trained parameter"):
        check(FROZEN, groups)
