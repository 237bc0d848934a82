"""What `--check` says a rank holds, against what real ranks hold after a step: shards to the byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.spawn import run_ranks
from titan_prores.config import registry, sources
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section
from titan_prores.distributed.mesh import World
from titan_prores.dry_run.report import report
from titan_prores.model.activation_bytes import step_bytes
from titan_prores.protocols.batch import Batch
from titan_prores.protocols.metric import Metric
from titan_prores.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
RANKS = 4
LAYOUTS = {
    "fsdp2": [],
    "fsdp2-never": ["--parallelism.fsdp.reshard_after_forward=never"],
    "hsdp": ["--parallelism.data_parallel_replicate_degree=2"],
    "fsdp2xtp2": ["--parallelism.tensor_parallel_degree=2"],
    "fsdp2-float8": [
        "--transforms.float8.recipe_name=tensorwise",
        "--transforms.float8.enable_fsdp_float8_all_gather=true",
        "--transforms.float8.precompute_float8_dynamic_scale_for_fsdp=true",
    ],
    "fsdp2xtp2-frozen": ["--parallelism.tensor_parallel_degree=2", "--model.name=tests.distributed.frozen:FrozenLlama"],
    "tp4": ["--parallelism.tensor_parallel_degree=4"],
}
CHECKPOINTS = {
    "none": [],
    "full": ["--transforms.activation_checkpoint.mode=full"],
    "selective": ["--transforms.activation_checkpoint.mode=selective"],
}
CELLS = [(layout, "none") for layout in LAYOUTS]
CELLS += [("fsdp2", "full"), ("fsdp2xtp2", "selective")]


def recipe(layout: str, ac: str, folder: str) -> Recipe:
    tree = sources.load(
        REPOSITORY / "train_configs/debug.toml",
        [
            f"--job.dump_folder={folder}/{layout}-{ac}",
            f"--dataset.cache_folder={folder}/cache",
            "--dataset.name=text",
            f"--dataset.files=[{str(REPOSITORY / 'tests/data/corpus.txt')!r}]",
            "--checkpoint.enabled=false",
            "--validation.enabled=false",
            "--training.steps=1",
            "--lr_scheduler.warmup_steps=1",
            "--lr_scheduler.decay_ratio=0",
            "--training.global_batch_size=-1",
            "--training.mixed_precision_param=bfloat16",
            "--model.norm=sandwich",
            "--metrics.gradients.name=tests.distributed.test_check_bytes:GradientBytes",
            *LAYOUTS[layout],
            *CHECKPOINTS[ac],
        ],
        registry.DEFAULTS,
    )
    return resolve(tree, RANKS)


def local_bytes(tensors: Any) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


class GradientBytes(Metric):
    """Keeps how many bytes of gradients this rank has before the optimizer."""

    Config = Section
    found: ClassVar[int] = 0

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        GradientBytes.found = local_bytes(p.grad for p in model.parameters() if p.grad is not None)
        return {}


class Gathers(TorchDispatchMode):
    """Notes the bytes of what FSDP gathers; tensor parallelism has collectives of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def measure(rank: int, world_size: int, folder: str) -> dict[tuple[str, str], dict[str, int]]:
    """For each cell, what this rank holds."""
    results = {}
    for layout, ac in CELLS:
        trainer = Trainer(resolved := recipe(layout, ac, folder), World(rank, rank, world_size))
        trainer.build()
        trainer.train()
        trainer.run.close()
        state = [v for held in trainer.optimizer.state.values() for v in held.values() if isinstance(v, torch.Tensor)]

        def loss(logits: torch.Tensor, labels: torch.Tensor, trainer: Trainer = trainer) -> torch.Tensor:
            value = trainer.parts.loss(logits, labels)
            # Buffer of the latest gather, which FSDP lets go at the next one; these are no activations.
            trainer.model._get_fsdp_state()._comm_ctx.all_gather_state = None
            return value

        tokens = torch.zeros(resolved.training.local_batch_size, resolved.training.seq_len, dtype=torch.int64)
        with Gathers() as gathers:
            activations = step_bytes(trainer.model, loss, trainer.transforms, Batch(tokens, tokens, tokens[:, 0]))
        results[layout, ac] = {
            "parameters": local_bytes(trainer.model.parameters()),
            "gradients": GradientBytes.found,
            "optimizer": local_bytes(state),
            "activations": activations.kept,
            "largest gather": max(gathers.sizes, default=0),
        }
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, int]]]:
    return run_ranks(measure, RANKS, str(tmp_path_factory.mktemp("check-bytes")), timeout=300)


@pytest.mark.parametrize(("layout", "ac"), CELLS)
def test_what_check_says_is_what_a_rank_holds(
    layout: str, ac: str, ranks: list[dict[tuple[str, str], dict[str, int]]], tmp_path: Path
) -> None:
    shown = report(recipe(layout, ac, str(tmp_path)), RANKS)

    def said(what: str, default: int | None = None) -> int:
        found = re.search(rf"^(?:  )?{what} +([\d,]+) (?:bytes| \()", shown.split("\nflops per token")[1], re.MULTILINE)
        return int(found[1].replace(",", "")) if found else default

    real = ranks[0][layout, ac]
    for what in ("parameters", "gradients", "optimizer"):
        assert said(what) == real[what], f"{what} of rank 0"
        assert all(said(what) >= other[layout, ac][what] for other in ranks), f"{what} of the other ranks"
    assert said("largest gather", default=0) == real["largest gather"]
    print(f"{layout} {ac}: activations {said('activations') / real['activations'] - 1:+.2%}")
    assert said("activations") == pytest.approx(real["activations"], rel=0.01)


def test_uneven_shards_are_there(ranks: list[dict[tuple[str, str], dict[str, int]]]) -> None:
    """257 rows leave one rank less than another, or the comparison would not see which rank is meant."""
    for layout in ("fsdp2", "hsdp", "tp4"):
        assert ranks[0][layout, "none"]["parameters"] > ranks[-1][layout, "none"]["parameters"]
