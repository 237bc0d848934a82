"""torch.compile of each layer and of the loss, and a watch on what it compiles."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from pydantic import field_validator, model_validator
from torch import nn
from torch._functorch import config as functorch_config

from titan_prores import (
    Capability,
    ConfigError,
    Loss,
    Phase,
    Section,
    Transform,
    TransformContext,
    counted,
    logger,
    one_of,
    register,
    setting,
)

# Updates in which graphs are expected: some are compiled only for what the first left behind.
WARMUP_UPDATES = 2
# Backends that torch lists whatever is installed: CUDA graphs would let layers that share code overwrite each other's
# outputs, the others are for packages that are not torch's.
NOT_OURS = ("cudagraphs", "openxla", "tvm")
# What makes torch.compile do nothing.
SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


@register("transform", "compile")
class Compile(Transform):
    """torch.compile of each layer, all of them sharing one graph, and of the loss."""

    class Config(Section):
        backend: str = setting("inductor", "backend of torch.compile: inductor, or eager and aot_eager for debugging")
        # The modes with CUDA graphs are left out: layers that share code would overwrite each other's outputs.
        mode: Literal["default", "max-autotune-no-cudagraphs"] = setting(
            "default", "max-autotune-no-cudagraphs tries kernels for speed; its runs are not bitwise repeatable"
        )
        fullgraph: bool = setting(True, "raise an error on a graph break; false warns")
        loss: bool = setting(True, "compile the loss too")

        @field_validator("backend")
        @classmethod
        def _known_backend(cls, value: str) -> str:
            known = ["inductor", "eager", "aot_eager", *torch.compiler.list_backends()]
            return one_of(value, [name for name in dict.fromkeys(known) if name not in NOT_OURS])

        @model_validator(mode="after")
        def _mode_fits(self) -> Compile.Config:
            if self.mode != "default" and self.backend != "inductor":
                raise ValueError(f"mode {self.mode} is one of backend inductor, not of {self.backend}")
            return self

    phase = Phase.COMPILE

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options = {"backend": config.backend, "fullgraph": config.fullgraph}
        if config.mode != "default":
            self.options["mode"] = config.mode
        self.updates = 0
        self.updating = False
        self.vocabulary_is_split = False
        self.start = self.seen = _Seen()

    @classmethod
    def capabilities(cls, config: Config) -> Collection[Capability]:
        return [Capability.COMPILES_LAYERS] + [Capability.KEEPS_MEMORY_BUDGET] * (config.backend == "inductor")

    def check(self, model: nn.Module, degrees: Mapping[str, int]) -> None:
        for name in SWITCHES:
            if os.environ.get(name) == "1":
                raise ConfigError("", f"the environment has {name}=1, with which torch.compile does nothing")

    def apply(self, model: nn.Module, context: TransformContext) -> None:
        self.vocabulary_is_split = context.mesh.degrees.get("tp", 1) > 1
        self.layers = list(model.layers)
        self.before = [layer.forward for layer in self.layers]
        for layer in self.layers:
            # forward and not the module: torch.compile(layer) puts _orig_mod into the names of weights, and
            # layer.compile() leaves no place between FSDP's hooks and the compiled code for checkpointing.
            layer.forward = torch.compile(layer.forward, **self.options)

    def verify(self, model: nn.Module, context: TransformContext) -> None:
        left = sum(layer.forward == before for layer, before in zip(self.layers, self.before, strict=True))
        if left or not self.layers:
            raise RuntimeError(f"torch.compile left {left or 'all'} layers as they were")

    def wrap_loss(self, loss: Loss) -> Loss:
        if not self.config.loss:
            return loss
        compiled = torch.compile(_function(loss), **self.options)
        return _uncached(compiled) if self.vocabulary_is_split else compiled

    def wrap_validation_loss(self, loss: Loss) -> Loss:
        return self.wrap_loss(loss)

    def describe(self) -> str:
        config = self.config
        settings = [f"mode {config.mode}"] * (config.mode != "default") + ["fullgraph"] * config.fullgraph
        what = f"{counted(len(self.layers), 'layer')}{' and the loss' if config.loss else ''} by {config.backend}"
        return ", ".join([what, *settings])

    def activations_note(self) -> str:
        return "compiled code keeps less" if self.config.backend == "inductor" else ""

    # --- What was compiled, and when ------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        self.seen, self.updating = _Seen(), True

    def after_step(self, step: int) -> None:
        self.updates += 1
        self.updating = False
        breaks = self.seen.new_breaks()
        if breaks:
            logger.warning("compile: graph break in step %d: %s", step, "; ".join(breaks))
        if self.updates > WARMUP_UPDATES and self.seen.new_graphs():
            reasons = "; ".join(self.seen.new_reasons()) or "torch gives no reason"
            logger.warning("compile: compiled again in step %d: %s", step, reasons)
        elif self.updates == WARMUP_UPDATES:
            say = logger.info if self.start.new_graphs() else logger.warning  # none: torch runs all of it uncompiled
            say("compile: %s after %d steps", counted(self.start.new_graphs(), "graph"), WARMUP_UPDATES)
        self.seen = _Seen()

    def after_evaluation(self) -> None:
        # Without gradients a layer is another graph. More of them at a later evaluation is worth a line as well. What a
        # probe runs in the middle of an update is not compiled, and what the update has compiled is not for it.
        if not self.updating and self.seen.new_graphs():
            logger.info("compile: %s for validation", counted(self.seen.new_graphs(), "more graph"))

    def row(self, step: int, *, detailed: bool) -> dict[str, Any]:
        return {"compiled_graphs": self.start.new_graphs()} if detailed else {}


def _function(loss: Loss) -> Callable[..., torch.Tensor]:
    """The loss as code that dynamo can start from: functions, partials and modules have no such `__call__`."""
    if inspect.ismethod(loss.__call__) and not isinstance(loss, nn.Module):
        return loss.__call__

    def call(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(logits, labels)

    return call


def _uncached(compiled: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compiled code that torch 2.13's cache of whole graphs is kept from, which all ranks of a host share.

    It knows a split tensor by its whole size: where the shares of a vocabulary differ, such as 129 and 128 of 257 ids,
    a rank would be given the code of another one. The cache below it, of what inductor makes, knows better.
    """

    def uncached(*args: torch.Tensor) -> torch.Tensor:
        with functorch_config.patch(enable_autograd_cache=False):
            return compiled(*args)

    return uncached


