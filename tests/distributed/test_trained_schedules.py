"""A trained alpha and one that follows the model are the same on every layout: gradients of logits, decisions."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.parity import assert_same_run, gradient_errors, train, train_all
from tests.distributed.spawn import run_ranks
from titan_prores.prores import AlphaVector

pytestmark = pytest.mark.timeout(600)

LOGITS = "prores_schedule.logits"
SCHEDULE = "--transforms.prores.residual_schedule"
TOLERANCE = 0.4
VARIANTS = {
    "learned": [f"{SCHEDULE}.name=learned", f"{SCHEDULE}.start=0.3", f"{SCHEDULE}.lr=0.2", f"{SCHEDULE}.monotone=0.5"],
    # Post-LN, whose outputs have one size all the time.
    "adaptive": [
        "--model.norm=post",
        f"{SCHEDULE}.name=adaptive",
        f"{SCHEDULE}.warmup_steps=3",
        f"{SCHEDULE}.min_steps=3",
        f"{SCHEDULE}.max_steps=6",
        f"{SCHEDULE}.every_steps=1",
        f"{SCHEDULE}.smoothing=0.2",
        f"{SCHEDULE}.tolerance={TOLERANCE}",
    ],
}
AT_ONCE = "--training.local_batch_size=16"  # the batch of a data rank as one microbatch
LAYOUTS = {
    "fsdp2": ["--parallelism.data_parallel_shard_degree=2"],
    "tp2": ["--parallelism.tensor_parallel_degree=2", AT_ONCE],
}


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    """Every variant on both layouts, then `learned` on both without the sum over ranks: layout -> variant -> run."""
    runs = {
        layout: train_all(rank, world_size, overrides, f"{folder}/{layout}", VARIANTS)
        for layout, overrides in LAYOUTS.items()
    }
    AlphaVector.sum_over_mesh = lambda self, part: part
    for layout, overrides in LAYOUTS.items():
        own = [*overrides, *VARIANTS["learned"]]
        runs[layout]["not summed"] = train(rank, world_size, own, f"{folder}/{layout}/not-summed")
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return run_ranks(train_all, 1, [], str(folder / "one"), VARIANTS, timeout=240)[0]


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, str(folder), timeout=400)[0]


def test_reference_trains_and_follows(reference: dict[str, Any]) -> None:
    learned, adaptive = reference["learned"], reference["adaptive"]
    assert learned["weights"][LOGITS].sigmoid().tolist() == pytest.approx([0.3, 0.15, 0.1, 0.075])
    assert (learned["gradients"][2, LOGITS] != 0).all()
    assert max(abs(last - first) for first, last in zip(learned["alphas"][0], learned["alphas"][-1], strict=True)) > 0.1
    begins = [next(step for step, alpha in enumerate(adaptive["alphas"]) if alpha[layer] > 0) for layer in range(4)]
    waits = [later - earlier for earlier, later in itertools.pairwise(begins)]
    assert all(3 <= wait <= 6 for wait in waits) and len(set(waits)) > 1, "some by the signal and some by the bound"
    # No decision hangs on rounding.
    assert min(abs(change - TOLERANCE) for change in adaptive["adaptive_changes"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str, variant: str, reference, two_ranks) -> None:
    run, expected = two_ranks[layout][variant], reference[variant]
    assert_same_run(run, expected)
    # Decisions are the same ones; a trained alpha is as far off as its gradients, which Adam divides by their size.
    tolerance = {"learned": 1e-4, "adaptive": 0}[variant]
    torch.testing.assert_close(run["alphas"], expected["alphas"], rtol=0, atol=tolerance)
    torch.testing.assert_close(run["adaptive_changes"], expected["adaptive_changes"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_summed_is_noticed(layout: str, reference, two_ranks) -> None:
    run = two_ranks[layout]["not summed"]
    errors = gradient_errors(run["gradients"], reference["learned"]["gradients"])
    assert errors[2, LOGITS] > 0.05
    assert max(error for (step, name), error in errors.items() if name != LOGITS) <= 1e-5
    with pytest.raises(AssertionError, match=LOGITS):
        assert_same_run(run, reference["learned"])


@pytest.mark.slow
def test_four_ranks_compiled_and_recomputed(folder: Path, reference: dict[str, Any]) -> None:
    """FSDP2 x TP, and HSDP, with layers that are computed again in the backward pass; a trained alpha in compiled ones.

    Without validation, which would be compiled as well.
    """
    layouts = {
        "fsdp2xtp2": [
            "--parallelism.data_parallel_shard_degree=2",
            "--parallelism.tensor_parallel_degree=2",
            "--training.local_batch_size=8",
        ],
        "hsdp": ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"],
    }
    compiles = {
        ("fsdp2xtp2", "learned"): ["--transforms.compile.backend=inductor"],
        ("fsdp2xtp2", "adaptive"): [],
        ("hsdp", "learned"): [],  # there, code is compiled as under FSDP2
    }
    common = ["--transforms.activation_checkpoint.mode=full", "--validation.enabled=false"]
    variants = {
        f"{layout}/{name}": [*layouts[layout], *VARIANTS[name], *own] for (layout, name), own in compiles.items()
    }
    for name, run in run_ranks(train_all, 4, common, str(folder / "four"), variants, timeout=400)[0].items():
        assert_same_run(run, reference[name.split("/")[1]] | {"validation": [], "scored": []})
