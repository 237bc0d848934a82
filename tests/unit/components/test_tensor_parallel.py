"""Plans of tensor parallelism: what is refused before ranks meet, and that no weight or pattern is left over."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_prores import build, vocab_parallel_cross_entropy
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.components.model.norm_schemes import NORM_SCHEMES
from titan_prores.components.parallelism.fsdp import FullyShardedDataParallel
from titan_prores.components.parallelism.tensor_parallel import TensorParallel
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section
from titan_prores.distributed import mesh as mesh_module
from titan_prores.dry_run.report import report
from titan_prores.model.transforms import Transforms
from titan_prores.protocols.transform import Capability, TransformContext

REPOSITORY = Path(__file__).parents[3]


def llama(vocab_size: int = 257, seq_len: int = 64, **settings) -> Llama:
    shape = {"dim": 64, "ffn_dim": 176, "n_heads": 4, "n_layers": 2}
    with torch.device("meta"):
        return Llama(LlamaConfig(**{**shape, **settings}), vocab_size=vocab_size, seq_len=seq_len)


def parallel(model: nn.Module, degree: int, **settings) -> TensorParallel:
    """Checked as a run would, but not applied."""
    transform = TensorParallel(TensorParallel.Config(**settings))
    degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": degree}
    transform.prepare(model, degrees)
    transform.check(model, degrees)
    return transform


def apply(model: nn.Module, degree: int = 2) -> list[str]:
    """Checked, applied and verified by the engine, on a fake process group."""
    transform = parallel(model, degree)
    mesh = mesh_module.start_fake({"dp_replicate": 1, "dp_shard": 1, "tp": degree})
    try:
        return Transforms([("tensor_parallel", transform)]).apply(model, TransformContext(mesh))
    finally:
        mesh_module.stop()


@pytest.mark.parametrize(
    ("degree", "model", "said"),
    [
        (3, {}, ["does not divide model.n_heads 4, model.n_kv_heads 4, model.ffn_dim 176", "(allowed: 1, 2, 4)"]),
        (8, {}, ["does not divide model.n_heads 4, model.n_kv_heads 4: it", "(allowed: 1, 2, 4)"]),
        (4, {"n_kv_heads": 2}, ["does not divide model.n_kv_heads 2: it", "(allowed: 1, 2)"]),
        (4, {"ffn_dim": 174}, ["does not divide model.ffn_dim 174: it", "(allowed: 1, 2)"]),
        (4, {"seq_len": 66}, ["does not divide training.seq_len 66: it", "(allowed: 1, 2)"]),
        (2, {"n_heads": 1}, ["model.n_heads 1, model.n_kv_heads 1: it", "(allowed: 1)"]),
        # 5 rows in shares of 2 are 2, 2, 1 and nothing.
        (4, {"vocab_size": 5}, ["leaves a rank nothing of the vocabulary of 5: it", "(allowed: 1, 2)"]),
        (8, {"vocab_size": 5}, ["does not divide model.n_heads 4", "; leaves a rank nothing of the vocabulary"]),
    ],
)
def test_degrees_that_do_not_fit(degree, model, said):
    with pytest.raises(ConfigError) as caught:
        parallel(llama(**model), degree)
    message = str(caught.value).replace(" (allowed", ": it (allowed")
    assert message.startswith(f"parallelism.tensor_parallel_degree = {degree}: ")
    for part in said:
        assert part in message


def test_degrees_that_fit():
    for degree in (1, 2, 4):
        parallel(llama(), degree)
    parallel(llama(vocab_size=7), 4)  # 2, 2, 2, 1


def test_async_is_refused_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^parallelism\.tensor_parallel\.async_tp = true: needs CUDA"):
        parallel(llama(), 2, async_tp=True)


def test_async_is_refused_where_it_would_do_nothing():
    with pytest.raises(ConfigError, match=r"async_tp = true: needs parallelism\.tensor_parallel_degree of more than 1"):
        parallel(llama(), 1, async_tp=True)
    with pytest.raises(ConfigError, match="async_tp = true: needs the transform compile"):
        TensorParallel.check_combination(TensorParallel.Config(async_tp=True), [Capability.GATHERS_WEIGHTS])
    TensorParallel.check_combination(TensorParallel.Config(async_tp=True), [Capability.COMPILES_LAYERS])


def test_bias_of_a_row_is_not_split():
    model = llama()
    with torch.device("meta"):
        model.layers[0].attention.wo = nn.Linear(64, 64)
    apply(model)
    assert model.layers[0].attention.wo.weight.placements == (Shard(1),)
    assert model.layers[0].attention.wo.bias.placements == (Replicate(),)


def test_a_plan_of_another_type_is_refused(monkeypatch):
    model = llama()
    monkeypatch.setattr(model, "tensor_parallel_plan", lambda: {"modules": {}})
    with pytest.raises(ConfigError, match=r"tensor_parallel_plan\(\) returns a dict .*TensorParallelPlan"):
        parallel(model, 2)


def test_a_plan_that_does_not_add_up_is_refused_by_check(monkeypatch, capfd):
    """Columns outside of a gathered module: every weight is placed, and the sizes do not meet."""
    plan = Llama.tensor_parallel_plan

    def without_gather(self):
        whole = plan(self)
        return dataclasses.replace(
            whole, modules={k: v for k, v in whole.modules.items() if k != "layers.*.feed_forward"}
        )

    monkeypatch.setattr(Llama, "tensor_parallel_plan", without_gather)
    tree = sources.load(
        REPOSITORY / "train_configs/debug.toml", ["--parallelism.tensor_parallel_degree=2"], registry.DEFAULTS
    )
    with pytest.raises(ConfigError, match="does not run as its tensor-parallel plan splits it"):
        report(resolve(tree, 2), 2)
    assert "Traceback" not in capfd.readouterr().err


def test_a_model_without_a_plan():
    parallel(nn.Linear(2, 2), 1)
    with pytest.raises(ConfigError, match=r"Linear has no tensor_parallel_plan.*\(allowed: 1\)"):
        parallel(nn.Linear(2, 2), 2)


@pytest.mark.parametrize("norm", NORM_SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_placed(norm, tied):
    model = llama(norm=norm, tie_embeddings=tied, n_layers=4)
    (line,) = apply(model)
    assert line.startswith("tensor_parallel: 2 ranks")
    placed = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert placed.keys() == dict(model.named_parameters()).keys()
    for name, placements in placed.items():
        row = name.endswith(("wo.weight", "w2.weight"))
        assert placements == ((Replicate() if "norm" in name else Shard(1 if row else 0)),), name


def apply_with_fsdp(model: nn.Module, shards: int) -> None:
    fsdp = FullyShardedDataParallel(FullyShardedDataParallel.Config())
    mesh = mesh_module.start_fake({"dp_replicate": 1, "dp_shard": shards, "tp": 2})
    try:
        Transforms([("fsdp", fsdp), ("tensor_parallel", parallel(model, 2))]).apply(model, TransformContext(mesh))
    finally:
        mesh_module.stop()


def test_fsdp_splits_what_is_uneven_by_columns():
    model = llama()
    apply_with_fsdp(model, 4)
    rows_of_rows = {name: isinstance(p.placements[0], _StridedShard) for name, p in model.named_parameters()}
    assert model.tok_embeddings.weight.placements == model.output.weight.placements == (Shard(1), Shard(0))
    assert not rows_of_rows["tok_embeddings.weight"] and rows_of_rows["layers.0.attention.wq.weight"]
    even = llama(vocab_size=256)
    apply_with_fsdp(even, 4)
    assert isinstance(even.output.weight.placements[0], _StridedShard)
    with pytest.raises(ConfigError, match=r"shard_degree = 3: does not divide the 64 columns of tok_emb"):
        apply_with_fsdp(llama(), 3)


def test_degree_1_changes_nothing():
    model = llama()
    assert apply(model, 1) == []
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("norm", "change", "said"),
    [
        ("pre", {"norm": None}, "leaves out: norm.weight"),
        ("sandwich", {"layers.*.attention_post_norm": None}, r"leaves out: layers\.0\.attention_post_norm\.weight"),
        ("pre", {"layers.*.attention.wq": None}, r"leaves out: layers\.0\.attention\.wq"),
        ("pre", {"layers.*.w1": "column"}, r"layers\.\*\.w1 .* matches no module"),
        ("pre", {"*.feed_forward": "gather"}, r"\*\.feed_forward .* matches no module"),
        ("pre", {"layers.*.attention_post_norm": "sequence"}, r"no module that .* has a weight"),
        ("pre", {"norm": "gather"}, "leaves out: norm.weight"),
        ("pre", {"norm": "colunm"}, "has colunm for norm"),
    ],
)
def test_plans_with_a_fault(norm, change, said, monkeypatch):
    model = llama(norm=norm)
    plan = model.tensor_parallel_plan()
    modules = {pattern: word for pattern, word in {**plan.modules, **change}.items() if word}
    monkeypatch.setattr(model, "tensor_parallel_plan", lambda: dataclasses.replace(plan, modules=modules))
    with pytest.raises(ConfigError, match=said):
        apply(model)


class Smoothed:
    """What torch's loss_parallel cannot do."""

    Config = Section

    def __init__(self, config: Section) -> None:
        pass

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


