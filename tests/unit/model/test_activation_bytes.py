"""Activation bytes: counted by hand, and fake tensors against a real step counted the same way."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_prores.build import build_components, transform_model
from titan_prores.config import registry, sources
from titan_prores.config.layout import plan_mesh
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import resolve
from titan_prores.distributed import mesh as mesh_module
from titan_prores.dry_run.memory import activation_bytes
from titan_prores.model.activation_bytes import LiveBytes, step_bytes
from titan_prores.model.transforms import Transforms
from titan_prores.model.weight_init import allocate, init_weights
from titan_prores.protocols.batch import Batch

ROOT = Path(__file__).parents[3]
MODES = ("none", "full", "selective", "every_k")


def recipe(*overrides: str, mode: str = "none") -> Recipe:
    checkpointing = [] if mode == "none" else [f"--transforms.activation_checkpoint.mode={mode}"]
    tree = sources.load(
        ROOT / "train_configs/debug.toml",
        ["--parallelism.fsdp.enabled=false", *checkpointing, *overrides],
        registry.DEFAULTS,
    )
    return resolve(tree)


@contextlib.contextmanager
def one_rank():
    """A mesh of this process alone, whose collectives are not called."""
    try:
        yield mesh_module.start_fake(plan_mesh(recipe().parallelism, 1))
    finally:
        mesh_module.stop()


def real_step(recipe: Recipe, mesh: mesh_module.Mesh) -> tuple[Any, ...]:
    """What `step_bytes` takes, on real tensors."""
    components = build_components(recipe, mesh.degrees)
    transform_model(recipe, components, mesh)
    model, transforms = components.model, components.transforms
    allocate(model, mesh.device)
    init_weights(model, model.init_rules(), seed=0)
    model.fill_buffers()
    for transform in transforms:
        transform.before_step(3)
    shape = (recipe.training.local_batch_size, recipe.training.seq_len)
    tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    return model, components.loss, transforms, Batch(tokens, tokens.roll(-1, 1), torch.arange(len(tokens)))


def test_live_bytes_by_hand() -> None:
    weight = torch.ones(8, 8)
    with LiveBytes() as live:
        view = weight[:4].t()
        assert live.bytes == 0, "views of what was there"
        first = view @ weight[:4]
        assert live.bytes == first.nbytes == 8 * 8 * 4
        first.mul_(2).view(64)
        assert live.bytes == 8 * 8 * 4, "in place and views make nothing"
        second = first.to(torch.bfloat16)
        assert live.bytes == 8 * 8 * (4 + 2)
        del first
        assert live.bytes == second.nbytes and live.peak_bytes == 8 * 8 * (4 + 2)
        assert [storage.nbytes() for storage in live.storages()] == [second.nbytes]
        del second
        assert live.bytes == 0 and live.storages() == []
    torch.ones(100)
    assert live.peak_bytes == 8 * 8 * (4 + 2), "nothing is counted once it is off"


def test_step_bytes_by_hand() -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    x = torch.randn(8, 16)
    batch = Batch(x, torch.zeros(8, 4), torch.arange(8))
    found = step_bytes(model, lambda out, labels: (out * labels).square().sum(), Transforms(()), batch)
    # What relu gives, for its own gradient and the second weight's, the product for that of square, and the loss.
    assert found.kept == 4 * (8 * 32 + 8 * 4 + 1)
    # Then the gradients of what relu got and gave, and of the second weight, until that is complete.
    assert found.kept < found.peak <= found.kept + 4 * (2 * 8 * 32 + 4 * 32 + 2 * 8 * 4 + 32 * 16)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_fake_tensors_find_what_a_real_step_holds(mode: str, dtype: str) -> None:
    shape = ["--model.n_layers=2", "--model.norm=sandwich", "--model.n_kv_heads=2"]
    built = recipe(f"--training.dtype={dtype}", *shape, mode=mode)
    with one_rank() as mesh:
        real, found = step_bytes(*real_step(built, mesh)), activation_bytes(built, mesh)
    print(f"{mode} {dtype}: kept {found.kept / real.kept - 1:+.3%}, peak {found.peak / real.peak - 1:+.3%}")
    assert found.kept == pytest.approx(real.kept, rel=0.01)
    assert found.peak == pytest.approx(real.peak, rel=0.01)


def test_float8_is_counted_too() -> None:
    built = recipe("--transforms.float8.recipe_name=tensorwise", mode="selective")
    with one_rank() as mesh:
        real, found = step_bytes(*real_step(built, mesh)), activation_bytes(built, mesh)
    print(f"float8: kept {found.kept / real.kept - 1:+.3%}, peak {found.peak / real.peak - 1:+.3%}")
    assert found.kept == pytest.approx(real.kept, rel=0.01)
    assert found.peak == pytest.approx(real.peak, rel=0.05)


def test_autograd_saves_what_is_kept_but_for_selective() -> None:
    """The count by hooks on saved tensors, another way to the same number where nothing but autograd keeps anything."""
    saved = {}
    with one_rank() as mesh:
        for mode in ("none", "selective"):
            model, loss, _, batch = real_step(recipe(mode=mode), mesh)
            there = [
                batch.tokens_BS,
                batch.labels_BS,
                *model.parameters(),
                *model.buffers(),
                model.prores_alpha.tensor.to_local(),
            ]
            left_out = {tensor.untyped_storage().data_ptr() for tensor in there}
            found: dict[int, torch.Tensor] = {}

            def keep(tensor: torch.Tensor, found: dict[int, torch.Tensor] = found) -> torch.Tensor:
                found[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss(model(batch.tokens_BS), batch.labels_BS)
            saved[mode] = sum(t.untyped_storage().nbytes() for pointer, t in found.items() if pointer not in left_out)
        kept = {mode: activation_bytes(recipe(mode=mode), mesh).kept for mode in saved}
    assert saved["none"] == pytest.approx(kept["none"], rel=0.01)
    assert saved["selective"] < kept["selective"] / 2


def test_modes_keep_what_they_say() -> None:
    with one_rank() as mesh:
        found = {mode: activation_bytes(recipe("--model.n_layers=4", mode=mode), mesh) for mode in MODES}
        shallow = {mode: activation_bytes(recipe("--model.n_layers=2", mode=mode), mesh) for mode in MODES}
    kept = {mode: each.kept for mode, each in found.items()}
    assert kept["none"] > kept["selective"] > kept["full"] and kept["none"] > kept["every_k"] > kept["full"]
    layer = {mode: (found[mode].kept - shallow[mode].kept) / 2 for mode in MODES}
    x = 4 * 4 * 64 * 64  # fp32 [4 sequences, 64 tokens, 64]
    assert layer["full"] == pytest.approx(x, rel=0.01), "the input of a layer"
    # Input, q, k, v, attention with its statistics, wo, w1, w3, w2; ffn_dim is 2.75 dim.
    assert layer["selective"] == pytest.approx((7 + 2 * 2.75) * x + 4 * 4 * 64 * 4, rel=0.01)
    assert layer["every_k"] == pytest.approx((layer["none"] + layer["full"]) / 2, rel=0.01)
    # A layer is computed again while all else is kept, up to what the loss had kept.
    log_probabilities = 4 * 4 * 64 * 257
    assert found["full"].peak > found["full"].kept - log_probabilities + layer["none"]


def test_compiled_code_is_not_run_for_it() -> None:
    plain = recipe(mode="selective")
    compiled = recipe("--transforms.compile.enabled=true", mode="selective")
    budgeted = recipe("--transforms.compile.enabled=true", mode="memory_budget")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with one_rank() as mesh:
        assert activation_bytes(compiled, mesh) == activation_bytes(plain, mesh)
        assert activation_bytes(budgeted, mesh) == activation_bytes(recipe(), mesh), "that of no checkpointing at all"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_mixed_precision_is_that_of_the_layers() -> None:
    mixed = recipe("--parallelism.fsdp.enabled=true", "--training.mixed_precision_param=bfloat16")
    with one_rank() as mesh:
        assert activation_bytes(mixed, mesh) == activation_bytes(recipe("--training.dtype=bfloat16"), mesh)


def test_the_whole_grows_with_the_batch() -> None:
    with one_rank() as mesh:
        small, large = (activation_bytes(recipe(f"--training.local_batch_size={n}"), mesh).kept for n in (2, 4))
    assert large == pytest.approx(2 * small, rel=0.01)
