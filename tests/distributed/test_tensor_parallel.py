"""Tensor parallelism, alone and under FSDP2 and HSDP, computes the run of one process; 257 ids leave uneven shards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from tests.distributed.parity import BASELINE, PRORES, assert_same_run, swap_shards, train, train_all
from tests.distributed.spawn import run_ranks
from titan_prores import build as build_module
from titan_prores.model.weight_init import init_weights

pytestmark = pytest.mark.slow

TP = "--parallelism.tensor_parallel_degree=2"
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, [TP]),
    "fsdp2xtp2": (4, [TP]),
    "hsdp2x1xtp2": (4, [TP, "--parallelism.data_parallel_replicate_degree=2"]),
}
SMALL = [
    "--model.n_layers=2",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--metrics.layer_grad_norm.every_steps=1",
    "--training.steps=10",
    "--lr_scheduler.warmup_steps=10",
    "--validation.freq=10",
]
VARIANTS = {
    "pre": [BASELINE, "--model.norm=pre"],
    "pre-prores": [PRORES, "--model.norm=pre", "--model.n_kv_heads=2"],
    "post": [BASELINE, "--model.norm=post"],
    "post-prores": [PRORES, "--model.norm=post"],
    "sandwich": [BASELINE, "--model.norm=sandwich", "--model.n_kv_heads=2"],
    "sandwich-prores": [PRORES, "--model.norm=sandwich"],
    "frozen": [PRORES, "--model.name=tests.distributed.frozen:FrozenLlama", "--model.norm=sandwich"],
    "adapters": [PRORES, "--transforms.lora.name=tests.distributed.adapters:LoRA"],
    "scaled-tied": [BASELINE, "--model.norm=scaled", "--model.tie_embeddings=true"],
}


QUICK = ("pre-prores", "sandwich", "frozen", "adapters", "scaled-tied")
THREE_AXES = ("pre-prores", "frozen", "scaled-tied")


def train_variants(
    rank: int, world_size: int, overrides: list[str], folder: str, variants: dict[str, list[str]]
) -> dict[str, Any]:
    from titan_prores.components.model.norm_schemes import NORM_SCHEMES, NormScheme, Placement

    # All that a placement can have, and other norms in each layer.
    NORM_SCHEMES["scaled"] = NormScheme(
        "all at once",
        lambda layer, n_layers: Placement(
            in_norm=True,
            res_norm=layer == 1,
            out_norm=layer == 2,
            skip_scale=1.5,
            branch_scale=0.5,
            in_norm_scale=layer**-0.5,
        ),
    )
    results = train_all(rank, world_size, [*overrides, *SMALL], folder, variants)
    if world_size == 2:  # gradients of norms are then summed by no FSDP2
        without = [*overrides, *SMALL, *VARIANTS["sandwich"], "--parallelism.fsdp.enabled=false"]
        results["sandwich-without-fsdp"] = train(rank, world_size, without, f"{folder}/without-fsdp")
    return results


def run_layout(layout: str, folder: Path, names: Iterable[str]) -> dict[str, Any]:
    world_size, overrides = LAYOUTS[layout]
    variants = {name: VARIANTS[name] for name in names}
    return run_ranks(train_variants, world_size, overrides, str(folder / layout), variants, timeout=500)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return run_layout("one", folder, QUICK)


@pytest.fixture(scope="module")
def whole_reference(folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    return reference | run_layout("one", folder, VARIANTS.keys() - set(QUICK))


def assert_same_runs(layout: str, folder: Path, reference: dict[str, Any]) -> None:
    runs = run_layout(layout, folder, reference)
    assert runs.keys() >= reference.keys()
    for variant, run in runs.items():
        expected = reference[variant.removesuffix("-without-fsdp")]
        assert run["losses"][-1] < run["losses"][0]
        try:
            assert_same_run(run, expected)
        except AssertionError as error:
            raise AssertionError(f"{variant} on {layout}: {error}") from error


@pytest.mark.timeout(600)
def test_tensor_parallel_equals_one_process(folder: Path, reference: dict[str, Any]) -> None:
    assert_same_runs("tp2", folder, reference)


@pytest.mark.timeout(600)
def test_every_variant_under_fsdp2_equals_one_process(folder: Path, whole_reference: dict[str, Any]) -> None:
    assert_same_runs("fsdp2xtp2", folder, whole_reference)


@pytest.mark.timeout(600)
def test_three_axes_equal_one_process(folder: Path, reference: dict[str, Any]) -> None:
    assert_same_runs("hsdp2x1xtp2", folder, {name: reference[name] for name in THREE_AXES})


class UnsummedNorm(ParallelStyle):
    """The wrong way: each rank keeps the gradient that its own part of the sequence gives a norm."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.RMSNorm):
            module.weight = nn.Parameter(DTensor.from_local(module.weight, device_mesh, (Replicate(),)))
            module.forward = lambda x: F.rms_norm(x, module.normalized_shape, module.weight.to_local(), module.eps)
        return module


def train_broken(rank: int, world_size: int, overrides: list[str], folder: str) -> dict[str, Any]:
    from titan_prores.components.parallelism._styles import STYLES

    results = {}
    build_module.init_weights = swap_shards
    results["swapped"] = train(rank, world_size, [*overrides, *VARIANTS["sandwich"]], f"{folder}/swapped")
    build_module.init_weights = init_weights
    STYLES["sequence"] = (UnsummedNorm, Replicate())
    results["unsummed"] = train(rank, world_size, [*overrides, *VARIANTS["sandwich"]], f"{folder}/unsummed")
    return results


def test_comparison_notices_what_is_wrong(folder: Path, reference: dict[str, Any]) -> None:
    """Negative controls: two shards swapped, and gradients of norms not summed over the ranks."""
    runs = run_ranks(train_broken, 2, [TP, *SMALL], str(folder / "broken"), timeout=240)[0]
    with pytest.raises(AssertionError, match=r"initial layers\.0\.feed_forward\.w1"):
        assert_same_run(runs["swapped"], reference["sandwich"])
    with pytest.raises(AssertionError, match="gradient of"):  # of all: clipping hands the fault on
        assert_same_run(runs["unsummed"], reference["sandwich"])
