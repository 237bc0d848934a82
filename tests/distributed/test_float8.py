"""Float8 on several ranks against the same float8 recipe in one process: gradients by name, losses.

FSDP2 changes no cast, so gradients agree as they do without float8. Under tensor parallelism sums are taken in another
order, and what that moves across a rounding boundary of 8 bits shows; how far is held against how far float8 itself is
from high precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.parity import BASELINE, train, train_all
from tests.distributed.spawn import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLOAT8 = "--transforms.float8."
ALL_GATHER = [f"{FLOAT8}enable_fsdp_float8_all_gather=true", f"{FLOAT8}precompute_float8_dynamic_scale_for_fsdp=true"]
SMALL = [
    BASELINE,
    "--model.n_layers=2",
    "--model.ffn_dim=192",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    # One scale a tensor of activations: every layout has to cut the batch into the same microbatches.
    "--training.local_batch_size=2",
    "--training.steps=3",
    "--lr_scheduler.warmup_steps=2",
    "--validation.enabled=false",
]
OFF = {"off": []}
VARIANTS = {
    "tensorwise": [f"{FLOAT8}recipe_name=tensorwise"],
    "rowwise": [f"{FLOAT8}recipe_name=rowwise"],
    "rowwise_with_gw_hp": [f"{FLOAT8}recipe_name=rowwise_with_gw_hp"],
    "all_gather": ALL_GATHER,
    # The output too; some linears below a gathered module are not float8, so that it is gathered in high precision.
    "mixed": [f'{FLOAT8}filter_fqns=["attention.wk", "w2"]', "--model.vocab_size=288"],
    "all": [f"{FLOAT8}filter_fqns=[]", "--model.vocab_size=288", *ALL_GATHER],
}
TP = "--parallelism.tensor_parallel_degree=2"
# Share of the distance between float8 and high precision that another order of summation may come to.
TENSOR_PARALLEL_SHARE = 0.25


def train_without_shared_scales(rank: int, world_size: int, overrides: list[str], folder: str) -> dict[str, Any]:
    """The wrong way: each rank of tp scales its part of a weight by its own largest value, as all-gathers do alone."""
    from titan_prores.components.transform.float8 import Float8

    Float8._precompute = lambda self: None
    return train(rank, world_size, [*overrides, *VARIANTS["all_gather"]], f"{folder}/unshared")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("float8")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return run_ranks(train_all, 1, SMALL, str(folder / "one"), OFF | VARIANTS, timeout=300)[0]


def distance(run: dict[str, Any], expected: dict[str, Any]) -> float:
    """Mean over all gradients of the distance, relative to the norm; fails on an unexpected zero."""
    total = 0.0
    assert run["gradients"].keys() == expected["gradients"].keys()
    for key, gradient in expected["gradients"].items():
        assert gradient.norm() > 0 and run["gradients"][key].norm() > 0, f"zero gradient of {key}"
        total += float((run["gradients"][key] - gradient).norm() / gradient.norm())
    return total / len(expected["gradients"])


def test_float8_is_on(reference: dict[str, Any]) -> None:
    for variant in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        assert 0.03 < distance(reference[variant], reference["off"]) < 0.1, variant
    # Gathering weights in float8 casts them before instead of after.
    assert distance(reference["all_gather"], reference["tensorwise"]) < 1e-6


@pytest.mark.parametrize("replicas", [1, 2])
def test_data_parallel_ranks_compute_the_same_casts(replicas: int, folder: Path, reference: dict[str, Any]) -> None:
    overrides = [*SMALL, f"--parallelism.data_parallel_replicate_degree={replicas}"]
    where = str(folder / f"replicas{replicas}")
    runs = run_ranks(train_all, 2 * replicas, overrides, where, VARIANTS, timeout=300)[0]
    for variant in VARIANTS:
        for key, gradient in reference[variant]["gradients"].items():
            error = (runs[variant]["gradients"][key] - gradient).norm()
            assert gradient.norm() > 0 and error <= 1e-5 * gradient.norm(), (variant, key)
        torch.testing.assert_close(runs[variant]["losses"], reference[variant]["losses"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_compute_the_same_casts(ranks: int, folder: Path, reference: dict[str, Any]) -> None:
    """With 4 ranks under FSDP2 as well, which gathers in float8 what tp has split."""
    names = list(VARIANTS) if ranks == 2 else ["tensorwise", "rowwise", "all_gather", "all"]
    variants = {name: VARIANTS[name] for name in names}
    runs = run_ranks(train_all, ranks, [*SMALL, TP], str(folder / f"tp{ranks}"), variants, timeout=400)[0]
    noise = distance(reference["tensorwise"], reference["off"])
    for variant in variants:
        assert distance(runs[variant], reference[variant]) < TENSOR_PARALLEL_SHARE * noise, variant
        torch.testing.assert_close(runs[variant]["losses"], reference[variant]["losses"], rtol=0, atol=1e-3)


def test_comparison_notices_scales_that_are_not_shared(folder: Path, reference: dict[str, Any]) -> None:
    """Negative control: the sums are right but for the casts."""
    run = run_ranks(train_without_shared_scales, 2, [*SMALL, TP], str(folder / "broken"), timeout=200)[0]
    noise = distance(reference["tensorwise"], reference["off"])
    assert distance(run, reference["all_gather"]) > 2 * TENSOR_PARALLEL_SHARE * noise
