"""One process, FSDP2 and HSDP compute the same run: weights, gradients by name, losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from tests.distributed.spawn import run_ranks
from titan_prores import config, registry
from titan_prores import trainer as trainer_module
from titan_prores.init import init_weights, match_rules, name_seed
from titan_prores.mesh import World
from titan_prores.protocols import Metric
from titan_prores.recipe import resolve
from titan_prores.trainer import Trainer

REPOSITORY = Path(__file__).parents[2]
STEPS = 20
LAYOUTS = {
    "one": (1, []),
    "fsdp2": (2, ["--parallelism.data_parallel_shard_degree=2"]),
    "hsdp2x2": (4, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"]),
}
VARIANTS = {
    "prores": ["--transforms.prores.residual_schedule.T=4"],
    "baseline": ["--transforms.prores.enabled=false"],
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank, a copy."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def draw_in_place(model: torch.nn.Module, rules: Any, seed: int) -> None:
    """The wrong way to initialise a sharded model."""
    for name, rule in match_rules(rules, dict(model.named_parameters())).items():
        with torch.no_grad():
            local = dict(model.named_parameters())[name].to_local()
            rule.distribution(local, torch.Generator().manual_seed(name_seed(seed, name)))


class CaptureGradients(Metric):
    """Keeps the clipped gradients of step 1, whole and by name."""

    Config = config.Section
    captured: ClassVar[dict[str, torch.Tensor]] = {}

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        if step == 1:
            CaptureGradients.captured = {name: full(p.grad) for name, p in model.named_parameters()}
        return {}


def train(rank: int, world_size: int, overrides: list[str], folder: str, break_it: bool) -> dict[str, Any]:
    """Both variants on one rank; returns weights at the start, gradients of step 1 and the losses."""
    results = {}
    for variant, own in VARIANTS.items():
        if break_it and variant == "prores":  # drawing what is there already: every rank of the mesh gets the same part
            trainer_module.init_weights = draw_in_place
        elif break_it:  # FSDP's own mean over ranks on top of the division by the global number of labels
            trainer_module.init_weights = init_weights
            FSDPModule.set_gradient_divide_factor = lambda self, factor: None
        run = f"{folder}/{variant}"
        tree = config.load(
            REPOSITORY / "train_configs/debug.toml",
            [
                f"--job.dump_folder={run}", "--metrics.capture.name=tests.distributed.test_parity:CaptureGradients",
                f"--dataset.cache_folder={folder}/../cache", "--validation.freq=20", "--checkpoint.enabled=false",
                f"--training.steps={STEPS}", f"--lr_scheduler.warmup_steps={STEPS}", "--lr_scheduler.decay_ratio=0",
                *overrides, *own,
            ],
            registry.builtin_folder() / "defaults.toml",
        )  # fmt: skip
        trainer = Trainer(resolve(tree, world_size), World(rank, rank, world_size))
        trainer.build()
        weights = {name: full(p) for name, p in trainer.model.named_parameters()}
        if variant == "prores":
            alpha = trainer.model.prores_alpha.tensor
            assert isinstance(alpha, DTensor) and all(p == Replicate() for p in alpha.placements)
        trainer.train()
        trainer.run.close()
        if rank == 0:
            rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
            results[variant] = {
                "weights": weights, "gradients": CaptureGradients.captured,
                "losses": [row["loss"] for row in rows if "loss" in row],
                "grad_norms": [row["grad_norm"] for row in rows if "loss" in row],
                "validation": [row["validation_loss"] for row in rows if "validation_loss" in row],
                "scored": [row["validation_tokens"] for row in rows if "validation_loss" in row],
            }  # fmt: skip
    return results


def assert_same_run(run: dict[str, Any], reference: dict[str, Any]) -> None:
    """Weights bitwise; every gradient within 1e-5 of its norm and zero only where the reference's is; losses 1e-5.

    The gradients are those after clipping, which hides a common factor; the norm before it does not.
    """
    for name, weight in reference["weights"].items():
        assert torch.equal(run["weights"][name], weight), f"initial {name}"
    assert run["gradients"].keys() == reference["gradients"].keys() == reference["weights"].keys()
    for name, expected in reference["gradients"].items():
        gradient, norm = run["gradients"][name], expected.norm()
        assert bool(norm == 0) == bool(gradient.norm() == 0), f"zero gradient of {name}"
        assert (gradient - expected).norm() <= 1e-5 * norm, f"gradient of {name}"
    torch.testing.assert_close(run["grad_norms"], reference["grad_norms"], rtol=1e-4, atol=0, msg="grad norm")
    torch.testing.assert_close(run["losses"], reference["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(run["validation"], reference["validation"], rtol=0, atol=1e-5)
    assert run["scored"] == reference["scored"]


def run_layout(layout: str, folder: Path, break_it: bool = False) -> dict[str, Any]:
    world_size, overrides = LAYOUTS[layout]
    # Odd enough that the last batch of windows is not full on every rank count.
    overrides = [*overrides, "--validation.max_tokens=1344", "--training.local_batch_size=4"]
    name = layout + ("-broken" if break_it else "")
    return run_ranks(train, world_size, overrides, str(folder / name), break_it, timeout=240)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return run_layout("one", folder)


def test_reference_has_gradients_where_expected(reference: dict[str, Any]) -> None:
    """At alpha = 0, step 1 of ProRes, branches get none; without ProRes every parameter gets one."""
    for name, gradient in reference["baseline"]["gradients"].items():
        assert gradient.norm() > 0, name
    for name, gradient in reference["prores"]["gradients"].items():
        assert bool(gradient.norm() > 0) == (not name.startswith("layers.")), name
    assert len(reference["prores"]["losses"]) == STEPS
    assert reference["baseline"]["losses"][-1] < reference["baseline"]["losses"][0] - 0.5


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("hsdp2x2", marks=pytest.mark.slow)])
def test_layout_equals_one_process(layout: str, folder: Path, reference: dict[str, Any]) -> None:
    runs = run_layout(layout, folder)
    for variant in VARIANTS:
        assert_same_run(runs[variant], reference[variant])


@pytest.mark.slow
def test_comparison_notices_what_is_wrong(folder: Path, reference: dict[str, Any]) -> None:
    """Negative controls: weights drawn shard by shard, and gradients divided twice."""
    runs = run_layout("fsdp2", folder, break_it=True)
    with pytest.raises(AssertionError, match="initial"):
        assert_same_run(runs["prores"], reference["prores"])
    with pytest.raises(AssertionError, match="grad norm"):
        assert_same_run(runs["baseline"], reference["baseline"])
