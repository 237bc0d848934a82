"""Every norm scheme against its equation, written out here in float64, and against transformers where that has it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.components.test_llama import LLAMA_NAMES, SEQ_LEN, VOCABULARY, build, tokens
from tests.unit.model.transformed import Transformed, assert_same_bits, transform
from titan_prores.components.model.norm_schemes import NORM_SCHEMES, Placement
from titan_prores.components.model.weight_inits import WEIGHT_INITS
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import Resolver, resolve
from titan_prores.config.sources import Tree
from titan_prores.dry_run.report import report
from titan_prores.prores import ProRes, Schedule, as_schedule

REPOSITORY = Path(__file__).parents[3]
L = 4
SHAPE = {"n_layers": L, "dim": 32, "ffn_dim": 48, "n_heads": 2, "n_kv_heads": 1}
Function = Callable[[torch.Tensor], torch.Tensor]

# x, the branch, its norms before (n), on the branch (r) and after the add (o), alpha and the layer's number.
EQUATIONS: dict[str, Callable[[torch.Tensor, Function, Function, Function, Function, float, int], torch.Tensor]] = {
    "pre": lambda x, f, n, r, o, a, layer: x + a * f(n(x)),
    "post": lambda x, f, n, r, o, a, layer: o(x + a * f(x)),
    "sandwich": lambda x, f, n, r, o, a, layer: x + a * r(f(n(x))),
    "peri": lambda x, f, n, r, o, a, layer: x + a * r(f(n(x))),
    "lns": lambda x, f, n, r, o, a, layer: x + a * f(n(x) / math.sqrt(layer)),
    "lns-learnable": lambda x, f, n, r, o, a, layer: x + a * f(n(x)),
    "deepnorm": lambda x, f, n, r, o, a, layer: o(math.pow(2 * L, 1 / 4) * x + a * f(x)),
    "mix": lambda x, f, n, r, o, a, layer: o(x + a * f(x)) if layer == 1 else x + a * f(n(x)),
    "deepscale": lambda x, f, n, r, o, a, layer: math.sqrt(1 - 2 / L) * x + a * math.sqrt(2 / L) * f(n(x)),
}


def reference(
    scheme: str, weights: dict[str, torch.Tensor], tokens_BS: torch.Tensor, alpha: np.ndarray, eps: float, base: float
) -> torch.Tensor:
    """Logits [B, S, V] in float64: the whole model as one function of its weights, by name."""
    length, head_dim = tokens_BS.shape[1], SHAPE["dim"] // SHAPE["n_heads"]
    position = torch.arange(length, dtype=torch.float64)[:, None]
    angle = position * base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    # Positions as complex factors on the pairs (first half, second half) of a head.
    factor = torch.complex(angle.cos(), angle.sin())[None, :, None, :]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.einsum("bsi,oi->bso", x, weights[f"{name}.weight"])

    def norm(name: str) -> Function:
        return lambda x: x * weights[f"{name}.weight"] / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def heads(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (-1, head_dim))
        return x.repeat_interleave(SHAPE["n_heads"] // x.shape[2], dim=2)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*x.chunk(2, dim=-1)) * factor
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attention(x: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = (heads(linear(x, f"{layer}.attention.{name}")) for name in ("wq", "wk", "wv"))
        scores = torch.einsum("bqhe,bkhe->bhqk", rotated(q), rotated(k)) / head_dim**0.5
        shares = scores.masked_fill(future, -math.inf).softmax(-1)
        return linear(torch.einsum("bhqk,bkhe->bqhe", shares, v).flatten(2), f"{layer}.attention.wo")

    def feed_forward(x: torch.Tensor, layer: str) -> torch.Tensor:
        gate, up = linear(x, f"{layer}.feed_forward.w1"), linear(x, f"{layer}.feed_forward.w3")
        return linear(gate / (1 + torch.exp(-gate)) * up, f"{layer}.feed_forward.w2")

    x = weights["tok_embeddings.weight"][tokens_BS]
    if scheme == "peri":
        x = norm("embedding_norm")(x)
    for number in range(1, L + 1):
        layer = f"layers.{number - 1}"
        for name, branch in (("attention", attention), ("ffn", feed_forward)):
            x = EQUATIONS[scheme](
                x,
                lambda h, branch=branch, layer=layer: branch(h, layer),
                norm(f"{layer}.{name}_norm"),
                norm(f"{layer}.{name}_post_norm"),
                norm(f"{layer}.{name}_out_norm"),
                float(alpha[number - 1]),
                number,
            )
    return linear(norm("norm")(x), "output")


def disturb_norms(model: nn.Module) -> None:
    """Weights of norms that differ from 1 and from each other."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5, generator=generator(number)))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, SEQ_LEN), generator=generator(1))


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels().flatten())


