"""The table of kinds of components. A new kind is one entry here, and a contract class."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

from titan_prores.config.sections import Section


@dataclass(frozen=True)
class Kind:
    """A kind of component.

    Attributes:
        summary: one line for `--list-components`.
        contract: "module:Class" that every component of this kind is held to when its name is registered or looked up:
            methods, how they are called, attributes. What its `__init__` annotates `config` with is what the Config of
            a component derives from. A string, since the contract of a transform needs torch.
        section: the recipe section that configures components of this kind; None where other components have them.
        many: whether the section has a table for each component, which `enabled = false` switches off.
        on_resume: whether its settings must be the `same` when a run resumes, unless a setting says otherwise.
    """

    summary: str
    contract: str
    section: str | None
    many: bool = False
    on_resume: Literal["same", "free"] = "free"

    def contract_class(self) -> type:
        """The class that `contract` names, imported now."""
        module, _, name = self.contract.partition(":")
        return getattr(importlib.import_module(module), name)

    def base_section(self) -> type[Section]:
        """What the Config of every component of this kind derives from."""
        contract = self.contract_class()
        annotation = contract.__init__.__annotations__["config"]
        return vars(importlib.import_module(contract.__module__))[annotation]


_PROTOCOLS = "titan_prores.protocols"

KINDS: dict[str, Kind] = {
    "model": Kind("network from token ids to logits", f"{_PROTOCOLS}.model:Model", "model", on_resume="same"),
    "tokenizer": Kind("text to token ids", f"{_PROTOCOLS}.tokenizer:Tokenizer", "tokenizer", on_resume="same"),
    "dataset": Kind("source of text documents", f"{_PROTOCOLS}.dataset:Dataset", "dataset", on_resume="same"),
    "loss": Kind("summed training loss of logits against labels", f"{_PROTOCOLS}.loss:Loss", "loss", on_resume="same"),
    "optimizer": Kind("torch.optim.Optimizer over named parameters", f"{_PROTOCOLS}.optimizer:Optimizer", "optimizer"),
    "lr_scheduler": Kind(
        "learning rate as a pure function of the step", f"{_PROTOCOLS}.lr_scheduler:LRScheduler", "lr_scheduler"
    ),
    "residual_schedule": Kind(
        "alpha(layer, step) of Progressive Residual Warmup",
        f"{_PROTOCOLS}.residual_schedule:ResidualSchedule",
        None,
        on_resume="same",
    ),
    "transform": Kind(
        "change of the model, applied in the order of its phase",
        f"{_PROTOCOLS}.transform:Transform",
        "transforms",
        many=True,
    ),
    "parallelism": Kind(
        "transform that spreads the model over axes of the device mesh",
        f"{_PROTOCOLS}.transform:Parallelism",
        "parallelism",
        many=True,
    ),
    "checkpoint": Kind("saves and loads the state of a run", f"{_PROTOCOLS}.checkpoint:Checkpointer", "checkpoint"),
    "metrics": Kind("measures a run, or shows its rows", f"{_PROTOCOLS}.metric:Metric", "metrics", many=True),
    "validator": Kind("measures the model on held-out text", f"{_PROTOCOLS}.validator:Validator", "validation"),
}

# Section -> kind of the one component that it configures, and of those whose tables it has.
SLOTS: dict[str, str] = {kind.section: name for name, kind in KINDS.items() if kind.section and not kind.many}
SETS: dict[str, str] = {kind.section: name for name, kind in KINDS.items() if kind.section and kind.many}
