"""Rewriting a model for ProRes and moving its alpha."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves

from titan_prores.prores.alpha import AlphaVector
from titan_prores.prores.learned import AlphaLogits
from titan_prores.prores.placement import local
from titan_prores.prores.residual import ResidualAdd, ScaledResidualAdd
from titan_prores.prores.schedule import ResidualSchedule, as_schedule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALPHA_NAME = "prores_alpha"
SCHEDULE_NAME = "prores_schedule"


class AlphaMovedError(RuntimeError):
    """alpha was about to change between a forward pass and its backward pass."""


class GradientLeftError(RuntimeError):
    """What an update's passes have left for `ProRes.after_backward` was not taken."""


class _Graph:
    """Lives as long as the autograd graph of one forward pass."""


class ProRes:
    """Progressive Residual Warmup of a model: replaces its residual adds and sets their alpha.

    Every `ResidualAdd` inside a layer becomes a `ScaledResidualAdd` of the same name; parameters, state-dict keys and,
    at alpha = 1, every computed bit stay what they were. alpha is 1 until `set_step` is first called.

    Args:
        model: changed in place. Rewrite it before it is compiled, sharded or wrapped.
        schedule: such as `Schedule("linear", L, T=1000)`; or a function step -> alpha of every layer, shape [L]. With a
            trained one, such as `LearnedSchedule`, the model gets a parameter `prores_schedule.logits`; one that
            watches the layers, such as `AdaptiveSchedule`, measures them by hooks. Both need `after_backward`.
        layers: the blocks, shallowest first; `model.layers` when not given. All adds of one block share its alpha.
        mesh: device mesh of the run, for alpha as a replicated DTensor, and to sum over what each rank has seen of a
            trained schedule's gradient or of what one observes.

    A deep copy of the model, such as an average of weights, keeps the alpha of its moment until
    `copy.prores_alpha.set` moves it.

    Raises:
        ValueError: a layer without a ResidualAdd, one outside the layers, of a class of its own or with hooks, a model
            rewritten before, or a schedule for another number of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: ResidualSchedule | Callable[[int], np.ndarray],
        *,
        layers: Iterable[nn.Module] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        layers = list(model.layers if layers is None else layers)
        if ALPHA_NAME in dict(model.named_children()):
            raise ValueError("this model's residual adds are scaled already")
        self.schedule = as_schedule(schedule)
        if (n_layers := len(self.schedule.alpha(0))) != len(layers):
            raise ValueError(f"the schedule is for {n_layers} layers, the model has {len(layers)}")
        self.step: int | None = None
        adds = _replace_adds(model, layers)
        self.n_adds = sum(map(len, adds))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        initial = self.schedule.initial_logits()
        self.trained = None if initial is None else AlphaLogits(self.schedule, initial, device, mesh)
        self.alpha = AlphaVector(adds, device, mesh, trained=self.trained is not None)
        model.add_module(ALPHA_NAME, self.alpha)
        if self.trained is not None:
            model.add_module(SCHEDULE_NAME, self.trained)
        self._unfinished: weakref.WeakSet[_Graph] = weakref.WeakSet()
        # On the layers too: a model's output may be an object without tensors, or the model may never be called.
        for module in (model, *layers):
            module.register_forward_hook(self._after_forward)
        self._measuring = False  # whether the update that `set_step` began is one to be observed
        if self.schedule.watches_layers:
            for number, layer in enumerate(layers):
                layer.register_forward_hook(partial(self._measure, number))

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
            GradientLeftError: `after_backward` was not called.
            ValueError: the schedule gave a value that is not finite.
        """
        if len(self._unfinished):
            raise AlphaMovedError(
                f"set_step({step}) between a forward pass and its backward pass: set alpha once per optimizer update, "
                "before its first forward pass (run evaluation under torch.no_grad)"
            )
        if self.alpha.has_gradient or (self._measuring and any(self._seen)):
            raise GradientLeftError(
                f"set_step({step}) before after_backward(), which a learned or adaptive schedule needs after the last "
                "backward pass of each update"
            )
        if self.trained is not None:
            with torch.no_grad():
                self.alpha.set(self.schedule.alpha_of(self.trained.local))
        else:
            values = np.asarray(self.schedule.alpha(step))
            if not np.isfinite(values).all():
                raise ValueError(f"the schedule gives alpha = {values.tolist()} at step {step}")
            self.alpha.set(values)
        self.step = step
        self._measuring = self.schedule.measures(step)
        if self._measuring:
            n_layers = len(self.alpha.adds)
            # Of each layer: how far it turned the vectors of tokens, summed up, and their number.
            self._turned = torch.zeros(2, n_layers, dtype=torch.float64, device=self.alpha.tensor.device)
            self._seen = [False] * n_layers

    @torch.no_grad()
    def after_backward(self) -> None:
        """Hand a trained schedule its gradient, or one that observes what it has seen; nothing for any other.

        Call it after the last backward pass of every update, before the optimizer. The loss must be scaled so that
        gradients are summed over ranks. Collective over the mesh, where there is one.

        Raises:
            RuntimeError: there is nothing to observe, as no layer was seen to run: it was compiled with its hooks.
        """
        if self.trained is not None:
            self.trained.set_gradient(self.alpha.take_gradient().to(self.trained.local.device))
        if self._measuring:
            self._measuring = False
            if not all(self._seen):
                raise RuntimeError(
                    "layers ran unseen, or not at all: an adaptive schedule measures them by hooks, so compile "
                    "layer.forward and not the layer"
                )
            turned, tokens = self.alpha.sum_over_mesh(self._turned).cpu().numpy()
            self.schedule.observe(self.step, turned / tokens)

    def _measure(self, number: int, layer: nn.Module, args: Any, output: Any) -> None:
        """Add how far a layer turned the stream in a training pass to the sums of this update."""
        if torch.compiler.is_compiling() or not self._measuring or not torch.is_grad_enabled():
            return
        given, put_out = (
            next((t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)), None) for tree in (args, output)
        )
        if given is None or put_out is None or given is put_out or given.shape != put_out.shape:
            raise RuntimeError(
                f"layer {number + 1}: an adaptive schedule compares a layer's first positional argument with its first "
                "output, which must be two tensors of one shape"
            )
        given, put_out = local(given), local(put_out)
        dtype = torch.promote_types(put_out.dtype, torch.float32)
        turned = (normalize(put_out.to(dtype), dim=-1) - normalize(given.to(dtype), dim=-1)).norm(dim=-1)
        self._turned[0, number] += turned.sum(dtype=torch.float64)
        self._turned[1, number] += turned.numel()
        self._seen[number] = True

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
        [
            (parent, name, child)
            for parent in layer.modules()
            for name, child in parent._modules.items()
            if isinstance(child, ResidualAdd)
        ]
        for layer in layers
    ]
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