ALPHAS = {
    "no ProRes": None,
    "zeros": lambda step: np.zeros(L),
    "ones": lambda step: np.ones(L),
    "random": lambda step: np.random.default_rng(0).random(L),
    "linear": Schedule("linear", L, T=10),
}


@pytest.mark.parametrize("norm", NORM_SCHEMES)
@pytest.mark.parametrize("alphas", ALPHAS)
def test_loss_and_every_gradient_against_the_equation(norm: str, alphas: str) -> None:
    model = build(norm=norm, init="trunc_normal", init_std=0.2, **SHAPE)
    disturb_norms(model)
    model.double().fill_buffers()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    alpha, step = np.ones(L), 17
    if schedule := ALPHAS[alphas]:
        ProRes(model, schedule).set_step(step)
        alpha = np.float32(as_schedule(schedule).alpha(step))
    found = loss_of(model(tokens()))
    config = model.config
    expected = loss_of(reference(norm, weights, tokens(), alpha, config.norm_eps, config.rope_theta))
    # Rotary positions are in fp32 whatever the weights are; all else is float64.
    assert abs(found.item() - expected.item()) <= 1e-6
    found.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        theirs = weights[name].grad
        assert theirs is not None, f"{name} has no part in the equation"
        assert (parameter.grad - theirs).norm() <= 2e-6 * theirs.norm(), name
        assert (theirs.norm() > 0) == (alphas != "zeros" or not is_of_a_branch(name)), name


def is_of_a_branch(name: str) -> bool:
    """Whether nothing but a branch depends on it: all of a layer's but a norm after the add."""
    return name.startswith("layers.") and not name.endswith("out_norm.weight")


def test_the_equations_tell_the_schemes_apart() -> None:
    """Negative control: no two schemes that share their weights give one loss."""
    model = build(norm="pre", init="trunc_normal", init_std=0.2, **SHAPE).double()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name in list(weights):
        if name.endswith("_norm.weight"):
            for other in ("post_norm", "out_norm"):
                weights[name.replace("_norm", f"_{other}")] = weights[name]
    weights["embedding_norm.weight"] = weights["norm.weight"]
    alpha = np.float32([1, 0.7, 0.4, 0.1])
    losses = {s: loss_of(reference(s, weights, tokens(), alpha, 1e-5, 1e4)).item() for s in EQUATIONS}
    assert losses.pop("lns-learnable") == losses["pre"]  # they differ in where their weights start
    found = sorted(losses.values())
    assert min(b - a for a, b in itertools.pairwise(found)) > 1e-4, losses


def test_lns_learnable_starts_where_lns_stays() -> None:
    settings = {"init": "trunc_normal", "init_std": 0.2, **SHAPE}
    fixed, learnable = build(norm="lns", **settings), build(norm="lns-learnable", **settings)
    torch.testing.assert_close(fixed(tokens()), learnable(tokens()), rtol=0, atol=1e-5)
    for number, layer in enumerate(learnable.layers, 1):
        assert layer.attention_norm.weight.tolist() == layer.ffn_norm.weight.tolist()
        assert torch.equal(layer.ffn_norm.weight, torch.full((32,), number**-0.5)), number
    assert torch.equal(learnable.norm.weight, torch.ones(32)) and torch.equal(fixed.norm.weight, torch.ones(32))


