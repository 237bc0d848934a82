"""A block of the 7B recipe at full width, really trained: tensor parallelism, compile and checkpointing on two ranks.

Held against one process that runs the same recipe without any of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.spawn import run_ranks
from tests.integration.launch import rows
from titan_prores.config import registry, sources
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section
from titan_prores.distributed.mesh import World
from titan_prores.protocols.metric import Metric
from titan_prores.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
STEPS = 4
PLAIN = [
    "--parallelism.tensor_parallel_degree=1",
    "--transforms.compile.enabled=false",
    "--transforms.activation_checkpoint.enabled=false",
]
# Relative to a gradient's norm. All is computed in fp32, so that little is left to rounding.
GRADIENT_TOLERANCE = 1e-5
# Of losses until the first update shows, and after it: AdamW makes whole steps of gradients that are rounding alone.
LOSS_TOLERANCES = (1e-5, 1e-5, 1e-5, 2e-3)


class Gradients(Metric):
    """One process writes its gradients of step 2 to a file; two ranks compare theirs with it.

    Both belong to the initial weights, as the learning rate of step 1 is 0, and alpha is not 0 any more.
    """

    Config = Section
    file: ClassVar[Path]
    found: ClassVar[dict[str, tuple[float, float]]]  # name -> norm, relative distance

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        if step != 2:
            return {}
        Gradients.found = {}
        expected = torch.load(Gradients.file, mmap=True) if Gradients.file.exists() else None
        gradients = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            other = gradient if expected is None else expected[name]
            distance = float((gradient - other).norm() / other.norm())
            Gradients.found[name] = (float(gradient.norm()), distance)
            if expected is None:
                gradients[name] = gradient.clone()
        if expected is None:
            torch.save(gradients, Gradients.file)
        return {}


def train(rank: int, world_size: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    """A few steps of the 7B recipe with one layer; on rank 0 losses, norm and distance of each gradient, the log."""
    Gradients.file = Path(folder) / "gradients.pt"
    run = f"{folder}/{world_size}"
    tree = sources.load(
        REPOSITORY / "train_configs/llama_7b.toml",
        [
            f"--job.dump_folder={run}",
            f"--dataset.cache_folder={folder}/cache",
            "--tokenizer.name=bytes",
            "--dataset.name=text",
            f"--dataset.files=[{str(REPOSITORY / 'tests/data/corpus.txt')!r}]",
            "--dataset.num_workers=0",
            "--checkpoint.enabled=false",
            "--validation.enabled=false",
            "--model.n_layers=1",
            "--model.vocab_size=257",
            "--model.init=normal",
            "--training.seq_len=64",
            "--training.local_batch_size=1",
            "--training.global_batch_size=1",
            f"--training.steps={STEPS}",
            "--training.mixed_precision_param=float32",
            "--transforms.float8.enabled=false",
            "--parallelism.fsdp.enabled=false",  # one shard would only copy
            "--optimizer.lr=1e-4",
            "--lr_scheduler.warmup_steps=2",
            "--lr_scheduler.decay_ratio=0",
            "--transforms.prores.residual_schedule.T=4",
            "--metrics.gradients.name=tests.distributed.test_7b_block:Gradients",
            *overrides,
        ],
        registry.DEFAULTS,
    )
    trainer = Trainer(resolve(tree, world_size), World(rank, rank, world_size))
    trainer.build()
    trainer.train()
    trainer.run.close()
    if rank:
        return {}
    found = rows(Path(run))
    return {
        "losses": [row["loss"] for row in found],
        "gradients": Gradients.found,
        "log": (Path(run) / "train.log").read_text(),
        "shape": trainer.recipe.slots["model"].config,
        "memory_gib": max(row["memory_gib"] for row in found),
    }


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    one = run_ranks(train, 1, str(tmp_path), PLAIN, timeout=250)[0]
    two = run_ranks(train, 2, str(tmp_path), [], timeout=300)[0]
    (tmp_path / "gradients.pt").unlink()  # 0.8 GB
    assert (two["shape"].dim, two["shape"].ffn_dim, two["shape"].n_heads) == (4096, 11008, 32)
    for line in ("2 ranks split every layer", "compile: 1 layer and the loss", "selective, 1 of 1 layers"):
        assert line in two["log"] and line not in one["log"]
    assert "graph break" not in two["log"] and "compiled again" not in two["log"]

    apart = [abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True)]
    assert two["gradients"].keys() == one["gradients"].keys()
    worst = max(distance for _, distance in two["gradients"].values())
    print(
        f"losses {two['losses']}, apart by {apart}, gradients {worst:.1e}, "
        f"{one['memory_gib']:.1f} GiB and {two['memory_gib']:.1f} GiB a rank"
    )
    for name, (norm, distance) in two["gradients"].items():
        assert norm > 0 and one["gradients"][name][0] > 0, f"zero gradient of {name}"
        assert distance <= GRADIENT_TOLERANCE, f"gradient of {name}"
    for step, (distance, tolerance) in enumerate(zip(apart, LOSS_TOLERANCES, strict=True), 1):
        assert distance <= tolerance, f"loss of step {step}"
    assert len(two["losses"]) == STEPS and all(map(math.isfinite, two["losses"]))
    # Each step has other text: those with the initial weights, against all later ones.
    assert sum(two["losses"][2:]) / 2 < sum(two["losses"][:2]) / 2 - 0.5
