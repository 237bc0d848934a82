"""torch.compile of layers and loss: the same numbers, one graph for all layers, and a watch that speaks up."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.unit.model.transformed import N_LAYERS, SEQ_LEN, VOCABULARY, T, Transformed, assert_same_bits, transform
from titan_prores.components.transform.compile import SWITCHES, graphs
from titan_prores.config import sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import Resolver
from titan_prores.prores import ResidualAdd

NORMS = ["pre", "post", "sandwich"]
WARMUP = range(T * N_LAYERS + 2)  # from alpha = 0 everywhere to 1 everywhere


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Code of earlier tests is forgotten: graphs are counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(*others, norm: str = "pre", n_layers: int = N_LAYERS, model: nn.Module | None = None, **settings):
    settings = {"backend": "eager", **settings}
    return Transformed(*others, transform("compile", **settings), norm=norm, n_layers=n_layers, model=model)


def evaluate(run: Transformed) -> None:
    run.model.eval()
    with torch.no_grad():
        run.forward()
    run.model.train()
    for each in run.transforms:
        each.after_evaluation()


@pytest.mark.parametrize("norm", NORMS)
def test_all_layers_share_one_graph_over_a_whole_warmup(norm: str, logged: list[str]) -> None:
    """alpha touches 0 and 1. Validation runs without gradients, which is another graph, once."""
    run, plain = compiled(norm=norm), Transformed(norm=norm)
    counted = []
    for step in WARMUP:
        assert_same_bits(run, plain, step)
        counted.append(graphs())
        if step == 5:
            evaluate(run)
    assert counted[:6] == [2] * 6  # a layer and the loss
    assert set(counted[6:]) == {4}
    assert logged == ["compile: 2 graphs after 2 steps", "compile: 2 more graphs for validation"]
    assert list(run.transforms)[-1].row(1, detailed=True) == {"compiled_graphs": 4}
    alpha = run.model.prores_alpha.values
    assert (alpha == 1).all()


def test_more_layers_are_no_more_graphs() -> None:
    compiled(n_layers=12, loss=False).gradients(5)
    assert graphs() == 1


@pytest.mark.parametrize("mode", ["full", "selective", "every_k"])
def test_graphs_under_activation_checkpointing(mode: str) -> None:
    """Computing a layer again meets the graph that is there; with every_k layers of both sorts share it."""
    run = compiled(transform("activation_checkpoint", mode=mode), loss=False, backend="aot_eager")
    for step in range(4):
        run.gradients(step)
    assert graphs() == 1


def test_names_stay_and_what_is_compiled_is_said() -> None:
    plain, run = Transformed(), compiled()
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    assert [n for n, _ in run.model.named_modules()] == [n for n, _ in plain.model.named_modules()]
    assert run.lines[1].endswith("4 layers and the loss by eager, fullgraph")
    assert compiled(loss=False, fullgraph=False).lines[1].endswith("4 layers by eager")


def test_the_loss_is_compiled_only_where_asked() -> None:
    plain = Transformed().loss
    compiling = transform("compile", loss=False)
    assert compiling.wrap_loss(plain) is plain
    assert transform("compile").wrap_loss(plain) is not plain


class Doubling(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * self.loss(logits, labels)

    def method(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.forward(logits, labels)


def doubled(loss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 2 * loss(logits, labels)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: lambda logits, labels: 2 * loss(logits, labels),
        lambda loss: functools.partial(doubled, loss),
        Doubling,
        lambda loss: Doubling(loss).method,
    ],
    ids=["function", "partial", "module", "method"],
)
def test_whatever_can_be_called_as_a_loss_is_compiled(wrap) -> None:
    """Another transform's wrap_loss may have made it. In one graph: fullgraph is on."""
    plain, before = Transformed(), graphs()
    loss = transform("compile", backend="eager").wrap_loss(wrap(plain.loss))
    logits = torch.randn(2, SEQ_LEN, VOCABULARY, requires_grad=True)
    found = loss(logits, plain.tokens)
    found.backward()
    assert graphs() == before + 1 and logits.grad.norm() > 0
    assert torch.equal(found, 2 * plain.loss(logits, plain.tokens))