def copies(norm: str, dtype: torch.dtype) -> list[nn.Module]:
    """The plain model and one with ProRes at alpha = 1."""
    models = [build(norm=norm, **SHAPE).to(dtype) for _ in range(2)]
    for model in models:
        disturb_norms(model)
        model.fill_buffers()
    ProRes(models[1], Schedule("linear", L, T=10)).set_step(10 * L)
    return models


def results(model: nn.Module) -> list[torch.Tensor]:
    loss = loss_of(model(tokens()).float())
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("norm", NORM_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_one_is_bitwise_the_plain_model(norm: str, dtype: torch.dtype) -> None:
    plain, scaled = map(results, copies(norm, dtype))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(scaled, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["lns", "mix", "deepscale"])  # a factor as a tensor, both kinds of layers, constants
def test_alpha_one_is_bitwise_the_plain_model_compiled(norm: str) -> None:
    models = copies(norm, torch.float32)
    for model in models:
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(fullgraph=True)
    plain, scaled = map(results, models)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(scaled, plain, strict=True))


@pytest.mark.parametrize("norm", NORM_SCHEMES)
def test_layers_share_a_graph_while_alpha_moves(norm: str) -> None:
    from torch._dynamo.utils import counters

    model = build(norm=norm, **SHAPE)
    prores = ProRes(model, Schedule("linear", L, T=1))
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="eager")
    for step in range(3):
        prores.set_step(step)
        model(tokens())
    assert counters["stats"]["unique_graphs"] - before == (2 if norm == "mix" else 1)


@pytest.mark.parametrize("norm", ["pre", "sandwich", "peri", "lns", "lns-learnable"])
def test_alpha_zero_makes_every_block_the_identity(norm: str) -> None:
    model = build(norm=norm)
    ProRes(model, lambda step: np.zeros(4)).set_step(0)
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda m, args, out: seen.append(torch.equal(args[0], out)))
    model(tokens())
    assert seen == [True] * 4


def test_mix_is_post_ln_in_the_first_quarter() -> None:
    for n_layers, post in ((3, 0), (4, 1), (7, 1), (12, 3), (24, 6)):
        placements = [NORM_SCHEMES["mix"].placement(layer, n_layers) for layer in range(1, n_layers + 1)]
        assert placements == [Placement(out_norm=True)] * post + [Placement(in_norm=True)] * (n_layers - post)


def test_a_factor_on_a_norm_needs_the_norm() -> None:
    for wrong in ({"in_norm_scale": 0.5}, {"in_norm_start": 0.5}):
        with pytest.raises(ValueError, match="need in_norm"):
            Placement(out_norm=True, **wrong)


@pytest.mark.parametrize("norm", NORM_SCHEMES)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(norm: str, mode: str) -> None:
    checkpointed = Transformed(transform("activation_checkpoint", mode=mode), norm=norm)
    assert_same_bits(checkpointed, Transformed(norm=norm), step=2)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORM_SCHEMES)
def test_check_builds_it_with_every_transform(norm: str) -> None:
    """FSDP2 x TP, float8, compile, checkpointing: applied, verified and run on fake tensors."""
    overrides = [
        "parallelism.tensor_parallel_degree=2",
        "transforms.compile.fullgraph=true",
        "transforms.float8.recipe_name=tensorwise",
        "transforms.activation_checkpoint.mode=selective",
        "model.ffn_dim=192",
        f"model.norm={norm}",
    ]
    tree = sources.load(
        REPOSITORY / "train_configs/debug.toml", [f"--{override}" for override in overrides], registry.DEFAULTS
    )
    said = report(resolve(tree, 4), 4)
    assert f'norm = "{norm}"' in said and "6. fsdp" in said
    assert re.search(r"activations +[1-9]", said), said
    if (own := NORM_SCHEMES[norm].init) is not None:
        assert f'init = "{own}"  # norm {norm}' in said


# --- transformers -----------------------------------------------------------------------------------------------------

GEMMA2_NAMES = LLAMA_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
}


def sizes_of(model: nn.Module) -> dict[str, Any]:
    c = model.config
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": c.dim,
        "intermediate_size": c.ffn_dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "rms_norm_eps": c.norm_eps,
        "head_dim": c.dim // c.n_heads,
        "max_position_embeddings": SEQ_LEN,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
    }


