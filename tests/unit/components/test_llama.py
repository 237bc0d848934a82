"""The Llama model against transformers, its shapes, its norms and its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titan_prores.components.model.llama import FLAVORS, Llama
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import Resolver
from titan_prores.config.sources import Tree
from titan_prores.model.weight_init import init_weights, match_rules, normal
from titan_prores.protocols.model import InitRule

VOCABULARY, SEQ_LEN = 50, 32
# A part of a name here -> of a name in transformers.
LLAMA_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers": "model.layers",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


def build(seed: int = 0, device: str = "meta", **settings: Any) -> Llama:
    """A model with drawn weights, through the way a run takes."""
    resolver = Resolver(Tree())
    spec = resolver.component("model", {"name": "llama", **settings}, ("model",))
    assert not resolver.errors, resolver.errors
    with torch.device(device):
        model = spec.build(vocab_size=VOCABULARY, seq_len=SEQ_LEN)
    model.to_empty(device="cpu")
    init_weights(model, model.init_rules(), seed)
    model.fill_buffers()
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "tie_embeddings": True},
        {"rope_theta": 500000.0, "norm_eps": 1e-6, "dim": 96, "ffn_dim": 200, "n_heads": 6, "n_layers": 3},
    ],
)
def test_logits_and_gradients_equal_transformers(settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(**settings, init_std=0.1)
    c = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=c.dim,
            intermediate_size=c.ffn_dim,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads or c.n_heads,
            rms_norm_eps=c.norm_eps,
            rope_theta=c.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=c.tie_embeddings,
            max_position_embeddings=SEQ_LEN,
        )
    )
    renamed = {".".join(LLAMA_NAMES.get(w, w) for w in name.split(".")): p for name, p in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(renamed, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if c.tie_embeddings else set())

    mine, expected = model(tokens()), theirs(tokens()).logits
    assert (mine - expected).abs().max() <= 1e-5 and expected.std() > 0.05
    F.cross_entropy(mine.flatten(0, 1), tokens().flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), tokens().flatten()).backward()
    for name, parameter in model.named_parameters():
        other = theirs.get_parameter(".".join(LLAMA_NAMES.get(w, w) for w in name.split(".")))
        assert (parameter.grad - other.grad).norm() <= 1e-5 * other.grad.norm(), name


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_have_the_parameters_of_their_shape(flavor: str) -> None:
    shape = FLAVORS[flavor]
    with torch.device("meta"):
        model = Llama(Llama.Config(flavor=flavor, **shape), vocab_size=32000, seq_len=1024)
    count = sum(p.numel() for p in model.parameters())
    d, f, layers = shape["dim"], shape["ffn_dim"], shape["n_layers"]
    assert count == 2 * 32000 * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d
    if flavor == "7B":
        assert count == 6_738_415_616  # as published for Llama 7B


def test_flavor_gives_way_to_given_keys_and_is_checked() -> None:
    assert build(flavor="debug", n_layers=2).config.n_layers == 2
    resolver = Resolver(Tree())
    resolver.component("model", {"name": "llama", "flavor": "350m"}, ("model",))
    assert resolver.errors[0].key == "model.flavor" and resolver.errors[0].nearest == "350M"
    for wrong, key in [({"n_heads": 5}, "n_heads"), ({"n_kv_heads": 3}, "n_kv_heads"), ({"norm": "psot"}, "post")]:
        resolver = Resolver(Tree())
        resolver.component("model", {"name": "llama", **wrong}, ("model",))
        assert len(resolver.errors) == 1 and key in str(resolver.errors[0]), resolver.errors
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        build(vocab_size=VOCABULARY - 1)
    assert build(vocab_size=64).output.weight.shape[0] == 64


def test_init_depends_on_name_and_seed_alone() -> None:
    small, large = build(n_layers=2), build(n_layers=3)
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, large.get_parameter(name)), name
        if "norm" not in name:
            assert not torch.equal(parameter, build(seed=1, n_layers=2).get_parameter(name)), name
    assert torch.equal(build(device="cpu").output.weight, build(device="meta").output.weight)


def test_init_rules_must_fit_the_model() -> None:
    rules = [InitRule("a.*", normal(1)), InitRule("*.bias", normal(1))]
    assert {n: r.pattern for n, r in match_rules(rules, ["a.bias", "b.bias"]).items()} == {
        "a.bias": "a.*",
        "b.bias": "*.bias",
    }
    with pytest.raises(ValueError, match=r"no init rule matches the parameter c\.weight"):
        match_rules(rules, ["a.bias", "c.weight"])
    with pytest.raises(ValueError, match=r"a\.\* matches no parameter"):
        match_rules(rules, ["b.bias"])


def test_bf16_weights_are_rounded_fp32_weights() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    rules = [InitRule("*", normal(0.02))]
    init_weights(model, rules, 0)
    rounded = nn.Sequential(nn.Linear(8, 8, bias=False)).to(torch.bfloat16)
    init_weights(rounded, rules, 0)
    assert torch.equal(model[0].weight.to(torch.bfloat16), rounded[0].weight)


def test_flops_of_a_token_by_hand() -> None:
    model = build()
    blocks = 4 * (4 * 64 * 64 + 3 * 64 * 176 + 2 * 64) + 64
    assert model.flops_per_token() == 6 * (blocks + VOCABULARY * 64) + 12 * 4 * 64 * SEQ_LEN
    assert build(tie_embeddings=True).flops_per_token() == model.flops_per_token()
