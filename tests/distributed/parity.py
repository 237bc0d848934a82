"""One recipe on several layouts, held against one process: weights, gradients by name, losses, validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.integration.launch import rows
from titan_prores.config import registry, sources
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section, setting
from titan_prores.distributed import mesh as mesh_module
from titan_prores.distributed.mesh import World
from titan_prores.model.weight_init import init_weights
from titan_prores.protocols.metric import Metric
from titan_prores.trainer import Trainer

REPOSITORY = Path(__file__).parents[2]
STEPS = 20
PRORES = "--transforms.prores.residual_schedule.T=4"
BASELINE = "--transforms.prores.enabled=false"
MESHES: dict[tuple[tuple[str, int], ...], mesh_module.Mesh] = {}  # those of this process, by their degrees


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank, a copy."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class CaptureGradients(Metric):
    """Keeps the gradients of some steps, before clipping, whole, by step and name.

    Where the learning rate of step 1 is 0, those of steps 1 and 2 both belong to the initial weights; with ProRes alpha
    is 0 in step 1, where branches get no gradient, and is not in step 2.
    """

    class Config(Section):
        steps: tuple[int, ...] = setting((1, 2), "steps whose gradients are kept")

    captured: ClassVar[dict[tuple[int, str], torch.Tensor]] = {}

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        if step == 1:
            CaptureGradients.captured = {}
        if step in self.config.steps:
            CaptureGradients.captured |= {
                (step, name): full(p.grad) for name, p in model.named_parameters() if p.grad is not None
            }
        return {}


def swap_shards(model: torch.nn.Module, rules: Any, seed: int) -> None:
    """Weights as they should be, but for one whose shards the two ranks hold in the wrong order."""
    init_weights(model, rules, seed)
    weight = model.layers[0].feed_forward.w1.weight
    first, second = weight.full_tensor().chunk(2)
    mine = weight.to_local()
    with torch.no_grad():
        mine.copy_(second if torch.equal(mine, first) else first)


def debug_recipe(world_size: int, overrides: Sequence[str], run: str) -> Recipe:
    """The debug recipe for STEPS steps, warming up over all of them, with `run` as its folder.

    Text is tokenised into a folder that the runs beside it share.

    Raises:
        ConfigErrors: the overrides do not fit.
    """
    tree = sources.load(
        REPOSITORY / "train_configs/debug.toml",
        [
            f"--job.dump_folder={run}",
            "--dataset.name=text",
            f"--dataset.files=[{str(REPOSITORY / 'tests/data/corpus.txt')!r}]",
            "--dataset.txt_document=paragraph",
            "--dataset.validation_fraction=0.1",
            f"--dataset.cache_folder={run}/../../cache",
            "--checkpoint.enabled=false",
            "--metrics.capture.name=tests.distributed.parity:CaptureGradients",
            f"--training.steps={STEPS}",
            f"--lr_scheduler.warmup_steps={STEPS}",
            "--lr_scheduler.decay_ratio=0",
            # Odd enough that the last batch of windows is not full on every rank count.
            f"--validation.freq={STEPS}",
            "--validation.max_tokens=1344",
            "--training.local_batch_size=4",
            *overrides,
        ],
        registry.DEFAULTS,
    )
    return resolve(tree, world_size)


def build(rank: int, world_size: int, overrides: Sequence[str], run: str) -> Trainer:
    """A trainer of `debug_recipe` that is built, on the mesh of an earlier one of the same degrees if there was one.

    Process groups hold threads and sockets until the process ends, and DTensor would plan its operators anew.
    """
    start = mesh_module.start

    def start_once(degrees: Mapping[str, int], *args: Any) -> mesh_module.Mesh:
        key = tuple(degrees.items())
        if key not in MESHES:
            MESHES[key] = start(degrees, *args)
        return MESHES[key]

    trainer = Trainer(debug_recipe(world_size, overrides, run), World(rank, rank, world_size))
    with patch.object(mesh_module, "start", start_once):
        trainer.build()
    return trainer


def train(
    rank: int,
    world_size: int,
    overrides: Sequence[str],
    run: str,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> dict[str, Any]:
    """Train the debug recipe; on rank 0 the weights at the start, captured gradients, losses and more.

    Args:
        rank, world_size: of this process; the process group is up.
        overrides: as on the command line.
        run: folder of the run.
        prepare: called with the trainer that is built, before the first step.
    """
    trainer = build(rank, world_size, overrides, run)
    prepare(trainer)
    weights = {name: full(p) for name, p in trainer.model.named_parameters()}
    if hasattr(trainer.model, "prores_alpha"):
        alpha = trainer.model.prores_alpha.tensor
        assert isinstance(alpha, DTensor) and all(p == Replicate() for p in alpha.placements)
    trainer.train()
    trainer.run.close()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad or torch.equal(full(parameter), weights[name]), f"{name} is frozen"
    if rank:
        return {}
    found = rows(Path(run))
    return {
        "trained": {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad},
        "weights": weights,
        "gradients": CaptureGradients.captured,
        "losses": [row["loss"] for row in found if "loss" in row],
        "alphas": [row["alpha"] for row in found if "alpha" in row],
        "adaptive_changes": [row["adaptive_change"] for row in found if "adaptive_change" in row],
        "grad_norms": [row["grad_norm"] for row in found if "loss" in row],
        "layer_grad_norms": [row["layer_grad_norm"] for row in found if "layer_grad_norm" in row],
        "validation": [row["validation_loss"] for row in found if "validation_loss" in row],
        "scored": [row["validation_tokens"] for row in found if "validation_loss" in row],
    }


def train_all(
    rank: int, world_size: int, overrides: list[str], folder: str, variants: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """`train` for each variant, name -> overrides of its own, one after the other."""
    return {name: train(rank, world_size, [*overrides, *own], f"{folder}/{name}") for name, own in variants.items()}


def gradient_errors(
    gradients: Mapping[tuple[int, str], torch.Tensor], reference: Mapping[tuple[int, str], torch.Tensor]
) -> dict[tuple[int, str], float]:
    """(step, name) -> distance of a gradient from the reference's, relative to the norm of that.

    It is infinite where one of the two is zero and the other is not, or one is not a number.
    """
    assert gradients.keys() == reference.keys()
    errors = {}
    for key, expected in reference.items():
        error, norm = float((gradients[key] - expected).norm()), float(expected.norm())
        if (norm == 0) != (float(gradients[key].norm()) == 0) or math.isnan(error):
            errors[key] = math.inf
        else:
            errors[key] = error / norm if norm else 0.0
    return errors


def assert_same_run(run: dict[str, Any], reference: dict[str, Any]) -> None:
    """Weights bitwise; every gradient within 1e-5 of its norm and zero only where the reference's is; losses 1e-5.

    Gradients are those before clipping, which would hide a common factor.
    """
    assert run["weights"].keys() == reference["weights"].keys()
    for name, weight in reference["weights"].items():
        assert torch.equal(run["weights"][name], weight), f"initial {name}"
    assert {name for _, name in reference["gradients"]} == reference["trained"] == run["trained"]
    for (step, name), error in gradient_errors(run["gradients"], reference["gradients"]).items():
        assert error <= 1e-5, f"gradient of {name} in step {step}: {error:.1e}"
    torch.testing.assert_close(run["grad_norms"], reference["grad_norms"], rtol=1e-4, atol=0, msg="grad norm")
    torch.testing.assert_close(run["layer_grad_norms"], reference["layer_grad_norms"], rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(run["losses"], reference["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(run["validation"], reference["validation"], rtol=0, atol=1e-5)
    assert run["scored"] == reference["scored"]
