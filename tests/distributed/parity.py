"""One recipe on several layouts, held against one process: weights, gradients by name, losses, validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate

from titan_prores import config, registry
from titan_prores.mesh import World
from titan_prores.protocols import Metric
from titan_prores.recipe import resolve
from titan_prores.trainer import Trainer

REPOSITORY = Path(__file__).parents[2]
STEPS = 20
PRORES = "--transforms.prores.residual_schedule.T=4"
BASELINE = "--transforms.prores.enabled=false"


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank, a copy."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class CaptureGradients(Metric):
    """Keeps the clipped gradients of steps 1 and 2, whole, by step and name.

    Both belong to the initial weights, as the learning rate of step 1 is 0; with ProRes alpha is 0 in step 1, where
    branches get no gradient, and is not in step 2.
    """

    Config = config.Section
    captured: ClassVar[dict[tuple[int, str], torch.Tensor]] = {}

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        if step == 1:
            CaptureGradients.captured = {}
        if step <= 2:
            CaptureGradients.captured |= {(step, name): full(p.grad) for name, p in model.named_parameters()}
        return {}


def train(rank: int, world_size: int, overrides: list[str], run: str) -> dict[str, Any]:
    """Train the debug recipe; weights at the start, gradients of steps 1 and 2 and the losses, on rank 0."""
    tree = config.load(
        REPOSITORY / "train_configs/debug.toml",
        [
            f"--job.dump_folder={run}", "--metrics.capture.name=tests.distributed.parity:CaptureGradients",
            f"--dataset.cache_folder={run}/../../cache", f"--validation.freq={STEPS}", "--checkpoint.enabled=false",
            f"--training.steps={STEPS}", f"--lr_scheduler.warmup_steps={STEPS}", "--lr_scheduler.decay_ratio=0",
            # Odd enough that the last batch of windows is not full on every rank count.
            "--validation.max_tokens=1344", "--training.local_batch_size=4", *overrides,
        ],
        registry.builtin_folder() / "defaults.toml",
    )  # fmt: skip
    trainer = Trainer(resolve(tree, world_size), World(rank, rank, world_size))
    trainer.build()
    weights = {name: full(p) for name, p in trainer.model.named_parameters()}
    if hasattr(trainer.model, "prores_alpha"):
        alpha = trainer.model.prores_alpha.tensor
        assert isinstance(alpha, DTensor) and all(p == Replicate() for p in alpha.placements)
    trainer.train()
    trainer.run.close()
    if rank:
        return {}
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": weights, "gradients": CaptureGradients.captured,
        "losses": [row["loss"] for row in rows if "loss" in row],
        "grad_norms": [row["grad_norm"] for row in rows if "loss" in row],
        "layer_grad_norms": [row["layer_grad_norm"] for row in rows if "layer_grad_norm" in row],
        "validation": [row["validation_loss"] for row in rows if "validation_loss" in row],
        "scored": [row["validation_tokens"] for row in rows if "validation_loss" in row],
    }  # fmt: skip


def train_all(
    rank: int, world_size: int, overrides: list[str], folder: str, variants: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """`train` for each variant, name -> overrides of its own, one after the other."""
    return {name: train(rank, world_size, [*overrides, *own], f"{folder}/{name}") for name, own in variants.items()}


def assert_same_run(run: dict[str, Any], reference: dict[str, Any]) -> None:
    """Weights bitwise; every gradient within 1e-5 of its norm and zero only where the reference's is; losses 1e-5.

    Gradients are those before clipping, which would hide a common factor.
    """
    assert run["weights"].keys() == reference["weights"].keys()
    for name, weight in reference["weights"].items():
        assert torch.equal(run["weights"][name], weight), f"initial {name}"
    assert run["gradients"].keys() == reference["gradients"].keys()
    assert {name for _, name in reference["gradients"]} == reference["weights"].keys()
    for (step, name), expected in reference["gradients"].items():
        gradient, norm = run["gradients"][step, name], expected.norm()
        assert bool(norm == 0) == bool(gradient.norm() == 0), f"zero gradient of {name} in step {step}"
        assert (gradient - expected).norm() <= 1e-5 * norm, f"gradient of {name} in step {step}"
    torch.testing.assert_close(run["grad_norms"], reference["grad_norms"], rtol=1e-4, atol=0, msg="grad norm")
    torch.testing.assert_close(run["layer_grad_norms"], reference["layer_grad_norms"], rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(run["losses"], reference["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(run["validation"], reference["validation"], rtol=0, atol=1e-5)
    assert run["scored"] == reference["scored"]
