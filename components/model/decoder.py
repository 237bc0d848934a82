"""The decoder that model families share: a family says what its attention and its feed-forward are.

Shape suffixes: B batch, S sequence, D dim, H query heads, K key-value heads, E head_dim, F ffn_dim, V vocabulary.
Weights have the names and layouts of transformers' LlamaForCausalLM up to renaming: rotary positions pair the two
halves of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import ValidationInfo, field_validator, model_validator
from torch import nn

from titan_prores import ConfigError, InitRule, Section, TensorParallelPlan, constant, nearest, one_of, setting
from titan_prores.components.model.norm_schemes import NORM_SCHEMES, Placement
from titan_prores.components.model.weight_inits import WEIGHT_INITS, ModelShape
from titan_prores.prores import ResidualAdd

# What a shape is called that a recipe has made of a flavor by giving other numbers.
CUSTOM = "custom"


def _choices(intro: str, summaries: Mapping[str, str]) -> str:
    """Help of a key whose values live in a table: a line for each."""
    width = max(map(len, summaries))
    return "\n".join([intro, *(f"        {name:<{width}}  {summary}" for name, summary in summaries.items())])


class DecoderConfig(Section):
    """Shape of a decoder.

    `flavor` fills dim, ffn_dim, n_heads and n_layers where they are not given, `norm` init where it has one of its own.
    Where a given number is not the flavor's, the flavor is "custom" from then on.
    """

    # Name -> dim, ffn_dim, n_heads, n_layers. A family of its own sets them, "debug" among them.
    flavors: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "debug": {"dim": 64, "ffn_dim": 176, "n_heads": 4, "n_layers": 4}
    }

    flavor: str = setting("debug", f"named shape; {CUSTOM} = every number is given", on_resume="free")
    dim: int = setting(help="width of the residual stream", gt=0)
    n_layers: int = setting(help="number of blocks", gt=0, le=10_000)
    n_heads: int = setting(help="number of query heads", gt=0, le=10_000)
    n_kv_heads: int | None = setting(
        None, "number of key-value heads for grouped-query attention; default n_heads", gt=0
    )
    ffn_dim: int = setting(help="hidden width of the feed-forward", gt=0)
    vocab_size: int | None = setting(
        None, "number of rows of the embedding; default the tokenizer's vocabulary size", gt=0
    )
    norm: str = setting(
        "pre",
        _choices(
            "norm placement in layer l of L; F is attention, then feed-forward; a is alpha of ProRes, 1 without it",
            {name: scheme.summary for name, scheme in NORM_SCHEMES.items()},
        ),
    )
    norm_eps: float = setting(1e-5, "epsilon of RMSNorm", gt=0)
    rope_theta: float = setting(10000.0, "base of the rotary frequencies", gt=0)
    tie_embeddings: bool = setting(False, "share the embedding's weight with the output projection")
    init: str = setting(
        "trunc_normal",
        _choices(
            "weight initialization, with std = init_std; default the norm scheme's own, if it has one",
            {name: init.summary for name, init in WEIGHT_INITS.items()},
        ),
    )
    init_std: float = setting(0.02, "standard deviation of the weights", gt=0)

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        flavor = given.get("flavor", "debug")
        flavors = {**cls.flavors, CUSTOM: {}}
        if not isinstance(flavor, str) or flavor not in flavors:
            raise ConfigError(
                "flavor", "unknown flavor", value=flavor, allowed=list(flavors), nearest=nearest(str(flavor), flavors)
            )
        preset = {key: (value, f"flavor {flavor}") for key, value in flavors[flavor].items()}
        norm = given.get("norm")
        scheme = NORM_SCHEMES.get(norm) if isinstance(norm, str) else None
        if scheme is not None and scheme.init is not None:
            preset["init"] = (scheme.init, f"norm {norm}")
        return preset

    @model_validator(mode="before")
    @classmethod
    def _custom_where_numbers_differ(cls, values: dict[str, Any]) -> dict[str, Any]:
        shape = cls.flavors.get(str(values.get("flavor", "debug")), {})
        changed = [key for key, value in shape.items() if values.get(key, value) != value]
        return {**values, "flavor": CUSTOM} if changed else values

    @field_validator("norm")
    @classmethod
    def _known_norm(cls, value: str, info: ValidationInfo) -> str:
        return _deep_enough(value, NORM_SCHEMES[one_of(value, NORM_SCHEMES)].min_layers, info)

    @field_validator("init")
    @classmethod
    def _known_init(cls, value: str, info: ValidationInfo) -> str:
        return _deep_enough(value, WEIGHT_INITS[one_of(value, WEIGHT_INITS)].min_layers, info)

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderConfig:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            near = [n for n in range(1, 2 * self.n_heads + 1) if self.dim % (2 * n) == 0]
            hint = f"n_heads can be {', '.join(map(str, near))}" if near else "dim must be even"
            raise ValueError(f"dim {self.dim} / n_heads {self.n_heads} must be an even integer ({hint})")
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            fitting = [n for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads} "
                f"(n_kv_heads can be one of {', '.join(map(str, fitting))})"
            )
        return self


def _deep_enough(name: str, min_layers: int, info: ValidationInfo) -> str:
    """`name` if the model has the layers that it is defined for; n_layers is not there where it is itself at fault."""
    if (n_layers := info.data.get("n_layers", min_layers)) < min_layers:
        raise ValueError(f"is defined for n_layers of {min_layers} and more, not {n_layers}")
    return name


class Rotary(nn.Module):
    """Tables of cos and sin, fp32, [S, E/2]; not in the state dict."""

    def __init__(self, head_dim: int, seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.seq_len, self.theta = head_dim, seq_len, theta
        self.register_buffer("cos_SE", torch.empty(seq_len, head_dim // 2), persistent=False)
        self.register_buffer("sin_SE", torch.empty(seq_len, head_dim // 2), persistent=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Compute the tables on the buffers' device."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        angles_SE = torch.outer(torch.arange(self.seq_len, dtype=torch.float32), frequencies)
        self.cos_SE.copy_(angles_SE.cos())
        self.sin_SE.copy_(angles_SE.sin())

    def forward(self, x_BSHE: torch.Tensor) -> torch.Tensor:
        """Rotate by position, in fp32, returned in the input's dtype."""
        length = x_BSHE.shape[1]
        cos, sin = self.cos_SE[:length, None, :], self.sin_SE[:length, None, :]
        first, second = x_BSHE.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.type_as(x_BSHE)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    TENSOR_PARALLEL: ClassVar = {"wq": "column", "wk": "column", "wv": "column", "wo": "row"}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        n_kv_heads = config.n_kv_heads or config.n_heads
        self.grouped = n_kv_heads != config.n_heads
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        # -1 for the number of heads: a rank of a tensor-parallel group has only its own.
        q_BSHE = rotary(self.wq(x_BSD).unflatten(-1, (-1, self.head_dim)))
        k_BSKE = rotary(self.wk(x_BSD).unflatten(-1, (-1, self.head_dim)))
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        out_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.wo(out_BHSE.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) (arXiv 2002.05202)."""

    TENSOR_PARALLEL: ClassVar = {"w1": "column", "w3": "column", "w2": "row"}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class ScaledRMSNorm(nn.RMSNorm):
    """RMSNorm with a constant factor, kept as a tensor: a float that differs by layer costs a graph a layer.

    In eager bf16 the multiplication rounds the factor to bf16.
    """

    def __init__(self, dim: int, eps: float, scale: float) -> None:
        super().__init__(dim, eps)
        self.scale = scale
        self.register_buffer("factor", torch.empty(()), persistent=False)

    def fill(self) -> None:
        """Put the constant into the buffer."""
        self.factor.fill_(self.scale)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BSD) * self.factor


class Block(nn.Module):
    """Attention and feed-forward, each as out_norm(c * x + a * b * res_norm(f(s * in_norm(x))))."""

    def __init__(
        self, config: DecoderConfig, placement: Placement, attention: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        for branch in ("attention", "ffn"):
            self.add_module(f"{branch}_norm", _norm(placement.in_norm, config, placement.in_norm_scale))
            self.add_module(f"{branch}_post_norm", _norm(placement.res_norm, config))
            self.add_module(f"{branch}_add", ResidualAdd(placement.skip_scale, placement.branch_scale))
            self.add_module(f"{branch}_out_norm", _norm(placement.out_norm, config))

    def forward(self, x_BSD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        branch_BSD = self.attention_post_norm(self.attention(self.attention_norm(x_BSD), rotary))
        x_BSD = self.attention_out_norm(self.attention_add(x_BSD, branch_BSD))
        branch_BSD = self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_BSD)))
        return self.ffn_out_norm(self.ffn_add(x_BSD, branch_BSD))


class TiedOutput(nn.Module):
    """Output projection with the embedding's weight, which a shared Parameter would not survive meta to_empty()."""

    def forward(self, x_BSD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BSD, weight_VD)


