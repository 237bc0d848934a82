"""Activation checkpointing: what is kept, what is computed again, and that nothing else changes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.model.transformed import MESH, N_LAYERS, Transformed, assert_same_bits, transform
from titan_prores.components.transform import activation_checkpoint
from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.resolve import resolve
from titan_prores.prores import AlphaMovedError
from titan_prores.protocols.transform import Phase, TransformContext

MODES = {"full": {"mode": "full"}, "selective": {"mode": "selective"}, "every_k": {"mode": "every_k", "every_k": 2}}
MM, FLASH = torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def checkpointed(norm: str = "pre", /, **settings) -> Transformed:
    return Transformed(transform("activation_checkpoint", **settings), norm=norm)


class Watch(TorchDispatchMode):
    """Counts operations, and the bytes of what they made that is still there.

    Hooks on saved tensors would miss what selective checkpointing keeps, which it keeps by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func] += 1
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in inputs:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes_alive(self) -> int:
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired())


def watched(run: Transformed) -> tuple[int, Counter]:
    """Bytes that forward keeps, and the operations of forward and backward."""
    with Watch() as watch:
        loss = run.forward()
        kept = watch.bytes_alive()
        loss.backward()
    return kept, watch.ops


def test_what_is_kept_and_what_is_computed_again() -> None:
    none, plain = watched(Transformed())
    found = {mode: watched(checkpointed(**settings)) for mode, settings in MODES.items()}
    kept = {mode: size for mode, (size, _) in found.items()}
    assert none > kept["selective"] > kept["full"] > 0
    assert none > kept["every_k"] > kept["full"]
    # Nothing outside of the layers is recomputed, so with every second layer half of the difference is left.
    assert kept["every_k"] == pytest.approx((none + kept["full"]) / 2, rel=0.02)

    again = {mode: Counter({op: ops[op] - plain[op] for op in (MM, FLASH)}) for mode, (_, ops) in found.items()}
    # All seven matmuls of a layer: the last one too, since the scaled add after it keeps alpha for its gradient.
    assert again["full"] == {MM: 7 * N_LAYERS, FLASH: N_LAYERS}
    assert again["selective"] == {MM: 0, FLASH: 0}
    assert again["every_k"] == {MM: 7 * N_LAYERS // 2, FLASH: N_LAYERS // 2}


def test_what_is_saved_can_be_chosen() -> None:
    _, plain = watched(Transformed())
    kept, ops = watched(checkpointed(mode="selective", save=["attention"]))
    assert (ops[MM] - plain[MM], ops[FLASH] - plain[FLASH]) == (7 * N_LAYERS, 0)
    assert kept < watched(checkpointed(mode="selective"))[0]


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
def test_gradients_are_bitwise_those_without(norm: str) -> None:
    plain = Transformed(norm=norm)
    for settings in MODES.values():
        run = checkpointed(norm, **settings)
        for step in (0, 2, 5, 100):  # alpha = 0, two in between, 1
            assert_same_bits(run, plain, step)


@pytest.mark.parametrize("mode", MODES)
def test_names_and_modules_stay(mode: str) -> None:
    plain, run = Transformed(), Transformed()
    layers = list(run.model.layers)
    activation = transform("activation_checkpoint", **MODES[mode])
    activation.apply(run.model, TransformContext(MESH))
    activation.verify(run.model, TransformContext(MESH))
    assert all(now is before for now, before in zip(run.model.layers, layers, strict=True))
    for names in ("named_modules", "named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(run.model, names)()] == [n for n, _ in getattr(plain.model, names)()]
    assert list(run.model.state_dict()) == list(plain.model.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_alpha_cannot_move_before_the_backward_pass(mode: str) -> None:
    """Checkpointed layers read alpha again: without the guard their gradient would be wrong and nobody would know."""
    run, plain = checkpointed("sandwich", **MODES[mode]), Transformed(norm="sandwich")
    for each in run.transforms:
        each.before_step(5)
    loss = run.forward()
    with pytest.raises(AlphaMovedError, match="set_step\\(6\\)"):
        for each in run.transforms:
            each.before_step(6)
    loss.backward()
    assert_same_bits(run, plain, 6)


def test_evaluation_keeps_nothing() -> None:
    for settings in MODES.values():
        run = checkpointed(**settings)
        with torch.no_grad(), Watch() as watch:
            loss = run.forward()
        assert watch.bytes_alive() == loss.nbytes


def test_the_phase_depends_on_the_mode() -> None:
    phases = {mode: transform("activation_checkpoint", **settings).phase for mode, settings in MODES.items()}
    assert phases["selective"] == Phase.CHECKPOINT_INSIDE < Phase.COMPILE
    assert phases["full"] == phases["every_k"] == Phase.CHECKPOINT_OUTSIDE > Phase.COMPILE
    assert transform("activation_checkpoint", mode="memory_budget").phase == Phase.CHECKPOINT_OUTSIDE


def test_describe() -> None:
    lines = {mode: checkpointed(**settings).lines for mode, settings in MODES.items()}
    assert "full, 4 of 4 layers" in lines["full"][1]
    assert "4 of 4 layers, keeping results of matmul, attention, communication" in lines["selective"][1]
    assert "2 of 4 layers" in lines["every_k"][1]


def recipe(*overrides: str):
    root = Path(__file__).parents[3]
    defaults = registry.DEFAULTS
    return resolve(sources.load(root / "train_configs" / "debug.toml", overrides, defaults))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=memory_budget"], ".mode = 'memory_budget': needs the transform compile"),
        (["mode=memory_budget", "compile.enabled=false"], "needs the transform compile"),
        (["mode=memory_budget", "compile.backend=aot_eager"], "needs transforms.compile.backend = inductor"),
        (["mode=ful"], "did you mean full?"),
        (["save=['matmull']"], "did you mean matmul?"),
        (["save=[]"], "at least 1"),
        (["every_k=0"], "every_k = 0"),
        (["memory_budget=1.5"], "memory_budget = 1.5"),
    ],
)
def test_what_cannot_work_is_refused_with_the_recipe(overrides: list[str], said: str) -> None:
    keys = [o if o.startswith("compile") else f"activation_checkpoint.{o}" for o in overrides]
    with pytest.raises(ConfigErrors, match=re.escape(said)):
        recipe(*(f"--transforms.{key}" for key in keys))


def test_memory_budget_with_compile_is_accepted() -> None:
    recipe("--transforms.activation_checkpoint.mode=memory_budget", "--transforms.compile.enabled=true")


def test_every_k_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 4 layers"):
        checkpointed(mode="every_k", every_k=5)


def test_memory_budget_under_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a flag of torch; where that is missing the recipe is refused."""
    context = TransformContext(SimpleNamespace(degrees={"tp": 2}))
    activation = transform("activation_checkpoint", mode="memory_budget")
    assert activation._compiler_settings(context) == {
        "activation_memory_budget": 0.5,
        "unsafe_treat_script_objects_as_zero_size": True,
    }
    monkeypatch.setattr(activation_checkpoint, "functorch_config", SimpleNamespace())
    with pytest.raises(ConfigError, match="tensor parallelism"):
        activation._compiler_settings(context)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "full", "save": ["matmul"]}, "save is a setting of mode = selective, and mode is full"),
        ({"every_k": 3}, "every_k is a setting of mode = every_k, and mode is selective"),
        ({"mode": "full", "memory_budget": 0.3}, "memory_budget is a setting of mode = memory_budget"),
    ],
)
def test_settings_of_another_mode_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        activation_checkpoint.ActivationCheckpoint.Config(
            **{k: tuple(v) if k == "save" else v for k, v in settings.items()}
        )


def test_what_is_saved_is_named_once() -> None:
    config = activation_checkpoint.ActivationCheckpoint.Config(save=("matmul", "attention", "matmul"))
    assert config.save == ("matmul", "attention")
