"""What the engine asks of each kind of component, and the settings it reads itself.

A component is a class with a nested `Config`; the engine calls it as `Component(config, **context)`, where the context
is what the `__init__` of its protocol lists. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from titan_prores.config import Section, setting
from titan_prores.contracts import optional
from titan_prores.paths import WritePath

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from titan_prores.init import InitRule
    from titan_prores.losses import LossTerms
    from titan_prores.mesh import Mesh
    from titan_prores.probing import Probing
    from titan_prores.run_folder import RunFolder


# --- Sections with keys that the engine reads ---------------------------------------------------------------------


class DatasetSection(Section):
    """Base of every dataset's Config."""

    validation_fraction: float = setting(
        0.01, "share of documents held out for validation, chosen by a hash of their text", ge=0, lt=1
    )
    cache_folder: WritePath = setting(
        "outputs/token_cache", "where token shards are kept between runs", on_resume="free"
    )
    shard_tokens: int = setting(
        100_000_000, "a token shard is closed once it holds this many", unit="tokens", on_resume="free", gt=0
    )
    verify: Literal["always", "sizes"] = setting(
        "always", "before training: read every token shard and compare its hash, or compare sizes", on_resume="free"
    )
    num_workers: int = setting(
        0, "processes that read samples ahead; the order does not depend on it", on_resume="free", ge=0
    )


class CheckpointSection(Section):
    """Base of every checkpoint component's Config."""

    enabled: bool = setting(True, "false = neither save nor resume")
    interval: int = setting(500, "save every so many steps, and after the last", unit="optimizer steps", gt=0)
    interval_minutes: float | None = setting(
        None, "save too whenever so long has passed since the last save; default never", unit="minutes", gt=0
    )

    def weights_from(self) -> str | None:
        """Where a fresh start takes its weights from, if not drawn."""
        return None

    def needs_validation(self) -> str | None:
        """The key that ranks checkpoints by validation loss, if set; refused where no checkpoint has one."""
        return None


class ValidatorSection(Section):
    """Base of every validator's Config."""

    enabled: bool = setting(True, "false = never validate")
    freq: int = setting(100, "validate every so many steps, and after the last", unit="optimizer steps", gt=0)


# Kind -> what the Config of its components stands on; an ordinary Section where it is not listed.
SECTIONS: dict[str, type[Section]] = {
    "dataset": DatasetSection,
    "checkpoint": CheckpointSection,
    "validator": ValidatorSection,
}


# --- Protocols ----------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """Text to token ids. Built from its config alone.

    A method `encode_long(chunks: Iterable[str]) -> Iterator[np.ndarray]` may give what `encode` does for the chunks put
    together, part by part; without it a long document is encoded as a whole, which takes memory for all its tokens.
    """

    n_vocab: int
    eot_id: int  # marks the end of a document

    def __init__(self, config: Section) -> None: ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, 1-d integer array, without an end-of-text mark. Special tokens in it are plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""

    def fingerprint(self) -> str:
        """A string that changes whenever encodings might; part of the token cache's key."""


class Dataset(Protocol):
    """A source of text. Its Config is a DatasetSection. Built from its config alone, cheaply: reads no document yet."""

    def __init__(self, config: DatasetSection) -> None: ...

    def documents(self) -> Iterator[str | Iterable[str]]:
        """Every document once, in an order that is the same each time.

        A document too long for memory is an iterable of its text in pieces, the same each time that it is iterated.
        """

    def fingerprint(self) -> str:
        """A string that changes whenever the documents might; part of the token cache's key."""

    @optional
    def sources(self) -> dict[str, str]:
        """Name of each part of the text, such as a file -> a string that changes whenever that part might.

        A checkpoint remembers them, so that a run that cannot resume is told which part changed.
        """


@dataclass(frozen=True)
class TensorParallelPlan:
    """How the layers of a model are split over the ranks of a tensor-parallel group.

    Between blocks each rank holds its part of the sequence. Every weight of the model belongs to a module of the plan.

    Attributes:
        modules: pattern of module names, * standing for one part of a dotted name -> how such a module is split:
            "vocabulary", an embedding, by rows; its output is split over the sequence;
            "sequence", a norm: whole weights, applied to a part of the sequence;
            "gather", a module whose first input is the whole sequence;
            "column" and "row", a linear inside of a gathered module, over its outputs or over its inputs; the sum of a
            row is split over the sequence again;
            "logits", the output projection, gathered, over the vocabulary.
        divisible: what the degree must divide, under the name that a message gives it.
        spread: what need not be divisible, but must leave every rank a share.
    """

    modules: Mapping[str, str]
    divisible: Mapping[str, int]
    spread: Mapping[str, int]


class Model(Protocol):
    """An nn.Module from tokens_BS (int64) to logits_BSV, built under the meta device.

    Every residual add in it is a `titan_prores.prores.ResidualAdd`.
    """

    layers: nn.ModuleList  # the blocks, shallowest first; each is sharded, compiled and warmed up as one

    def __init__(self, config: Section, *, vocab_size: int, seq_len: int) -> None: ...

    def init_rules(self) -> Sequence[InitRule]:
        """Ordered (pattern, distribution) rules; the first whose pattern matches a parameter's name draws it."""

    def fill_buffers(self) -> None:
        """Compute every buffer, persistent ones too: allocating the model's storage has lost them."""

    def flops_per_token(self) -> int:
        """Floating point operations of forward and backward for one token of a seq_len sequence."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape [batch, sequence, vocabulary], of token ids, shape [batch, sequence]."""

    @optional
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """How the model is split by tensor parallelism, where it can be."""