def _norm(present: bool, config: DecoderConfig, scale: float | None = None) -> nn.Module:
    if not present:
        return nn.Identity()
    if scale is not None:
        return ScaledRMSNorm(config.dim, config.norm_eps, scale)
    return nn.RMSNorm(config.dim, config.norm_eps)


class Decoder(nn.Module):
    """Rotary positions, RMSNorm, norm placement and init by name; attention and feed-forward are a family's own.

    Attributes:
        attention: the class of every block's attention: built as attention(config), called as (x_BSD, rotary).
        feed_forward: likewise, called as (x_BSD). Both say in TENSOR_PARALLEL how their linears are split (see
            `TensorParallelPlan`), and call the linear that is added to the stream wo and w2, as weight inits expect.
    """

    Config = DecoderConfig
    attention: ClassVar[type[nn.Module]] = Attention
    feed_forward: ClassVar[type[nn.Module]] = FeedForward

    def __init__(self, config: DecoderConfig, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        if config.vocab_size is not None and config.vocab_size < vocab_size:
            raise ConfigError("vocab_size", f"the tokenizer has {vocab_size} ids", value=config.vocab_size)
        self.config = config
        self.vocab_size = config.vocab_size or vocab_size
        self.seq_len = seq_len
        scheme = NORM_SCHEMES[config.norm]
        self.tok_embeddings = nn.Embedding(self.vocab_size, config.dim)
        self.rotary = Rotary(config.dim // config.n_heads, seq_len, config.rope_theta)
        self.embedding_norm = _norm(scheme.embedding_norm, config)
        self.placements = [scheme.placement(layer, config.n_layers) for layer in range(1, config.n_layers + 1)]
        self.layers = nn.ModuleList(
            Block(config, placement, self.attention(config), self.feed_forward(config)) for placement in self.placements
        )
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = TiedOutput() if config.tie_embeddings else nn.Linear(config.dim, self.vocab_size, bias=False)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S], int64, to logits [B, S, V] in the dtype of the computation."""
        x_BSD = self.embedding_norm(self.tok_embeddings(tokens_BS))
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.rotary)
        x_BSD = self.norm(x_BSD)
        return self.output(x_BSD, self.tok_embeddings.weight) if self.config.tie_embeddings else self.output(x_BSD)

    def init_rules(self) -> list[InitRule]:
        starts = [
            InitRule(f"layers.{index}.{branch}_norm.weight", constant(placement.in_norm_start))
            for index, placement in enumerate(self.placements)
            for branch in ("attention", "ffn")
            if placement.in_norm_start != 1.0
        ]
        shape = ModelShape(self.config.dim, self.config.n_layers, self.vocab_size, self.seq_len)
        return starts + WEIGHT_INITS[self.config.init].rules(shape, self.config.init_std)

    def fill_buffers(self) -> None:
        for module in self.modules():
            if isinstance(module, (Rotary, ScaledRMSNorm)):
                module.fill()

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        config = self.config
        block = {}
        for layer in self.layers:
            # A scheme may give each layer other norms; one that is not there is an Identity.
            block |= {name: "sequence" for name, module in layer.named_children() if isinstance(module, nn.RMSNorm)}
        for name, kind in (("attention", self.attention), ("feed_forward", self.feed_forward)):
            block |= {name: "gather", **{f"{name}.{linear}": word for linear, word in kind.TENSOR_PARALLEL.items()}}
        return TensorParallelPlan(
            modules={
                "tok_embeddings": "vocabulary",
                **({"embedding_norm": "sequence"} if isinstance(self.embedding_norm, nn.RMSNorm) else {}),
                **{f"layers.*.{name}": word for name, word in block.items()},
                "norm": "sequence",
                # The tied weight is split already, so its product is too.
                "output": "gather" if config.tie_embeddings else "logits",
            },
            divisible={
                "model.n_heads": config.n_heads,
                "model.n_kv_heads": config.n_kv_heads or config.n_heads,
                "model.ffn_dim": config.ffn_dim,
                "training.seq_len": self.seq_len,
            },
            spread={"the vocabulary of": self.vocab_size},
        )

    def flops_per_token(self) -> int:
        """6 a matmul weight, and 12 * L * dim * S for attention, as PaLM counts (arXiv 2204.02311, appendix B)."""
        weights = sum(p.numel() for p in self.parameters())
        if not self.config.tie_embeddings:
            weights -= self.tok_embeddings.weight.numel()  # a lookup, no matmul
        return 6 * weights + 12 * self.config.n_layers * self.config.dim * self.seq_len
