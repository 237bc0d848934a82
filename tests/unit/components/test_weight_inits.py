"""Sampled standard deviations of every matrix against formulas, and what deepscale promises at depth."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.components.test_llama import SEQ_LEN, build
from titan_prores.components.model.llama import Llama
from titan_prores.components.model.weight_inits import WEIGHT_INITS
from titan_prores.model.weight_init import trunc_normal

STD = 0.02
CUT = 0.98658  # of the standard deviation is left of a normal that is cut at 3 of them
L, DIM, FFN, VOCABULARY = 12, 128, 192, 128
SHAPE = {"n_layers": L, "dim": DIM, "ffn_dim": FFN, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY}


def deepscale_attention_stds() -> list[float]:
    """std of wo by depth: one over the root of the attention output's variance, times one over that of its columns."""
    stds, r, beta2 = [], math.pi**2 / 6 / math.log(VOCABULARY) ** 2, 2 / L
    for _ in range(L):
        variance = sum(r + (1 - r) / (1 + (n - 1) * math.exp(r - 1)) for n in range(1, SEQ_LEN + 1)) / SEQ_LEN
        stds.append(1 / math.sqrt(variance * DIM))
        r = (1 - beta2) * r + beta2 * (r + (1 - r) * 2 / (SEQ_LEN + 1)) / variance
        r = (1 - beta2) * r + beta2 * (0.12 * r + 0.703 * r**2 + 0.177 * r**3)
    return stds


def expected_std(init: str, kind: str, layer: int, rows: int, columns: int) -> float:
    """Of a matrix of this kind (`wq`, `tok_embeddings`, ...) in layer 1..L, or outside of the layers where it is 0."""
    if init == "normal":
        return STD * (math.sqrt(DIM) if kind == "tok_embeddings" else 1)
    if init == "deepscale":
        if kind == "tok_embeddings":
            return 1.0
        if kind == "wo":
            return deepscale_attention_stds()[layer - 1]
        return 1 / math.sqrt(columns * (0.35578 if kind == "w2" else 1))
    if init == "deepnorm" and layer:
        gain = 1.0 if kind in ("wq", "wk") else math.pow(8 * L, -1 / 4)
        return gain * math.sqrt(2 / (rows + columns))
    is_out = kind in ("wo", "w2")
    if init == "scaled" and is_out:
        return CUT * STD / math.sqrt(2 * L)
    if init == "ds" and is_out:
        return CUT * STD / math.sqrt(2 * layer)
    if init == "ds-all" and layer:
        return CUT * STD / math.sqrt(layer)
    return CUT * STD


@pytest.mark.parametrize("init", WEIGHT_INITS)
def test_every_matrix_has_the_standard_deviation_of_its_formula(init: str) -> None:
    model = build(init=init, init_std=STD, **SHAPE)
    seen = 0
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones(DIM)), name
            continue
        layer = int(parts[1]) + 1 if parts[0] == "layers" else 0
        assert parameter.std().item() == pytest.approx(expected_std(init, parts[-2], layer, *parameter.shape), rel=0.03)
        assert abs(parameter.mean().item()) < 0.05 * parameter.std().item(), name
        seen += 1
    assert seen == 7 * L + 2


def test_a_truncated_normal_is_cut_at_three_standard_deviations() -> None:
    sample = torch.empty(200_000)
    trunc_normal(0.5)(sample, torch.Generator().manual_seed(0))
    assert sample.abs().max() <= 1.5 and sample.std().item() == pytest.approx(0.5 * CUT, rel=0.01)
    for init in ("trunc_normal", "scaled", "ds", "ds-all"):
        assert build(init=init, **SHAPE).layers[0].attention.wq.weight.abs().max() <= 3 * STD


# --- deepscale at depth ---------------------------------------------------------------------------------------------

DEPTH, IDS = 192, 257


def deep(**settings: object) -> Llama:
    return build(n_layers=DEPTH, dim=64, ffn_dim=176, n_heads=2, vocab_size=IDS, **settings)


def variances(model: Llama) -> tuple[list[float], list[float]]:
    """Of each layer's output, and of the gradient there relative to that at the last one; of cross-entropy."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    for layer in model.layers:
        layer.register_forward_hook(keep)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, IDS, (2, 4, SEQ_LEN), generator=generator)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    gradients = [output.grad.var().item() for output in outputs]
    return [output.var().item() for output in outputs], [gradient / gradients[-1] for gradient in gradients]


def use_relu(model: Llama) -> None:
    """A feed-forward w2(relu(w1 x)) of unit variance: E[relu(g)^2] = 1/2."""
    for layer in model.layers:
        ffn = layer.feed_forward
        with torch.no_grad():
            ffn.w2.weight.mul_(math.sqrt(2 * 0.35578))
        ffn.forward = lambda x, ffn=ffn: ffn.w2(F.relu(ffn.w1(x)))


@pytest.mark.slow
@pytest.mark.parametrize(("feed_forward", "least", "most"), [("relu", 0.5, 2), ("swiglu", 0.1, 10)])
def test_deepscale_holds_variances_at_192_layers(feed_forward: str, least: float, most: float) -> None:
    """Outputs stay within 0.5 to 2 either way, gradients with a ReLU too.

    Going back, a ReLU's variance is halved and doubled again by w2, as going forward. silu(g) * u hands a gradient to
    both factors: (E[silu'^2] + E[silu^2]) / E[silu^2] = 2.07 times the variance. With beta^2 = 2/L that is a factor of
    (1 + 2.13/L)^L = 8.4 over the depth, less what attention takes away.
    """
    model = deep(norm="deepscale")
    assert model.config.init == "deepscale"
    if feed_forward == "relu":
        use_relu(model)
    outputs, gradients = variances(model)
    print(
        f"{feed_forward}: output variance {min(outputs):.3f} to {max(outputs):.3f}, "
        f"gradient variance {min(gradients):.3f} to {max(gradients):.3f}"
    )
    assert len(outputs) == DEPTH and 0.5 <= min(outputs) <= max(outputs) <= 2
    assert least <= min(gradients) <= max(gradients) <= most


@pytest.mark.slow
def test_deepscale_needs_its_placement_and_its_init() -> None:
    """Negative controls: Pre-LN with either init, and the placement with another init, leave the bound."""
    for settings in (
        {"norm": "pre", "init": "normal"},
        {"norm": "pre", "init": "deepscale"},
        {"norm": "deepscale", "init": "normal"},
    ):
        outputs, _ = variances(deep(**settings))
        assert min(outputs) < 0.5 or max(outputs) > 2, settings
        ratio = max(outputs) / min(outputs)
        print(settings, f"output variance {min(outputs):.3g} to {max(outputs):.3g}")
        assert ratio > 2, settings
