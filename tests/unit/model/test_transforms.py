"""The transforms of a run: every hook in the order of the phases, whatever the transforms are called."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titan_prores.build import build_components
from titan_prores.components.model.llama import Llama, LlamaConfig
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigErrors
from titan_prores.config.layout import plan_mesh
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section
from titan_prores.model.transforms import Transforms
from titan_prores.model.weight_init import ones
from titan_prores.protocols.batch import Batch
from titan_prores.protocols.model import InitRule
from titan_prores.protocols.transform import Capability, Phase, Transform, TransformContext

CALLS: list[tuple[str, str]] = []
# Every hook that the engine calls on a run's transforms, with what it is called with.
HOOKS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "apply": ((nn.Linear(1, 1), TransformContext(SimpleNamespace(degrees={}))), {}),
    "wrap_loss": ((lambda logits, labels: logits,), {}),
    "wrap_validation_loss": ((lambda logits, labels: logits,), {}),
    "init_rules": ((), {}),
    "parameter_groups": ((nn.Linear(1, 1),), {}),
    "on_materialize": ((nn.Linear(1, 1),), {}),
    "before_step": ((0,), {}),
    "prepare_batch": ((Batch(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1)),), {}),
    "before_microbatch": ((), {"last": True}),
    "computing": ((), {}),
    "after_backward": ((), {}),
    "after_step": ((1,), {}),
    "after_evaluation": ((), {}),
    "states": ((), {}),
    "load_states": (({}, 3), {}),
}
# Hooks of a transform behind them, in the order in which one of them calls these.
BEHIND = {
    "apply": ("apply", "verify", "init_rules", "describe"),
    "states": ("state",),
    "load_states": ("load_state", "after_load", "before_step"),
}


def noting(name: str, phase: Phase) -> Transform:
    """A transform that notes each of its hooks as it is called."""

    class Noting(Transform):
        Config = Section

        def apply(self, model: nn.Module, context: TransformContext) -> None:
            pass

        def __getattribute__(self, hook: str) -> Any:
            found = super().__getattribute__(hook)
            if not callable(found) or hook.startswith("__"):
                return found

            def noted(*args: Any, **kwargs: Any) -> Any:
                CALLS.append((hook, name))
                return found(*args, **kwargs)

            return noted

    Noting.phase = phase
    return Noting(Section())


# By name the last phase comes first.
NAMED = [("a", Phase.DATA_PARALLEL), ("b", Phase.COMPILE), ("c", Phase.REWRITE)]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_run_in_the_order_of_the_phases(hook: str) -> None:
    transforms = Transforms((name, noting(name, phase)) for name, phase in NAMED)
    args, kwargs = HOOKS[hook]
    CALLS.clear()
    found = getattr(transforms, hook)(*args, **kwargs)
    if hook == "computing":
        with found:
            pass
    expected = BEHIND.get(hook, (hook,))
    assert [(each, name) for name in "cba" for each in expected] == CALLS


def test_no_hook_of_the_container_is_left_out() -> None:
    own = {name for name in vars(Transforms) if not name.startswith("_")}
    assert own - {"before", "since"} == set(HOOKS)


def test_what_is_of_one_phase_stays_in_the_order_given() -> None:
    named = [("b", Phase.COMPILE), ("c", Phase.COMPILE), ("a", Phase.COMPILE), ("z", Phase.REWRITE)]
    transforms = Transforms((name, noting(name, phase)) for name, phase in named)
    assert [name for name, _ in transforms.named] == ["z", "b", "c", "a"]
    assert [name for name, _ in transforms.before(Phase.COMPILE).named] == ["z"]
    assert [name for name, _ in transforms.since(Phase.COMPILE).named] == ["b", "c", "a"]


def test_a_recipe_gives_them_in_that_order() -> None:
    tree = sources.load(
        None,
        [
            "--transforms.compile.enabled=true",
            "--transforms.prores.enabled=true",
            "--transforms.prores.residual_schedule.T=2",
            "--model.flavor=debug",
        ],
        registry.DEFAULTS,
    )
    recipe = resolve(tree)
    assert [spec.name for spec in recipe.sets["transforms"]] == ["compile", "prores"]
    built = build_components(recipe, plan_mesh(recipe.parallelism, 1))
    assert [name for name, _ in built.transforms.named] == ["prores", "tensor_parallel", "compile", "fsdp"]


def test_another_transform_is_known_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory budget needs a compiler that keeps to it, whatever that is called; the one called compile may not."""
    monkeypatch.setattr(registry, "_table", {kind: dict(named) for kind, named in registry._table.items()})

    @registry.register("transform", "another_compiler")
    class AnotherCompiler(Transform):
        class Config(Section): ...

        phase = Phase.COMPILE

        @classmethod
        def capabilities(cls, config: Section) -> list[Capability]:
            return [Capability.COMPILES_LAYERS, Capability.KEEPS_MEMORY_BUDGET]

        def apply(self, model: nn.Module, context: TransformContext) -> None:
            pass

    budget = ["--model.flavor=debug", "--transforms.activation_checkpoint.mode=memory_budget"]
    resolve(sources.load(None, [*budget, "--transforms.another_compiler.enabled=true"], registry.DEFAULTS))
    for others, said in (([], "needs the transform compile"), (["--transforms.compile.backend=eager"], "inductor")):
        with pytest.raises(ConfigErrors, match=said):
            resolve(sources.load(None, [*budget, *others], registry.DEFAULTS))