class Loss(Protocol):
    """What training descends, called as loss(logits_BSV, labels_BS). Validation measures the plain cross-entropy.

    It returns the cross-entropy, a scalar: the fp32 sum over labels that are not -100. One that descends more, such as
    label smoothing or a z-loss, returns `titan_prores.losses.LossTerms`: the cross-entropy, and its other terms by
    name. The rows show each under its name; a scalar that is not the cross-entropy has no perplexity there.

    Under tensor parallelism logits are a DTensor split over the vocabulary, and torch's loss_parallel is on; scalars
    are plain tensors in any case.
    """

    def __init__(self, config: Section) -> None: ...

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | LossTerms: ...


class Optimizer(Protocol):
    """Makes a torch optimizer whose groups' `lr` is the peak; the engine multiplies it by the schedule's factor."""

    def __init__(self, config: Section) -> None: ...

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer with one group or more; frozen parameters are not given to it.

        Raises:
            ConfigError: a pattern matches no parameter name.
        """


class LRScheduler(Protocol):
    """Learning rate as a pure function of the number of completed updates."""

    def __init__(self, config: Section, *, total_steps: int) -> None:
        """Raises ConfigError where the settings do not fit the length of the run."""

    def factor(self, step: int) -> float:
        """Share of the peak learning rate for the update after `step` completed ones, 0 <= step < total_steps."""


class ResidualSchedule(Protocol):
    """alpha(l, t) of Progressive Residual Warmup, a pure function of the number of completed updates.

    One that does more derives from a class of `titan_prores.prores` as well, with `alpha` as its `__call__`:
    `LearnedSchedule`, whose alpha is trained, and which has the peak learning rate of its logits as `lr`; or
    `AdaptiveSchedule`, which watches the layers, and whose alpha depends on what it was told, its `state()`, too.
    """

    def __init__(self, config: Section, *, n_layers: int) -> None: ...

    def alpha(self, step: int) -> np.ndarray:
        """Shape [n_layers], float64; entry l-1 belongs to layer l (1 = shallowest). `step` >= 0."""

    @optional
    def describe(self) -> str:
        """One line that --check and the log show instead of the settings."""


class Checkpointer(Protocol):
    """Saves and loads runs. Its Config is a CheckpointSection. All methods are collective over the mesh."""

    def __init__(self, config: CheckpointSection, *, run: RunFolder, mesh: Mesh) -> None: ...

    def choose(self) -> tuple[int | None, str]:
        """Step to resume at, or None for a fresh start, and one line that says why; the same on all ranks.

        Raises:
            ConfigError: what the recipe asks for cannot be had, or would start over existing checkpoints.
        """

    def last_good(self) -> int | None:
        """Step of this run's newest whole checkpoint with finite numbers, or None; the same on all ranks."""

    def read_meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as meta."""

    @optional
    def initial_meta(self) -> dict[str, Any]:
        """At a fresh start: the meta of the checkpoint that `initialize` will take weights from; empty without one.

        Raises:
            ConfigError: that checkpoint is not there or damaged.
        """

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill model and optimizer in place, whatever they held."""

    def initialize(self, model: nn.Module) -> None:
        """At a fresh start, with the weights drawn: take others where the recipe says so. Raises ConfigError."""

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
        """Publish a checkpoint whole, at once or while training goes on, and note it in the run folder.

        `meta` is JSON-ready; the step and whether the numbers are `finite` are in it, and the `validation_loss` where
        that very step was validated.
        """

    def before_update(self) -> None:
        """Called before every optimizer step, which changes weights: wait for what still reads them.

        Raises:
            RuntimeError: a save that went on beside training has failed.
        """

    def finish(self) -> None:
        """Wait for a save that goes on beside training. Raises RuntimeError where it failed."""


class Validator(Protocol):
    """Measures the model on held-out text. Its Config is a ValidatorSection."""

    def __init__(self, config: ValidatorSection) -> None: ...

    def validate(
        self, model: nn.Module, loss: Loss, data: Any, mesh: Mesh, batch_size: int, stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Collective. `data` is the held-out `titan_prores.data.TokenWindows`. Returns the keys of a metrics row.

        All ranks may ask `stopping()` before each batch: where it is true, for all of them, the run is to end, and None
        is the answer. A validator that does not ask is waited for.
        """


class Metric:
    """Base of metrics components, whose hooks do nothing unless overridden. Config: any Section.

    A sink overrides `write`, a probe `measure`, or `derive` where a row says all that it needs. Sinks only work on
    rank 0; probes may be collective.
    """

    def __init__(self, config: Section) -> None:
        self.config = config

    def prepare(self, run: RunFolder, info: Mapping[str, Any], probing: Probing) -> None:
        """All ranks, before `start`, and again where a run goes back to a checkpoint.

        `info`: total_steps (of the schedules), end_step (last of this run), start_step (completed ones), n_layers,
        log_freq, recipe (the resolved one, nested tables) and recipe_toml (its text, each value with where it came
        from). `probing` runs the model on held-out text; `measure` may use it.

        Raises:
            ConfigError: what the probe needs is not there.
        """

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        """Rank 0, before the first step. `info`: as for `prepare`."""

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        """All ranks, each step, between the backward passes and clipping; what it returns joins the row of `step`.

        Its keys must be its own.
        """
        return {}

    def derive(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Rank 0, each step, once the row is whole; what it returns joins the row. Its keys must be its own."""
        return {}

    def write(self, row: Mapping[str, Any]) -> None:
        """Rank 0, one row a step; a validation row has `validation = true` and what the validator measured."""

    def sync(self) -> None:
        """Rank 0, before a checkpoint: rows so far are to outlast a power failure, as the checkpoint does."""

    def close(self) -> None:
        """Rank 0, at the end of a run however it ends."""
