"""One process, FSDP2 and HSDP compute the same run: weights, gradients by name, losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.distributed.parity import BASELINE, PRORES, STEPS, assert_same_run, train, train_all
from tests.distributed.spawn import run_ranks
from titan_prores import build as build_module
from titan_prores.model.weight_init import init_weights, match_rules, name_seed

pytestmark = pytest.mark.timeout(600)

LAYOUTS = {
    "one": (1, []),
    "fsdp2": (2, ["--parallelism.data_parallel_shard_degree=2"]),
    "fsdp2-offload-prefetch": (
        2,
        [
            "--parallelism.fsdp.cpu_offload=true",
            "--parallelism.fsdp.forward_prefetch=2",
            "--parallelism.fsdp.backward_prefetch=2",
            "--parallelism.fsdp.reshard_after_forward=always",
            "--parallelism.fsdp.accumulate_gradients=sharded",
        ],
    ),
    "hsdp2x2": (4, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"]),
}
VARIANTS = {"prores": [PRORES], "baseline": [BASELINE]}


def draw_in_place(model: torch.nn.Module, rules: Any, seed: int) -> None:
    """The wrong way to initialise a sharded model."""
    for name, rule in match_rules(rules, dict(model.named_parameters())).items():
        with torch.no_grad():
            local = dict(model.named_parameters())[name].to_local()
            rule.distribution(local, torch.Generator().manual_seed(name_seed(seed, name)))


def train_broken(rank: int, world_size: int, overrides: list[str], folder: str) -> dict[str, Any]:
    """Both variants, each with a fault of its own."""
    results = {}
    # Drawing what is there already: every rank of the mesh gets the same part.
    build_module.init_weights = draw_in_place
    results["prores"] = train(rank, world_size, [*overrides, *VARIANTS["prores"]], f"{folder}/prores")
    # FSDP's own mean over ranks on top of the division by the global number of labels.
    build_module.init_weights = init_weights
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None
    results["baseline"] = train(rank, world_size, [*overrides, *VARIANTS["baseline"]], f"{folder}/baseline")
    return results


def run_layout(layout: str, folder: Path) -> dict[str, Any]:
    world_size, overrides = LAYOUTS[layout]
    return run_ranks(train_all, world_size, overrides, str(folder / layout), VARIANTS, timeout=240)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return run_layout("one", folder)


def test_reference_has_gradients_where_expected(reference: dict[str, Any]) -> None:
    """At alpha = 0, step 1 of ProRes, branches get none; without ProRes every parameter gets one."""
    for (step, name), gradient in reference["baseline"]["gradients"].items():
        assert gradient.norm() > 0, (step, name)
    for (step, name), gradient in reference["prores"]["gradients"].items():
        assert bool(gradient.norm() > 0) == (step == 2 or not name.startswith("layers.")), (step, name)
    assert len(reference["prores"]["losses"]) == STEPS
    assert reference["baseline"]["losses"][-1] < reference["baseline"]["losses"][0] - 0.5


@pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2-offload-prefetch", "hsdp2x2"))]
)
def test_layout_equals_one_process(layout: str, folder: Path, reference: dict[str, Any]) -> None:
    runs = run_layout(layout, folder)
    for variant in VARIANTS:
        assert_same_run(runs[variant], reference[variant])


@pytest.mark.slow
def test_comparison_notices_what_is_wrong(folder: Path, reference: dict[str, Any]) -> None:
    """Negative controls: weights drawn shard by shard, and gradients divided twice."""
    world_size, overrides = LAYOUTS["fsdp2"]
    runs = run_ranks(train_broken, world_size, overrides, str(folder / "broken"), timeout=240)[0]
    with pytest.raises(AssertionError, match="initial"):
        assert_same_run(runs["prores"], reference["prores"])
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_run(runs["baseline"], reference["baseline"])