@pytest.mark.parametrize("norm", ["lns", "sandwich"])
def test_logits_and_gradients_equal_transformers(norm: str) -> None:
    """lns is their Llama with the norms' weights divided by sqrt(l), sandwich their Gemma 2. (test_llama.py has pre.)

    Gemma 2 multiplies the embedding with sqrt(dim) and norms with 1 + weight, so that is taken from our weights, and
    into gradients. Its soft caps, sliding windows and GELU are switched off.
    """
    transformers = pytest.importorskip("transformers")
    model = build(norm=norm, init="trunc_normal", init_std=0.1, **SHAPE)
    disturb_norms(model)
    # name -> what a weight is times there, and what is then added.
    change = {name: (1.0, 0.0) for name, _ in model.named_parameters()}
    if norm == "sandwich":
        names = GEMMA2_NAMES
        theirs = transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **sizes_of(model),
                hidden_activation="silu",
                query_pre_attn_scalar=SHAPE["dim"] // SHAPE["n_heads"],
                attn_logit_softcapping=None,
                final_logit_softcapping=None,
                layer_types=["full_attention"] * L,
                attn_implementation="eager",
            )
        )
        change |= {name: (1.0, -1.0) for name in change if name.endswith("norm.weight")}
        change["tok_embeddings.weight"] = (SHAPE["dim"] ** -0.5, 0.0)
    else:
        names = LLAMA_NAMES
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes_of(model)))
        if norm == "lns":
            for number in range(1, L + 1):
                for branch in ("attention", "ffn"):
                    change[f"layers.{number - 1}.{branch}_norm.weight"] = (number**-0.5, 0.0)
    renamed = {name: ".".join(names.get(part, part) for part in name.split(".")) for name in change}
    with torch.no_grad():
        state = {renamed[name]: p * change[name][0] + change[name][1] for name, p in model.named_parameters()}
    theirs.load_state_dict(state)

    mine, expected = model(tokens()), theirs(tokens()).logits
    assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max() and expected.std() > 0.05
    loss_of(mine).backward()
    loss_of(expected).backward()
    for name, parameter in model.named_parameters():
        gradient = theirs.get_parameter(renamed[name]).grad * change[name][0]
        assert (parameter.grad - gradient).norm() <= 2e-5 * gradient.norm() and gradient.norm() > 0, name


# --- Settings ---------------------------------------------------------------------------------------------------------


def resolved(**settings: Any) -> tuple[Any, list[ConfigError], dict[str, str]]:
    resolver = Resolver(Tree())
    spec = resolver.component("model", {"name": "llama", **settings}, ("model",))
    return spec, resolver.errors, resolver.origins


@pytest.mark.parametrize("norm", NORM_SCHEMES)
def test_a_scheme_brings_its_own_init_unless_one_is_given(norm: str) -> None:
    spec, _, origins = resolved(norm=norm)
    own = norm in ("deepnorm", "deepscale")
    assert spec.config.init == (norm if own else "trunc_normal")
    assert origins.get("model.init") == (f"norm {norm}" if own else None)
    assert resolved(norm=norm, init="normal")[0].config.init == "normal"


def test_deepscale_needs_three_layers() -> None:
    for n_layers in (1, 2):
        spec, errors, _ = resolved(norm="deepscale", n_layers=n_layers)
        assert spec is None and [error.key for error in errors] == ["model.norm", "model.init"]
        assert f"is defined for n_layers of 3 and more, not {n_layers}" in str(errors[0])
        assert [e.key for e in resolved(init="deepscale", n_layers=n_layers)[1]] == ["model.init"]
    assert resolved(norm="deepscale", n_layers=3)[1] == []


def test_wrong_names_get_the_nearest_and_help_tells_them_all() -> None:
    from titan_prores.cli import describe

    assert "did you mean deepnorm?" in str(resolved(norm="deep-norm")[1][0])
    assert "did you mean ds-all?" in str(resolved(init="dsall")[1][0])
    said = describe("model.llama")
    for name, entry in (NORM_SCHEMES | WEIGHT_INITS).items():
        assert any(line.split()[:1] == [name] and entry.summary in line for line in said.splitlines()), name