class Split(Smoothed):
    """Its value is left on the mesh."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Gathering(Smoothed):
    """torch gathers logits for its logsumexp; they are right."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = torch.logsumexp(logits, -1).square().sum()
        return value.to_local() if isinstance(value, DTensor) else value


class Offered(Smoothed):
    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1)


class LooksAtValues(Smoothed):
    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits, labels) * (1.0 if labels.sum().item() else 2.0)


def check_loss_of(name: str, degree: int) -> None:
    """As the engine does before a run and in --check."""
    tree = sources.load(
        REPOSITORY / "train_configs/debug.toml",
        [f"--parallelism.tensor_parallel_degree={degree}", f"--loss.name={__name__}:{name}"],
        registry.DEFAULTS,
    )
    recipe, degrees = resolve(tree, degree), {"dp_replicate": 1, "dp_shard": 1, "tp": degree}
    components = build.build_components(recipe, degrees)
    mesh = mesh_module.start_fake(degrees)
    try:
        build.transform_model(recipe, components, mesh)
        build.check_loss(recipe, components, mesh)
    finally:
        mesh_module.stop()


@pytest.mark.parametrize(("name", "said"), [("Smoothed", "masked_fill"), ("Split", "it returns a DTensor")])
def test_a_loss_that_cannot_run_on_a_split_vocabulary_is_refused(name, said):
    check_loss_of(name, 1)
    with pytest.raises(ConfigError, match=rf"^loss: \S+:{name} does not run .*\.vocab_parallel_cross_entropy.*{said}"):
        check_loss_of(name, 2)


@pytest.mark.parametrize("name", ["Offered", "LooksAtValues", "Gathering"])
def test_a_loss_that_gathers_logits_is_told(name, logged):
    check_loss_of(name, 2)
    assert ("gathers the logits of the whole vocabulary" in " ".join(logged)) == (name == "Gathering")


def test_a_module_that_cannot_be_split_is_named():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(64, 64))

    model = llama()
    with torch.device("meta"):
        model.layers[1].attention.wq = Other()
    with pytest.raises(ConfigError, match=r'degree = 2: layers\.1\.attention\.wq is a Other, .* split as "column"'):
        apply(model)