def test_a_recompile_after_the_second_step_is_a_warning_with_the_reason(logged: list[str]) -> None:
    run = compiled(loss=False)
    for step in range(4):
        run.gradients(step)
    assert not [m for m in logged if m.startswith("warning: ")]
    run.tokens = run.tokens[:, : SEQ_LEN // 2]
    run.gradients(4)
    run.gradients(5)
    (warning,) = [m for m in logged if m.startswith("warning: ")]
    assert re.match(r"warning: compile: compiled again in step 5: forward: .*size mismatch.*", warning), warning


class BrokenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(8, 8), ResidualAdd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.linear(x)
        torch._dynamo.graph_break("a hole in the road")
        return self.add(x, branch.tanh())


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, 8), nn.ModuleList(BrokenBlock() for _ in range(2))
        self.output = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def test_a_graph_break_is_a_warning_with_the_reason_or_an_error(logged: list[str]) -> None:
    compiled(model=Broken(), fullgraph=False).gradients(0)
    (warning,) = [m for m in logged if m.startswith("warning: ")]
    assert warning.startswith("warning: compile: graph break in step 1: ") and "a hole in the road" in warning
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a hole in the road"):
        compiled(model=Broken()).gradients(0)


def test_compiling_that_is_switched_off_in_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(ConfigError, match="left 4 layers as they were"):
        compiled()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "inducto"}, "did you mean inductor?"),
        ({"backend": "cudagraphs"}, "inductor, eager, aot_eager"),
        ({"backend": "tvm"}, "inductor, eager, aot_eager"),
        ({"mode": "max-autotune"}, "max-autotune-no-cudagraphs"),
        (
            {"backend": "aot_eager", "mode": "max-autotune-no-cudagraphs"},
            "is one of backend inductor, not of aot_eager",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], said: str) -> None:
    resolver = Resolver(sources.Tree())
    spec = resolver.component("transform", {"name": "compile", **settings}, ("transforms", "compile"))
    assert spec is None and said in " ".join(map(str, resolver.errors))


# --- With the code that inductor makes ----------------------------------------------------------------------------


def largest_difference(ours: Transformed, theirs: Transformed, step: int) -> float:
    """Of gradients by name, relative to the norm of each; fails on losses that differ and on unexpected zeros."""
    (loss, gradients), (expected_loss, expected) = ours.gradients(step), theirs.gradients(step)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert all(bool(g.norm() == 0) == bool(gradients[name].norm() == 0) for name, g in expected.items())
    return max(float((gradients[name] - g).norm() / g.norm()) for name, g in expected.items() if g.norm() > 0)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_eager_and_inductor_agree(norm: str) -> None:
    run, plain = compiled(norm=norm, backend="inductor"), Transformed(norm=norm)
    for step in WARMUP:
        assert largest_difference(run, plain, step) < 1e-5
    assert graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "sandwich"])  # a sandwich has all that pre has
def test_checkpointing_of_compiled_layers(norm: str) -> None:
    """Full checkpointing runs the same code twice: no bit changes. The others are other code, up to rounding."""
    settings = {
        "full": {"mode": "full"},
        "every_k": {"mode": "every_k"},
        "selective": {"mode": "selective"},
        "memory_budget": {"mode": "memory_budget", "memory_budget": 0.0},
    }
    plain = compiled(norm=norm, backend="inductor")
    kept = {"none": bytes_kept(plain)}
    for mode, chosen in settings.items():
        torch._dynamo.reset()
        run = compiled(transform("activation_checkpoint", **chosen), norm=norm, backend="inductor")
        kept[mode] = bytes_kept(run)
        for step in (0, 2, 5, 100):
            if mode in ("full", "every_k"):
                assert_same_bits(run, plain, step)
            else:
                assert largest_difference(run, plain, step) < 1e-5
    assert kept["none"] > kept["selective"] > kept["full"] > 0, kept
    assert kept["none"] > kept["every_k"] > kept["full"] and kept["none"] > kept["memory_budget"], kept


def bytes_kept(run: Transformed) -> int:
    """Of tensors saved for backward, parameters left out, storages counted once."""
    parameters = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.forward()
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("name", SWITCHES)
def test_environment_that_switches_it_off_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    transform("compile").check(None, {})
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"the environment has {name}=1"):
        transform("compile").check(None, {})