def graphs() -> int:
    """Graphs that this process has compiled so far, whatever asked for it."""
    return _counters()["stats"]["unique_graphs"]


def _counters() -> dict[str, dict[str, int]]:
    from torch._dynamo.utils import counters  # takes half a second to load, for nothing in a run that compiles nothing

    return counters


class _Seen:
    """State of torch's counters when it was made, to tell what came after."""

    def __init__(self) -> None:
        self.graphs, self.breaks, self.time_us = graphs(), dict(_counters()["graph_break"]), time.time_ns() // 1000

    def new_graphs(self) -> int:
        return graphs() - self.graphs

    def new_breaks(self) -> list[str]:
        """Why graphs broke, a line each."""
        found = _counters()["graph_break"]
        return [_line(reason) for reason, count in found.items() if count > self.breaks.get(reason, 0)]

    def new_reasons(self) -> list[str]:
        """Which guards made torch compile something again, a line each."""
        from torch._dynamo.utils import get_compilation_metrics

        # The newest 64 or so; an entry for each compilation, of forward or backward.
        found = [
            f"{c.co_name}: {_line(c.recompile_reason)}"
            for c in get_compilation_metrics()
            if c.recompile_reason and (c.start_time_us or 0) >= self.time_us
        ]
        return list(dict.fromkeys(found))


def _line(text: str) -> str:
    """Several lines of torch's as one that fits a log."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
