"""Frozen parameters: what `--check` counts of them, and what is refused. Parity is in tests/distributed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.distributed.adapters import LoRA
from titan_prores.build import build_components, transform_model
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import resolve
from titan_prores.distributed import mesh as mesh_module
from titan_prores.dry_run.report import report
from titan_prores.model.parameter_groups import trained_parameters

ROOT = Path(__file__).parents[3]
FROZEN = "--model.name=tests.distributed.frozen:FrozenLlama"


class AllFrozen(Llama):
    Config = LlamaConfig

    def __init__(self, config: LlamaConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self.requires_grad_(False)


def check(*overrides: str, world_size: int = 1) -> str:
    tree = sources.load(ROOT / "train_configs/debug.toml", overrides, registry.DEFAULTS)
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
        check("--model.name=tests.unit.model.test_frozen:AllFrozen")


def test_a_group_of_frozen_parameters_alone_is_refused() -> None:
    groups = '--optimizer.groups=[{patterns = ["tok_embeddings.*"], lr_scale = 2.0}]'
    check(groups)
    with pytest.raises(Exception, match=r"optimizer\.groups\[0\]\.patterns.*matches no trained parameter"):
        check(FROZEN, groups)


ADAPTERS = "--transforms.lora.name=tests.distributed.adapters:LoRA"
TRAINED = 4 * 2 * 4 * (64 + 64)  # 4 layers, 2 linears each, of rank 4


class GroupedAdapters(LoRA):
    """Its parameters have a group of their own: nothing that is trained is left for the optimizer's."""

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [p for _, p in trained_parameters(model)], "lr": 0.5, "weight_decay": 0.0}]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("adapters", [ADAPTERS, "--transforms.lora.name=tests.unit.model.test_frozen:GroupedAdapters"])
def test_parameters_that_a_transform_adds_are_all_that_is_trained(adapters: str, tp: int) -> None:
    text = check(adapters, f"--parallelism.tensor_parallel_degree={tp}", world_size=tp)
    assert f"({TRAINED:,} trained)" in text
    assert size(text, "gradients") == 4 * TRAINED  # each rank of tp has them whole


def test_a_group_of_added_parameters() -> None:
    def groups(pattern: str) -> str:
        return f'--optimizer.groups=[{{patterns = ["{pattern}"], lr_scale = 2.0}}]'

    check(ADAPTERS, groups("*.lora_b.weight"))
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.patterns.*lora_c.*matches no trained parameter"):
        check(ADAPTERS, groups("*.lora_c.weight"))


def test_what_is_inside_of_a_split_linear_is_whole_on_every_rank() -> None:
    """And is split nowhere by the way: a checkpoint has the same names and shapes on every layout."""
    tree = sources.load(
        ROOT / "train_configs/debug.toml",
        [ADAPTERS, "--parallelism.tensor_parallel_degree=2", "--parallelism.fsdp.enabled=false"],
        registry.DEFAULTS,
    )
    recipe, degrees = resolve(tree, 2), {"dp_replicate": 1, "dp_shard": 1, "tp": 2}
    components = build_components(recipe, degrees)
    mesh = mesh_module.start_fake(degrees)
    try:
        transform_model(recipe, components, mesh)
    finally:
        mesh_module.stop()
    attention = components.model.layers[0].attention
    assert (attention.wq.weight.placements, attention.wo.weight.placements) == ((Shard(0),), (Shard(1),))
    for name, parameter in components.model.named_parameters():
        assert parameter.requires_grad == ("lora" in name)
        assert "lora" not in name or parameter.placements == (Replicate(),), name
