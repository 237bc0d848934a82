"""Float8: which linears are converted and why, what the emulated matmuls compute, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.model.transformed import MESH, Transformed, transform
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.components.transform.float8 import Float8
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.resolve import resolve
from titan_prores.dry_run.report import report
from titan_prores.protocols.transform import TransformContext

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
REPOSITORY = Path(__file__).parents[3]


def checked(degree: int = 1, vocab_size: int = 256, n_kv_heads: int = 2, **settings) -> Float8:
    shape = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=n_kv_heads, ffn_dim=96)
    with torch.device("meta"):
        model = Llama(shape, vocab_size=vocab_size, seq_len=16)
    float8 = transform("float8", **settings)
    float8.prepare(model, {"tp": degree})
    float8.check(model, {"tp": degree})
    return float8


def kept(float8: Float8) -> dict[str, str]:
    return {linear.name: linear.kept for linear in float8.linears if linear.kept}


def debug_recipe(*overrides: str, world_size: int = 1):
    tree = sources.load(REPOSITORY / "train_configs/debug.toml", overrides, registry.DEFAULTS)
    return resolve(tree, world_size)


def test_every_linear_but_the_output_is_converted_by_default() -> None:
    float8 = checked()
    assert kept(float8) == {"output": "filter_fqns has output"}
    assert len(float8.linears) == 2 * 7 + 1
    assert kept(checked(filter_fqns=[])) == {}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("attention.wk", {"layers.0.attention.wk", "layers.1.attention.wk"}),
        (
            "layers.1",
            {
                f"layers.1.{n}"
                for n in (
                    "attention.wq",
                    "attention.wk",
                    "attention.wv",
                    "attention.wo",
                    "feed_forward.w1",
                    "feed_forward.w2",
                    "feed_forward.w3",
                )
            },
        ),
        ("0.*.w[12]", {"layers.0.feed_forward.w1", "layers.0.feed_forward.w2"}),
        ("layers.*.attention.wo", {"layers.0.attention.wo", "layers.1.attention.wo"}),
    ],
)
def test_filters_match_whole_parts_of_names(pattern: str, names: set[str]) -> None:
    assert kept(checked(filter_fqns=[pattern])) == dict.fromkeys(names, f"filter_fqns has {pattern}")


@pytest.mark.parametrize("pattern", ["attention.w", "ayers.0", "wk.attention", "", "layers.2", "norm"])
def test_filter_that_matches_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"matches no linear \(allowed: parts of layers") as caught:
        checked(filter_fqns=["wk", pattern])
    assert caught.value.key == "filter_fqns"


def test_sizes_keep_linears() -> None:
    assert kept(checked(vocab_size=257, filter_fqns=[])) == {"output": "not multiples of 16"}
    ffn = {f"layers.{i}.feed_forward.w{n}" for i in (0, 1) for n in (1, 2, 3)}
    assert kept(checked(min_features=33, n_kv_heads=2)).keys() & ffn == set()
    assert kept(checked(min_features=33))["layers.0.attention.wk"] == "fewer than min_features = 33"  # 32 x 64
    with pytest.raises(ConfigError, match="no linear is left"):
        checked(min_features=65)  # every linear has 64 inputs or outputs


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_linear_computes_what_its_casts_say(recipe: str) -> None:
    """Against casts written out: dividing by scales, rounding to 8 bits, and matmuls in fp32."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*size, generator=generator) for size in ((8, 48), (32, 48), (8, 32)))
    model = nn.ModuleDict({"linear": nn.Linear(48, 32, bias=False)})
    float8 = transform("float8", recipe_name=recipe)
    float8.prepare(model, {"tp": 1})
    float8.apply(model, TransformContext(MESH))
    with torch.no_grad():
        model["linear"].weight.copy_(w)
    leaf = x.clone().requires_grad_()
    y = model["linear"](leaf)
    y.backward(g)

    def cast(tensor: torch.Tensor, dim: int | None, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        amax = tensor.abs().max() if dim is None else tensor.abs().amax(dim, keepdim=True)
        scale = (torch.finfo(dtype).max / amax.double()).float()
        if recipe != "tensorwise":
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return (tensor * scale).to(dtype).float() / scale

    rows = None if recipe == "tensorwise" else 1
    columns = None if recipe == "tensorwise" else 0
    gradient = torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    expected_y = cast(x, rows) @ cast(w, rows).T
    w_for_x = cast(w, None if recipe == "rowwise_with_gw_hp" else columns)
    expected_x = cast(g, rows, gradient) @ w_for_x
    expected_w = cast(g, columns, gradient).T @ cast(x, columns)
    if recipe == "rowwise_with_gw_hp":
        expected_w = g.T @ x
    torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-5)
    assert (y - x @ w.T).abs().max() > 1e-3  # it does round to 8 bits
    torch.testing.assert_close(leaf.grad, expected_x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model["linear"].weight.grad, expected_w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_model_trains_alike_but_not_the_same(recipe: str) -> None:
    ours, theirs = Transformed(transform("float8", recipe_name=recipe)), Transformed()
    assert [name for name, _ in ours.model.named_parameters()] == [name for name, _ in theirs.model.named_parameters()]
    (loss, gradients), (expected_loss, expected) = ours.gradients(5), theirs.gradients(5)
    assert loss != expected_loss
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-2)
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).norm() / gradient.norm())
        assert 0 < error < 0.2, (name, error)


