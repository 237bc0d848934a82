"""The recipes of the paper's sizes, and what `--check` says of them without data, tokenizer or ranks."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from titan_prores import check, config, registry
from titan_prores.build import build_components
from titan_prores.recipe import Recipe, resolve

ROOT = Path(__file__).parents[2]
# name -> dim, ffn_dim, heads, layers, peak learning rate; as the paper and its code have them.
SIZES = {
    "llama_71m": (512, 1368, 8, 12, 2e-3),
    "llama_130m": (768, 2048, 12, 12, 2e-3),
    "llama_350m": (1024, 2736, 16, 24, 1e-3),
    "llama_1.3b": (2048, 5632, 32, 24, 6e-4),
    "llama_3b": (2560, 6848, 32, 32, 6e-4),
    "llama_7b": (4096, 11008, 32, 32, 3e-4),
}


def recipe(name: str, world_size: int, *overrides: str) -> Recipe:
    tree = config.load(ROOT / f"train_configs/{name}.toml", overrides, registry.builtin_folder() / "defaults.toml")
    return resolve(tree, world_size)


def held(report: str) -> dict[str, int]:
    """The lines of `bytes per rank`, those of one name added up."""
    found: dict[str, int] = {}
    for line in report.split("\nbytes per rank ")[1].splitlines()[1:]:
        if match := re.match(r"  (\w+) +([\d,]+) +\(", line):
            found[match[1]] = found.get(match[1], 0) + int(match[2].replace(",", ""))
    return found


@pytest.mark.parametrize("name", SIZES)
def test_recipe_is_the_paper_s(name: str) -> None:
    built = recipe(name, 8)
    dim, ffn_dim, n_heads, n_layers, lr = SIZES[name]
    model, optimizer, training = built.slots["model"].config, built.slots["optimizer"].config, built.training
    assert (model.dim, model.ffn_dim, model.n_heads, model.n_layers) == (dim, ffn_dim, n_heads, n_layers)
    assert (model.vocab_size, model.norm, model.norm_eps, model.tie_embeddings) == (32000, "pre", 1e-5, False)
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (lr, 0.9, 0.95, 0.1)
    assert (training.seq_len, training.global_batch_size, training.steps, training.max_norm) == (1024, 512, 100_000, 1)
    assert training.mixed_precision_param == "bfloat16" and training.dtype == "float32"
    schedule = build_components(built, {"dp_replicate": 1, "dp_shard": 8, "tp": 1}, []).lr_scheduler
    assert [schedule.factor(t) for t in (0, 1000, 2000, 90_000, 95_000)] == [0, 0.5, 1, 1, 0.5]
    parts = {part.name: part.config for part in built.sets["transforms"]}
    assert parts["prores"].residual_schedule.name == "linear" and parts["prores"].residual_schedule.config.T == 1000
    assert "compile" in parts and ("activation_checkpoint" in parts) == (name in ("llama_3b", "llama_7b"))


CELLS = [(name, size) for name in SIZES for size in (8, 64)]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [pytest.param(*cell, marks=[] if cell == ("llama_71m", 8) else pytest.mark.slow) for cell in CELLS],
)
def test_check_on_this_machine(name: str, world_size: int) -> None:
    start = time.perf_counter()
    report = check.report(built := recipe(name, world_size), world_size)
    print(f"{name} for {world_size} ranks: {time.perf_counter() - start:.1f} s")
    dim, ffn_dim, _, n_layers, _ = SIZES[name]
    parameters = 2 * 32000 * dim + n_layers * (4 * dim**2 + 3 * dim * ffn_dim + 2 * dim) + dim
    assert f"parameters       {parameters:,} (" in report
    assert "tokens in all    52,428,800,000 in 100,000 steps" in report
    assert "a run needs      train_configs/paper.toml" in report.replace(f"{ROOT}/", "")

    sizes = held(report)
    # Norms are not split by tensor parallelism, and rows do not always divide evenly.
    assert 1 <= sizes["parameters"] / (4 * parameters / world_size) < 1.01
    assert sizes["gradients"] == sizes["parameters"]
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=1e-4)
    together = sizes.pop("together")
    assert together == sum(sizes.values())
    assert together < 80 * 2**30, "a rank has 80 GB at most"

    # bf16, of a layer or of embedding, last norm and output: the larger.
    tp = built.parallelism.tensor_parallel_degree
    layer, outside = 4 * dim**2 + 3 * dim * ffn_dim + 2 * dim * tp, 2 * 32000 * dim + dim * tp
    largest = int(re.search(r"largest gather +([\d,]+) bytes", report)[1].replace(",", ""))
    assert largest == pytest.approx(2 * max(layer, outside) / tp, rel=0.01)
    # The fp32 log-probabilities of this rank's share of the vocabulary are kept, and each layer's bf16 input.
    tokens = built.training.local_batch_size * built.training.seq_len
    assert sizes["activations"] > tokens * 4 * 32000 / tp + n_layers * tokens * dim * 2 / tp
    assert "compiled code keeps less" in report
    if (name, world_size) == ("llama_7b", 64):
        shown = (ROOT / "README.md").read_text().split("--check --world-size 64\n(", 1)[1].split("```")[0]
        # What is kept depends a little on the version of torch, and so does the sum.
        for line in shown.splitlines()[1:]:
            assert line in report or line.split()[0] in ("activations", "computing", "together"), line


@pytest.mark.slow
def test_checkpointing_makes_room() -> None:
    """The 1.3B recipe, of fewer layers: what selective and full checkpointing save is in the report."""
    short = "--model.n_layers=4"
    modes = {"none": "enabled=false", "selective": "mode=selective", "full": "mode=full"}
    sizes = {
        mode: held(check.report(recipe("llama_1.3b", 8, short, f"--transforms.activation_checkpoint.{key}"), 8))
        for mode, key in modes.items()
    }
    kept = {mode: size["activations"] for mode, size in sizes.items()}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert sizes["none"]["together"] > sizes["selective"]["together"] > sizes["full"]["together"]
