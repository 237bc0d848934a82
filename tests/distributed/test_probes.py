"""What probes find is what the equations say, on FSDP2 and on tensor parallelism, and they change no bit of a run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.distributed.parity import build, full
from tests.distributed.spawn import run_ranks
from tests.integration.launch import rows
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.config.sections import Section
from titan_prores.protocols.metric import Metric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

N_LAYERS, SEQ_LEN, SEQUENCES, STEPS, REFERENCE = 3, 32, 3, 6, 2
COMMON = [
    f"--model.n_layers={N_LAYERS}",
    f"--training.seq_len={SEQ_LEN}",
    "--training.global_batch_size=4",
    # The batch of the probes is taken in two parts.
    "--training.local_batch_size=2",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=2",
    "--transforms.prores.residual_schedule.T=2",
    "--validation.enabled=false",
    "--metrics.log_freq=1",
    "--metrics.capture.name=tests.distributed.test_probes:CaptureWeights",
]
PROBES = [
    *(f"--metrics.{name}.every_steps=1" for name in ("activation_norm", "branch_ratio", "residual_cosine")),
    *(f"--metrics.{name}.sequences={SEQUENCES}" for name in ("activation_norm", "branch_ratio", "residual_cosine")),
    "--metrics.residual_cosine.reference_ratio=0.3",
    "--metrics.layer_grad_norm.every_steps=1",
]
TP = "--parallelism.tensor_parallel_degree=2"
COMPILE = "--transforms.compile.backend=aot_eager"
EVERYTHING = [
    "--transforms.compile.backend=inductor",
    "--transforms.activation_checkpoint.mode=selective",
    "--transforms.float8.recipe_name=tensorwise",
    "--transforms.float8.emulate=true",
    "--transforms.float8.enable_fsdp_float8_all_gather=true",
    "--transforms.float8.precompute_float8_dynamic_scale_for_fsdp=true",
]
VARIANTS = {
    "fsdp2": ([], "pre"),
    "tp2": ([TP], "sandwich"),
    "tp2-post": ([TP], "post"),
    "tp2-compiled": ([TP, COMPILE], "pre"),
}
UNCHANGED = {"tp2-compiled": [TP, COMPILE], "everything": EVERYTHING}


class CaptureWeights(Metric):
    """Keeps the weights that the update of each step uses, whole."""

    class Config(Section):
        pass

    captured: ClassVar[dict[int, dict[str, torch.Tensor]]] = {}

    def measure(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        CaptureWeights.captured[step] = {name: full(p) for name, p in model.named_parameters()}
        return {}


def train(rank: int, world_size: int, overrides: list[str], run: str) -> dict[str, Any]:
    """A run: its rows, the weights of each step, those at the end, and the text that probes are to take."""
    torch._dynamo.reset()
    CaptureWeights.captured = {}
    trainer = build(rank, world_size, [*COMMON, *overrides], run)
    trainer.train()
    trainer.run.close()
    held_out = trainer.data.validation
    n_windows = (len(held_out) - 1) // SEQ_LEN
    starts = [number * n_windows // SEQUENCES * SEQ_LEN for number in range(SEQUENCES)]
    return {
        "weights": CaptureWeights.captured,
        "end": {n: full(p) for n, p in trainer.model.named_parameters()},
        "tokens": torch.tensor([held_out.read(start, SEQ_LEN).tolist() for start in starts]),
        "rows": rows(Path(run)) if rank == 0 else [],
    }


def train_all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    def run(name: str, *overrides: str) -> dict[str, Any]:
        return train(rank, world_size, list(overrides), f"{folder}/{name}")

    found = {}
    for name, (own, norm) in VARIANTS.items():
        found[name] = run(name, *own, f"--model.norm={norm}", *PROBES)
    for name, own in UNCHANGED.items():
        found[f"{name}/with"] = found.get(name) or run(f"{name}-with", *own, *PROBES)
        found[f"{name}/without"] = run(f"{name}-without", *own)
    saving = ["--checkpoint.enabled=true", *PROBES]
    found["before"] = run("resumed", TP, *saving, "--training.stop_after=3")
    found["resumed"] = run("resumed", *saving)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(train_all, 2, str(tmp_path_factory.mktemp("probes")), timeout=540)[0]


@torch.no_grad()
def streams(
    weights: Mapping[str, torch.Tensor], alpha: list[float], tokens_BS: torch.Tensor, norm: str
) -> tuple[list[torch.Tensor], list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """The stream before and after every block, and for each add what it adds to, and what it adds, in float64."""
    preset = {key: value for key, (value, _) in LlamaConfig.presets({}).items()}
    shape = LlamaConfig(**preset | {"n_layers": N_LAYERS, "norm": norm})
    model = Llama(shape, vocab_size=weights["output.weight"].shape[0], seq_len=SEQ_LEN)
    model.load_state_dict(weights)
    model.double()
    model.fill_buffers()
    x = model.tok_embeddings(tokens_BS)
    stream, adds = [x], []
    for block, a in zip(model.layers, alpha, strict=True):
        branch = a * block.attention_post_norm(block.attention(block.attention_norm(x), model.rotary))
        first = (x, branch)
        x = block.attention_out_norm(x + branch)
        branch = a * block.ffn_post_norm(block.feed_forward(block.ffn_norm(x)))
        adds.append([first, (x, branch)])
        x = block.ffn_out_norm(x + branch)
        stream.append(x)
    return stream, adds


def expected(run: Mapping[str, Any], row: Mapping[str, Any], norm: str) -> dict[str, list[float]]:
    """What a row has to say, but for the cosine."""
    stream, adds = streams(run["weights"][row["step"]], row["alpha"], run["tokens"], norm)
    return {
        "activation_norm": [x.norm(dim=-1).mean().item() for x in stream[1:]],
        "activation_rms": [x.square().mean().sqrt().item() for x in stream[1:]],
        "branch_ratio_attention": [(branch.norm() / x.norm()).item() for (x, branch), _ in adds],
        "branch_ratio_ffn": [(branch.norm() / x.norm()).item() for _, (x, branch) in adds],
    }


def updates(run: Mapping[str, Any], row: Mapping[str, Any], norm: str) -> list[torch.Tensor]:
    stream, _ = streams(run["weights"][row["step"]], row["alpha"], run["tokens"], norm)
    return [after - before for before, after in itertools.pairwise(stream)]


@pytest.mark.parametrize("name", VARIANTS)
def test_values(name: str, runs: dict[str, Any]) -> None:
    run, norm = runs[name], VARIANTS[name][1]
    assert [row["step"] for row in run["rows"]] == list(range(1, STEPS + 1))
    then = updates(run, run["rows"][REFERENCE - 1], norm)
    for row in run["rows"]:
        for key, values in expected(run, row, norm).items():
            assert row[key] == pytest.approx(values, rel=2e-5), (row["step"], key)
        if row["step"] <= REFERENCE:
            assert "residual_cosine" not in row
            continue
        now = updates(run, row, norm)
        cosines = [torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in zip(then, now, strict=True)]
        assert row["residual_cosine"] == pytest.approx(cosines, abs=2e-5) and row["residual_cosine_step"] == REFERENCE
        assert row["step"] < STEPS or min(cosines) < 0.999, "the weights have moved"


def test_layouts_agree(runs: dict[str, Any]) -> None:
    for row, other in zip(runs["fsdp2"]["rows"], runs["tp2-compiled"]["rows"], strict=True):
        for key in ("activation_norm", "branch_ratio_attention", "branch_ratio_ffn", "layer_grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-12), (row["step"], key)


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_run_with_probes_is_bitwise_the_run_without(name: str, runs: dict[str, Any]) -> None:
    run, plain = runs[f"{name}/with"], runs[f"{name}/without"]
    for key in ("loss", "grad_norm", "compiled_graphs"):
        assert [row[key] for row in run["rows"]] == [row[key] for row in plain["rows"]], key
    assert plain["rows"][-1]["compiled_graphs"] > 0
    assert all(torch.equal(weight, plain["end"][key]) for key, weight in run["end"].items())
    assert all(len(row["activation_norm"]) == N_LAYERS for row in run["rows"])


def test_the_reference_survives_a_change_of_layout(runs: dict[str, Any]) -> None:
    before, resumed = runs["before"], runs["resumed"]
    then = updates(before, before["rows"][REFERENCE - 1], "pre")
    for row in resumed["rows"][3:]:
        now = updates(resumed, row, "pre")
        cosines = [torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in zip(then, now, strict=True)]
        assert row["residual_cosine"] == pytest.approx(cosines, abs=2e-5) and row["residual_cosine_step"] == REFERENCE