def test_table_says_what_becomes_of_every_linear() -> None:
    lines = Transformed(transform("float8", filter_fqns=["layers.0.attention.wk"])).lines
    (text,) = [line for line in lines if line.startswith("Float8")]
    summary, *table = text.splitlines()
    assert summary == "Float8: tensorwise, 28 of 29 linears, emulated: this device has no such matmul"
    rows = [row.split() for row in table]
    assert [
        "layers.*.attention.wk",
        "1",
        "x",
        "16",
        "x",
        "32",
        "kept:",
        "filter_fqns",
        "has",
        "layers.0.attention.wk",
    ] in rows
    assert ["layers.*.attention.wk", "3", "x", "16", "x", "32", "float8"] in rows
    assert ["output", "1", "x", "64", "x", "32", "float8"] in rows
    assert sum(int(row[1]) for row in rows) == 29


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enable_fsdp_float8_all_gather": True, "recipe_name": "rowwise"}, "needs recipe_name = tensorwise"),
        ({"precompute_float8_dynamic_scale_for_fsdp": True}, "needs enable_fsdp_float8_all_gather = true"),
        ({"emulate": "yes"}, "emulate"),
        ({"recipe_name": "blockwise"}, "recipe_name"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, said: str) -> None:
    overrides = [f"--transforms.float8.{key}={str(value).lower()}" for key, value in settings.items()]
    with pytest.raises(ConfigErrors, match=said):
        debug_recipe(*overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--transforms.float8.emulate=false"], "cpu has no tensorwise float8 matmul"),
        (
            ["--transforms.float8.enable_fsdp_float8_all_gather=true", "--parallelism.tensor_parallel_degree=2"],
            "precompute_float8_dynamic_scale_for_fsdp = false: must be true",
        ),
        (
            ["--transforms.float8.enabled=true", "--parallelism.tensor_parallel_degree=2"],
            "not multiples of 16: layers.*.feed_forward.w1 176 / 2",
        ),
    ],
)
def test_check_refuses_what_would_not_run(overrides: list[str], said: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        report(debug_recipe(*overrides, world_size=2), 2)
    assert said in str(caught.value)


@pytest.mark.parametrize("other", ["--parallelism.fsdp.enabled=false", "--parallelism.fsdp.cpu_offload=true"])
def test_float8_all_gather_needs_fsdp_on_the_device(other: str) -> None:
    with pytest.raises(ConfigErrors, match="enable_fsdp_float8_all_gather"):
        debug_recipe("--transforms.float8.enable_fsdp_float8_all_gather=true", other)


@pytest.mark.parametrize(("local_batch_size", "padded"), [(1, True), (8, False)])
def test_tokens_that_the_matmul_does_not_take_are_padded(local_batch_size: int, padded: bool) -> None:
    """Gradients of weights are sums over 30 tokens, or over 240, which 16 divides."""
    sizes = ["--training.seq_len=30", f"--training.local_batch_size={local_batch_size}"]
    text = report(debug_recipe("--transforms.float8.enabled=true", *sizes), 1)
    assert ("tokens padded to a multiple of 16" in text) == padded


@pytest.mark.parametrize(
    ("capability", "recipe", "emulated"),
    [
        ((8, 0), "tensorwise", True),
        ((8, 9), "tensorwise", False),
        ((8, 9), "rowwise", True),
        ((9, 0), "rowwise", False),
        ((9, 0), "rowwise_with_gw_hp", False),
        ((12, 0), "tensorwise", False),
    ],
)
def test_emulation_is_for_devices_without_the_matmul(
    capability: tuple[int, int], recipe: str, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert transform("float8", recipe_name=recipe)._emulate(torch.device("cuda", 0)) == emulated


def test_emulation_asked_for_takes_any_shard() -> None:
    text = report(
        debug_recipe("--transforms.float8.emulate=true", "--parallelism.tensor_parallel_degree=2", world_size=2), 2
    )
    assert "float8: tensorwise, 28 of 29 linears, emulated" in text
    assert "layers.*.feed_forward.w2    4 x      64 x 176     float8" in text