def test_rules_and_groups_of_all_come_together() -> None:
    class Adding(Transform):
        Config = Section
        phase = Phase.REWRITE

        def apply(self, model: nn.Module, context: TransformContext) -> None:
            pass

        def init_rules(self) -> list[InitRule]:
            return [InitRule("added", ones)]

        def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
            return [{"params": [], "lr": 1.0}]

    transforms = Transforms([("x", Adding(Section())), ("y", Adding(Section()))])
    assert len(transforms.init_rules()) == len(transforms.parameter_groups(nn.Linear(1, 1))) == 2


class WithPositions(Llama):
    """A Llama that adds to each embedding its position, where a batch has positions."""

    Config = LlamaConfig

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None = None) -> torch.Tensor:
        if positions_BS is None:
            return super().forward(tokens_BS)
        hook = self.tok_embeddings.register_forward_hook(lambda _, __, x_BSD: x_BSD + positions_BS[..., None])
        try:
            return super().forward(tokens_BS)
        finally:
            hook.remove()


class PackedPositions(Transform):
    """Counts positions from the last end of a document; 0 ends one."""

    Config = Section
    phase = Phase.REWRITE
    batch_extras = ("positions_BS",)

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        pass

    def prepare_batch(self, batch: Batch) -> Batch:
        index_S = torch.arange(batch.tokens_BS.shape[1])
        ends_BS = torch.where(batch.tokens_BS == 0, index_S + 1, 0).roll(1, 1)
        ends_BS[:, 0] = 0
        positions_BS = index_S - ends_BS.cummax(1).values
        return replace(batch, extras={**batch.extras, "positions_BS": positions_BS})


def packed(*overrides: str) -> Transforms:
    own = [f"--transforms.packed.name={__name__}:PackedPositions", "--model.flavor=debug", *overrides]
    recipe = resolve(sources.load(None, own, registry.DEFAULTS))
    return build_components(recipe, plan_mesh(recipe.parallelism, 1)).transforms


def test_a_transform_adds_to_every_batch_what_the_model_takes() -> None:
    tokens_BS = torch.tensor([[5, 6, 0, 7, 8], [0, 0, 1, 2, 3]])
    given = Batch(tokens_BS, tokens_BS, torch.arange(2), {"other": tokens_BS})
    batch = packed(f"--model.name={__name__}:WithPositions").prepare_batch(given).to(torch.device("cpu"))
    assert batch.extras["positions_BS"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]
    assert batch.extras["other"] is tokens_BS and batch.tokens_BS is tokens_BS
    with pytest.raises(
        ConfigErrors, match="adds positions_BS to every batch, which the forward of Llama does not take"
    ):
        packed()
