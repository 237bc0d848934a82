"""Every norm scheme with ProRes computes one process's run on FSDP2 and under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.model.norm_schemes import NORM_SCHEMES
from tests.distributed.parity import PRORES, assert_same_run, train_all
from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.slow

SHORT = [
    PRORES, "--training.steps=4", "--lr_scheduler.warmup_steps=4", "--validation.freq=4", "--training.seq_len=32",
    "--training.global_batch_size=8", "--metrics.layer_grad_norm.every_steps=1",
]  # fmt: skip
SCHEMES = {norm: [f"--model.norm={norm}"] for norm in NORM_SCHEMES}
LAYOUTS = {
    1: {"one": []},
    2: {"fsdp2": [], "tp2": ["--parallelism.tensor_parallel_degree=2"]},
}


def train_schemes(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    return {
        layout: train_all(rank, world_size, [*SHORT, *overrides], f"{folder}/{layout}", SCHEMES)
        for layout, overrides in LAYOUTS[world_size].items()
    }


@pytest.mark.timeout(900)
def test_every_scheme_equals_one_process(tmp_path: Path) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for world_size in LAYOUTS:
        runs |= run_ranks(train_schemes, world_size, str(tmp_path), timeout=440)[0]
    reference = runs.pop("one")
    for norm, expected in reference.items():
        # Step 2 is the first in which branches count: all of the model has a gradient there.
        assert all(gradient.norm() > 0 for (step, _), gradient in expected["gradients"].items() if step == 2), norm
        assert expected["losses"][-1] < expected["losses"][0]
        for layout, found in runs.items():
            try:
                assert_same_run(found[norm], expected)
            except AssertionError as error:
                raise AssertionError(f"{norm} on {layout}: {error}") from error
    # Negative control: two schemes with the same weights, told apart by a factor in the branches.
    assert reference["lns"]["weights"].keys() == reference["pre"]["weights"].keys()
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_run(runs["tp2"]["lns"], reference["pre"])
