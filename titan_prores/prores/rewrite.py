"""Rewriting a model for ProRes and moving its alpha."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from titan_prores.prores.alpha import AlphaVector
from titan_prores.prores.residual import ResidualAdd, ScaledResidualAdd

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALPHA_NAME = "prores_alpha"


class AlphaMovedError(RuntimeError):
    """alpha was about to change between a forward pass and its backward pass."""


class _Graph:
    """Lives as long as the autograd graph of one forward pass."""


class ProRes:
    """Progressive Residual Warmup of a model: replaces its residual adds and sets their alpha.

    Every `ResidualAdd` inside a layer becomes a `ScaledResidualAdd` of the same name; parameters, state-dict keys and,
    at alpha = 1, every computed bit stay what they were. alpha is 1 until `set_step` is first called.

    Args:
        model: changed in place. Rewrite it before it is compiled, sharded or wrapped.
        schedule: step -> alpha of every layer, shape [L], such as `Schedule("linear", L, T=1000)`.
        layers: the blocks, shallowest first; `model.layers` when not given. All adds of one block share its alpha.
        mesh: device mesh of the run, for alpha as a replicated DTensor.

    A deep copy of the model, such as an average of weights, keeps the alpha of its moment until
    `copy.prores_alpha.set` moves it.

    Raises:
        ValueError: a layer without a ResidualAdd, one outside the layers, of a class of its own or with hooks, a model
            rewritten before, or a schedule for another number of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Callable[[int], np.ndarray],
        *,
        layers: Iterable[nn.Module] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        layers = list(model.layers if layers is None else layers)
        if hasattr(model, ALPHA_NAME):
            raise ValueError("this model's residual adds are scaled already")
        if len(schedule(0)) != len(layers):
            raise ValueError(f"the schedule is for {len(schedule(0))} layers, the model has {len(layers)}")
        self.schedule = schedule
        self.step: int | None = None
        adds = _replace_adds(model, layers)
        self.n_adds = sum(map(len, adds))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.alpha = AlphaVector(adds, device, mesh)
        model.add_module(ALPHA_NAME, self.alpha)
        self._unfinished: weakref.WeakSet[_Graph] = weakref.WeakSet()
        # On the layers too: a model's output may be an object that no tensor is found in, or nobody may call the model.
        for module in (model, *layers):
            module.register_forward_hook(self._after_forward)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unfinished": None}  # graphs cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _unfinished=weakref.WeakSet())

    def set_step(self, step: int) -> None:
        """Set alpha for the update after `step` completed ones. Call it before the first forward pass of an update.

        Raises:
            AlphaMovedError: a forward pass still waits for its backward pass. Its gradient would mix two alphas:
                silently wrong wherever activations are recomputed. Only a model compiled as a whole escapes this check;
                autograd's own then sees the change unless activations are recomputed.
            ValueError: the schedule gave a value that is not finite.
        """
        if len(self._unfinished):
            raise AlphaMovedError(
                f"set_step({step}) between a forward pass and its backward pass: set alpha once per optimizer update, "
                "before its first forward pass (run evaluation under torch.no_grad)"
            )
        values = np.asarray(self.schedule(step))
        if not np.isfinite(values).all():
            raise ValueError(f"the schedule gives alpha = {values.tolist()} at step {step}")
        self.alpha.set(values)
        self.step = step

    @property
    def values(self) -> np.ndarray:
        """alpha in use, shape [L], fp32."""
        return self.alpha.values

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a backward pass is due, until it has run or its graph was thrown away."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        if not tensors:
            return
        graph = _Graph()
        unfinished = self._unfinished
        unfinished.add(graph)
        reference = weakref.ref(graph)

        def backward_begins(gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(backward_ends)

        def backward_ends() -> None:
            if (finished := reference()) is not None:
                unfinished.discard(finished)

        for tensor in tensors:
            # The node's metadata keeps `graph` alive exactly as long as autograd keeps the node.
            tensor.grad_fn.metadata["prores_graph"] = graph
            tensor.register_hook(backward_begins)


def _replace_adds(model: nn.Module, layers: list[nn.Module]) -> list[list[ScaledResidualAdd]]:
    """Swap the adds in place; returns the new ones per layer."""
    expected = {id(m): (m, name) for name, m in model.named_modules() if isinstance(m, ResidualAdd)}
    found = [
        # named_children() would show a module that stands in two places once.
        [(parent, name, child) for parent in layer.modules() for name, child in parent._modules.items()
         if isinstance(child, ResidualAdd)]
        for layer in layers
    ]  # fmt: skip
    empty = [number for number, sites in enumerate(found, 1) if not sites]
    if empty or not layers:
        which = f"layer {empty[0]} of {len(layers)}" if empty else "the model"
        raise ValueError(f"{which} has no ResidualAdd; write `x + f(x)` as `self.add(x, f(x))` with a ResidualAdd")
    inside = [id(child) for sites in found for _, _, child in sites]
    if len(set(inside)) != len(inside):
        raise ValueError("one ResidualAdd is used in two places; each place needs its own")
    special = [name for m, name in expected.values() if type(m) is not ResidualAdd or m._forward_hooks]
    if special:
        raise ValueError(
            f"{special[0]} does more than a ResidualAdd (a class of its own, or hooks), which would be lost"
        )
    outside = [name for identity, (_, name) in expected.items() if identity not in set(inside)]
    if outside:
        raise ValueError(f"{', '.join(outside)}: a ResidualAdd outside the layers has no alpha")
    adds = []
    for sites in found:
        adds.append([])
        for parent, name, child in sites:
            scaled = ScaledResidualAdd(child.skip_scale, child.branch_scale)
            setattr(parent, name, scaled)
            adds[-1].append(scaled)
    return adds
