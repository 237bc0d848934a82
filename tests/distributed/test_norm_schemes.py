"""Every norm scheme with ProRes computes one process's run on FSDP2 and under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.parity import PRORES, assert_same_run, train
from tests.distributed.spawn import run_ranks
from titan_prores.components.model.norm_schemes import NORM_SCHEMES
from titan_prores.components.transform.compile import graphs

pytestmark = pytest.mark.slow

SHORT = [
    PRORES,
    "--training.steps=4",
    "--lr_scheduler.warmup_steps=4",
    "--validation.freq=4",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--metrics.layer_grad_norm.every_steps=1",
]
SCHEMES = {norm: [f"--model.norm={norm}"] for norm in NORM_SCHEMES}
SPLIT = [norm for norm in SCHEMES if norm not in ("pre", "post", "sandwich")]  # those are in test_tensor_parallel.py
# What a compiled layer may have that no other test under tensor parallelism has: a factor as a tensor, layers of two
# kinds. A norm on the embedding is outside of the layers, and constant factors are compiled in the unit tests.
COMPILED = ["lns", "mix"]
TP = "--parallelism.tensor_parallel_degree=2"
AT_ONCE = "--training.local_batch_size=8"  # the batch of a data rank as one microbatch
AOT = ["--transforms.compile.backend=aot_eager", "--transforms.activation_checkpoint.mode=selective"]
# Number of ranks -> name -> overrides and schemes.
LAYOUTS: dict[int, dict[str, tuple[list[str], list[str]]]] = {
    1: {"one": ([AT_ONCE], list(SCHEMES))},
    2: {"fsdp2": ([], SPLIT), "tp2": ([TP, AT_ONCE], SPLIT), "tp2-compiled": ([TP, AT_ONCE, *AOT], COMPILED)},
}


def train_schemes(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for layout, (overrides, names) in LAYOUTS[world_size].items():
        results[layout] = {}
        for name in names:
            torch._dynamo.reset()
            before = graphs()
            run = train(rank, world_size, [*SHORT, *overrides, *SCHEMES[name]], f"{folder}/{layout}/{name}")
            results[layout][name] = {**run, "graphs": graphs() - before}
    return results


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
        assert list(found) == LAYOUTS[2][layout][1]
        for norm, run in found.items():
            try:
                assert_same_run(run, reference[norm])
            except AssertionError as error:
                raise AssertionError(f"{norm} on {layout}: {error}") from error
    # Four layers, the first of another kind in mix, and the loss; each in training and in validation.
    compiled = {norm: run["graphs"] for norm, run in runs["tp2-compiled"].items()}
    assert compiled == {"lns": 4, "mix": 6}
    # Negative control: two schemes with the same weights, told apart by a factor in the branches.
    assert reference["lns"]["weights"].keys() == reference["pre"]["weights"].keys()
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_run(runs["tp2"]["lns"], reference["pre"])
