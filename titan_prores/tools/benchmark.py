"""Measure ratios of step times, memory, graphs and start-up, side by side in one process. See --help."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan_prores.config.errors import ConfigError, nearest
from titan_prores.output import tables
from titan_prores.output.shell import environment_of_children, run_command

if TYPE_CHECKING:
    from titan_prores.config.engine_sections import Training
    from titan_prores.data import TokenStream, TokenWindows
    from titan_prores.protocols.batch import Batch
    from titan_prores.tools.measure import Bench, Comparison, Interval

CONFIG = Path(__file__).parents[1] / "train_configs" / "benchmark.toml"
MARK = "benchmark"

ON: list[str] = []
OFF = ["--transforms.prores.enabled=false"]
COMPILED = ["--transforms.compile.enabled=true"]
# More than 100M parameters, and steps short enough for several beside a save.
LARGE = ["--model.flavor=130M", "--model.vocab_size=32000", "--training.local_batch_size=1", "--training.seq_len=64"]
QUIET_STEPS = 3
PURE_BF16 = ["--training.dtype=bfloat16", "--parallelism.fsdp.enabled=false"]

# Forward and backward in tokens/s, medians of two interleaved rounds, measured once on this kind of machine (2 threads)
# at the size of train_configs/benchmark.toml. They belong to no run of this script: context, not a comparison.
RECORDED = {
    "eager": "torchtitan v0.2.2's llama3 2080, ProRes reference code 2580",
    "compiled": "torchtitan v0.2.2's llama3 2740, ProRes reference code 2880",
}


@dataclass
class Row:
    """A line of the result.

    Attributes:
        measured: what, in words.
        result: the figure, in words.
        same: the A/A interval beside a ratio.
        goal: in words.
        verdict: what may be claimed of the goal.
        note: what else the reader should know.
        ratio: the figure as numbers, where it is a ratio.
    """

    measured: str
    result: str
    same: str = ""
    goal: str = ""
    verdict: str = ""
    note: str = ""
    ratio: Interval | None = None


@dataclass
class Setup:
    """What all parts share.

    Attributes:
        config: the recipe that is measured.
        overrides: of it, for all parts alike.
        pairs: steps of each variant that count.
        folder: run folders go there.
        speeds: tokens/s of training seen so far.
        seconds: part -> variant -> times of its steps.
    """

    config: Path
    overrides: list[str]
    pairs: int
    folder: Path
    speeds: list[float] = field(default_factory=list)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    built: int = 0

    def run_folder(self) -> Path:
        self.built += 1
        return self.folder / f"run-{self.built}"

    def bench(self, own: Sequence[str]) -> Bench:
        """A run of the recipe with overrides of its own."""
        from titan_prores.tools.measure import Bench, load

        return Bench(load(self.config, [*self.overrides, *own, f"--job.dump_folder={self.run_folder()}"]))

    def fewer(self) -> int:
        """Pairs for what has no goal, and needs less precision."""
        return max(12, self.pairs // 3)

    def compare(self, name: str, reference: list[str], variants: dict[str, list[str]], pairs: int = 0) -> Comparison:
        from titan_prores.tools.measure import compare

        found = compare(self.bench, reference, variants, pairs or self.pairs)
        self.seconds[name] = dict(found.seconds)
        self.speeds += found.tokens_per_second.values()
        return found


def ratio_row(found: Comparison, variant: str, measured: str, limit: float | None = None, note: str = "") -> Row:
    """A ratio of times with its A/A beside it, judged where there is a limit."""
    from titan_prores.tools.measure import verdict

    ratio, speed = found.ratios[variant], found.tokens_per_second
    row = Row(measured, str(ratio), str(found.same), ratio=ratio)
    if limit is not None:
        row.goal, row.verdict = f"<= {limit:.2f}:", verdict(ratio, found.same, limit)
    speeds = f"{speed[variant]:,.0f} against {speed['reference']:,.0f} tokens/s"
    row.note = "; ".join(filter(None, [speeds, note]))
    return row


# --- The parts ----------------------------------------------------------------------------------------------------


def prores_eager(setup: Setup) -> list[Row]:
    """ProRes on against off, eager."""
    found = setup.compare("prores_eager", OFF, {"on": ON})
    return [ratio_row(found, "on", "ProRes on / off, eager: time", 1.03)]


def prores_compiled(setup: Setup) -> list[Row]:
    """ProRes on against off, compiled."""
    found = setup.compare("prores_compiled", [*OFF, *COMPILED], {"on": COMPILED})
    return [ratio_row(found, "on", "ProRes on / off, compiled: time", 1.01)]


def compiling(setup: Setup) -> list[Row]:
    """Compile on against off."""
    found = setup.compare("compile", ON, {"compiled": COMPILED}, setup.fewer())
    return [ratio_row(found, "compiled", "compiled / eager: time")]


def checkpointing(setup: Setup, how: str, common: list[str], pairs: int) -> list[Row]:
    from titan_prores.tools.measure import peak_bytes

    mode = "--transforms.activation_checkpoint.mode="
    variants = {name: [*common, mode + name] for name in ("selective", "every_k", "full")}
    found = setup.compare(f"checkpoint_{how}", common, variants, pairs)
    peaks = {
        name: peak_bytes(found.benches[name].step, found.benches[name].trainer.mesh.device)
        for name in ("reference", *variants)
    }
    return [
        ratio_row(
            found,
            name,
            f"activation checkpointing {name} / none, {how}: time",
            note=f"peak memory of a step {peaks[name] / 2**20:.0f} against {peaks['reference'] / 2**20:.0f} MiB",
        )
        for name in variants
    ]


def checkpoint_eager(setup: Setup) -> list[Row]:
    """Time and peak memory of the activation checkpointing modes, eager."""
    return checkpointing(setup, "eager", ON, setup.fewer())


def checkpoint_compiled(setup: Setup) -> list[Row]:
    """Time and peak memory of the activation checkpointing modes, compiled."""
    return checkpointing(setup, "compiled", COMPILED, setup.fewer())


def float8(setup: Setup) -> list[Row]:
    """Float8 linears against bf16, compiled."""
    from titan_prores.config import registry
    from titan_prores.tools.measure import load
    from titan_prores.training.throughput import has_float8_matmul

    if "float8" not in registry.names("transform"):
        return [Row("float8", "skipped", note="there is no transform float8")]
    recipe = load(setup.config, setup.overrides)
    ffn_dim = getattr(recipe.slots["model"].config, "ffn_dim", 0)
    # Float8 matmuls want sizes that 16 divides; others would stay in bf16.
    wider = -(-ffn_dim // 64) * 64 if ffn_dim % 16 else ffn_dim
    common = [*COMPILED, *([f"--model.ffn_dim={wider}"] if wider != ffn_dim else [])]
    found = setup.compare(
        "float8", common, {"float8": [*common, "--transforms.float8.recipe_name=tensorwise"]}, setup.fewer()
    )
    units = has_float8_matmul(found.benches["float8"].trainer.mesh.device)
    label = "" if units else " (emulated)"
    note = "" if units else "emulated: says nothing of hardware with fp8 units"
    if wider != ffn_dim:
        note = "; ".join(filter(None, [note, f"ffn_dim {wider} in both, not {ffn_dim}"]))
    return [ratio_row(found, "float8", f"float8 tensorwise{label} / bf16, compiled: time", note=note)]


def alpha(setup: Setup) -> list[Row]:
    """Time of moving alpha, by depth."""
    from torch import nn

    from titan_prores.prores import ProRes, ResidualAdd, Schedule
    from titan_prores.tools.measure import by_turns, median_interval, paired_ratio, verdict

    def update(n_layers: int, calls: int = 500) -> Callable[[], float]:
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Sequential(ResidualAdd()) for _ in range(n_layers))
        prores = ProRes(model, Schedule("linear", n_layers=n_layers, T=1000))

        def timed() -> float:
            start = time.perf_counter()
            for step in range(calls):
                prores.set_step(step)
            return (time.perf_counter() - start) / calls

        return timed

    found = by_turns({"12": update(12), "again": update(12), "1000": update(1000)}, max(setup.pairs, 20))
    setup.seconds["alpha"] = found
    ratio, same = paired_ratio(found["1000"], found["12"]), paired_ratio(found["again"], found["12"])
    shallow, deep = (median_interval(found[depth]).median * 1e6 for depth in ("12", "1000"))
    limit = 2.0
    return [
        Row(
            "alpha update, 1000 / 12 layers: time",
            str(ratio),
            str(same),
            f"<= {limit:.2f}:",
            verdict(ratio, same, limit),
            f"{deep:.1f} against {shallow:.1f} microseconds, once a step",
            ratio,
        )
    ]


def graphs(setup: Setup) -> list[Row]:
    """Graphs that are compiled while alpha warms up."""
    import torch

    torch._dynamo.reset()
    bench = setup.bench([*COMPILED, "--transforms.prores.residual_schedule.T=1"])
    n_layers = len(bench.trainer.model.layers)
    rows = []
    for _ in range(n_layers + 3):  # alpha is 0 in the first step and 1 everywhere after n_layers
        bench.step()
        rows.append(dict(bench.row))
    if rows[0]["alpha_max"] != 0 or rows[-1]["alpha_min"] != 1:
        raise RuntimeError("alpha did not go from 0 to 1")
    first, last = rows[1]["compiled_graphs"], rows[-1]["compiled_graphs"]
    note = f"{first} after 2 steps, {last} after {len(rows)}, alpha from 0 to 1 in all {n_layers} layers"
    return [Row("graphs added during a warmup", str(last - first), "", "0:", judge(last == first), note)]


def judge(met: bool) -> str:
    """The verdict on a count, which has no spread."""
    from titan_prores.tools.measure import MET, MISSED

    return MET if met else MISSED


def saved(setup: Setup) -> list[Row]:
    """What ProRes keeps for the backward pass."""
    from titan_prores.tools.measure import saved_bytes

    found, own = {}, 0
    for name, overrides in {"off": OFF, "on": ON}.items():
        bench = setup.bench([*PURE_BF16, *overrides])
        left_out = list(bench.trainer.model.parameters())
        if name == "on":  # the vector itself is there anyhow; it is state, not an activation
            vector = bench.trainer.model.prores_alpha.tensor.to_local()
            left_out.append(vector)
            own = vector.untyped_storage().nbytes()
        bench.step()
        found[name] = saved_bytes(bench.step, left_out)
    extra = found["on"] - found["off"]
    note = f"{found['off']:,} bytes are saved without ProRes, {found['on']:,} with it; alpha itself, {own} bytes, apart"
    return [Row("activation bytes saved by ProRes, eager", f"{extra:,}", "", "0:", judge(extra <= 0), note)]


def launch(setup: Setup) -> list[Row]:
    """Time from launch to the end of the first step."""
    import_torch = [sys.executable, "-c", "import torch"]

    def first_step(own: list[str]) -> float:
        folder = setup.run_folder()
        command = [
            sys.executable,
            *("-m", "titan_prores", "train"),
            "--config",
            str(setup.config),
            *setup.overrides,
            *own,
            f"--job.dump_folder={folder}",
            "--training.stop_after=1",
            "--metrics.jsonl.enabled=true",
        ]
        start = time.time()
        run(command)
        # Its only row is written when the first step is done.
        return (folder / "metrics.jsonl").stat().st_mtime - start

    def run(command: list[str]) -> float:
        start = time.time()
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment_of_children())
        return time.time() - start

    kinds = {
        "python -c 'import torch'": lambda: run(import_torch),
        "launch to first step, eager": lambda: first_step(ON),
        "launch to first step, compiled": lambda: first_step(COMPILED),
    }
    rounds = {name: [] for name in kinds}
    for number in range(1 + min(3, setup.pairs // 12)):
        for name, timed in kinds.items():
            seconds = timed()
            if number:  # the first fills the caches of tokens, files and compiled code
                rounds[name].append(seconds)
    setup.seconds["launch"] = rounds
    notes = ["", ", tokens cached", ", tokens and kernels cached"]
    return [
        Row(name, f"{statistics.median(times):.1f} s", note=f"{min(times):.1f} to {max(times):.1f} s{note}")
        for (name, times), note in zip(rounds.items(), notes, strict=True)
    ]


def loader(setup: Setup) -> list[Row]:
    """What the data loader delivers against what training eats, and how long it takes to start far into the data."""
    try:
        import torchdata  # noqa: F401
    except ImportError:
        return [Row("data loader", "skipped", note="torchdata is not installed")]
    bench = setup.bench(COMPILED)
    if not setup.speeds:
        for _ in range(3):
            bench.step()
        setup.speeds += [bench.tokens_per_step / bench.step() for _ in range(5)]
    kinds = {0: "0 workers", 1: "1 worker"}
    training = bench.trainer.recipe.training
    speeds = [loader_speed(setup, bench.trainer.windows, training, n, kind) for n, kind in kinds.items()]
    return speeds + [loader_start(setup, training, n, kind) for n, kind in kinds.items()]


def loader_speed(setup: Setup, windows: TokenWindows, training: Training, num_workers: int, kind: str) -> Row:
    """Tokens/s of the loader over the recipe's own text, relative to the fastest training seen."""
    from titan_prores.tools.measure import by_turns, median_interval, paired_ratio, verdict_at_least

    per_round = 200
    loaders = {name: batches_at(windows, training, 0, num_workers) for name in ("loader", "again")}

    def timed(name: str) -> float:
        start = time.perf_counter()
        for _ in range(per_round):
            next(loaders[name])
        return time.perf_counter() - start

    seconds = by_turns({name: partial(timed, name) for name in loaders}, 10, warmup=1)
    for batches in loaders.values():
        batches.close()
    setup.seconds[f"loader, {kind}"] = seconds
    eaten, tokens = max(setup.speeds), per_round * training.local_batch_size * training.seq_len
    times = median_interval([tokens / taken / eaten for taken in seconds["loader"]])
    same, limit = paired_ratio(seconds["again"], seconds["loader"]), 50
    return Row(
        f"data loader / training, {kind}",
        f"{times.median:,.0f} [{times.low:,.0f}, {times.high:,.0f}] x the tokens/s",
        str(same),
        f">= {limit}:",
        verdict_at_least(times, same, limit),
        f"{times.median * eaten:,.0f} tokens/s against {eaten:,.0f}, the fastest training in this run",
        times,
    )


def loader_start(setup: Setup, training: Training, num_workers: int, kind: str) -> Row:
    """Seconds until a new loader has given its first microbatch, far into a large corpus against its beginning."""
    from titan_prores.data import TokenWindows
    from titan_prores.tools.measure import by_turns, median_interval, paired_difference, verdict

    windows = TokenWindows(large_stream(setup.folder / "large.bin"), training.seq_len)
    far, limit = 10**9, 1.0

    def timed(position: int) -> float:
        start = time.perf_counter()
        batches = batches_at(windows, training, position, num_workers)
        next(batches)
        taken = time.perf_counter() - start
        batches.close()
        return taken

    seconds = by_turns({"far": lambda: timed(far), "start": lambda: timed(0), "again": lambda: timed(0)}, 20)
    setup.seconds[f"loader start, {kind}"] = seconds
    difference = paired_difference(seconds["far"], seconds["start"])
    same = paired_difference(seconds["again"], seconds["start"])
    there, here = (median_interval(seconds[name]).median for name in ("far", "start"))
    return Row(
        f"first microbatch at position 10^9 - at 0, {kind}",
        milliseconds(difference),
        milliseconds(same),
        f"<= {limit:.0f} s:",
        verdict(difference, same, limit, equal=0.0),
        f"{there * 1e3:.1f} against {here * 1e3:.1f} ms; {len(windows.stream):.0e} tokens: one sparse file is "
        f"each of {len(windows.stream.shards):,} shards",
    )


def milliseconds(seconds: Interval) -> str:
    """An interval of seconds in words."""
    return f"{seconds.median * 1e3:+.2f} ms [{seconds.low * 1e3:+.2f}, {seconds.high * 1e3:+.2f}]"


def batches_at(windows: TokenWindows, training: Training, position: int, num_workers: int) -> Iterator[Batch]:
    """The loader of a run on one rank, from a position in the data."""
    from titan_prores.data import microbatches

    return microbatches(
        windows,
        seed=training.seed,
        start_position=position,
        local_batch_size=training.local_batch_size,
        data_rank=0,
        data_ranks=1,
        num_workers=num_workers,
    )


def large_stream(path: Path, n_tokens: int = 10**12, shard_tokens: int = 10**8) -> TokenStream:
    """A stream of zeros as long as no disk here holds: every shard is the same sparse file, written to `path`."""
    import numpy as np

    from titan_prores.data import TokenStream
    from titan_prores.data.shards import Shard

    with path.open("wb") as file:
        file.truncate(2 * shard_tokens)
    shards = [Shard(path, shard_tokens, 2 * shard_tokens, sha256="")] * (n_tokens // shard_tokens)
    return TokenStream("train", shards, np.dtype("<u2"), eot_id=0)


def bare(setup: Setup) -> list[Row]:
    """Forward and backward alone, in pure bf16."""
    from titan_prores.tools.measure import Bench, compare

    found = compare(
        setup.bench, PURE_BF16, {"compiled": [*PURE_BF16, *COMPILED]}, setup.fewer(), Bench.forward_backward
    )
    setup.seconds["bare"] = dict(found.seconds)
    recorded = setup.config == CONFIG and not setup.overrides
    return [
        Row(
            f"forward + backward, pure bf16, {how}",
            f"{found.tokens_per_second[name]:,.0f} tokens/s",
            note=f"recorded earlier, not in this run: {RECORDED[how]}" if recorded else "",
        )
        for how, name in {"eager": "reference", "compiled": "compiled"}.items()
    ]


def asynchronous(setup: Setup) -> list[Row]:
    """Time that training is stopped by a checkpoint, written beside it or not."""
    from titan_prores.tools import measure
    from titan_prores.tools.measure import median_interval, paired_ratio

    sized = any(override.startswith("--model.flavor") for override in setup.overrides)
    bench = setup.bench([] if sized else LARGE)
    trainer = bench.trainer
    modes = {"sync": "disabled", "again": "disabled", "thread": "thread", "process": "process"}
    savers = {}
    for name, mode in modes.items():
        own = ["--checkpoint.enabled=true", f"--checkpoint.async_mode={mode}", f"--checkpoint.folder={name}"]
        slot = measure.load(setup.config, [*setup.overrides, *own]).slots["checkpoint"]
        savers[name] = measure.TimedSaver(
            slot.build(run=trainer.run, mesh=trainer.mesh), slot.config, trainer.agreement
        )
    found, quiet = {name: [] for name in modes}, {name: [] for name in modes}

    def timed(name: str) -> float:
        quiet[name].append([bench.step() for _ in range(QUIET_STEPS)])
        found[name].append(measure.save(bench, savers[name]))
        return found[name][-1].stopped_seconds

    warmup = 1  # the first save gets memory, and starts the process
    stopped = measure.by_turns({name: partial(timed, name) for name in modes}, max(6, setup.pairs // 10), warmup)
    setup.seconds["async"] = stopped
    same = paired_ratio(stopped["again"], stopped["sync"])
    calm = {name: [statistics.median(steps) for steps in quiet[name][warmup:]] for name in modes}
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    size = f"{parameters / 1e6:.0f}M parameters and Adam's state, {bench.tokens_per_step} tokens per step"
    limit, rows = 0.10, []
    for name in ("thread", "process"):
        ratio = paired_ratio(stopped[name], stopped["sync"])
        saves = found[name][warmup:]
        published = statistics.median(each.published_seconds for each in saves)
        seconds = {which: median_interval(stopped[which]).median for which in (name, "sync")}
        times = f"{seconds[name]:.3f} against {seconds['sync']:.2f} s; published after {published:.1f} s"
        rows.append(
            Row(
                f"stopped by a save, async_mode {name} / disabled: time",
                str(ratio),
                str(same),
                f"<= {limit:.2f}:",
                measure.verdict_of_share(ratio, same, limit),
                f"{times}; {size}",
                ratio,
            )
        )
    calm_again = paired_ratio(calm["again"], calm["sync"])
    for name in ("thread", "process"):
        saves = found[name][warmup:]
        beside = [(each, usual) for each, usual in zip(saves, calm[name], strict=True) if each.step_seconds]
        if len(beside) < 6:
            rows.append(Row(f"training steps beside a save, {name}", "skipped", note="saves are shorter than a step"))
            continue
        slower = paired_ratio([statistics.median(each.step_seconds) for each, _ in beside], [u for _, u in beside])
        lost = [
            each.stopped_seconds + sum(each.step_seconds) - usual * len(each.step_seconds) for each, usual in beside
        ]
        note = f"stop and slower steps together cost {statistics.median(lost):.2f} s a save"
        rows.append(
            Row(
                f"training steps beside a save, async_mode {name} / no save: time",
                str(slower),
                str(calm_again),
                note=note,
                ratio=slower,
            )
        )
    return rows


def probes(setup: Setup) -> list[Row]:
    """What probes cost when each measures in every step."""
    names = ("layer_grad_norm", "activation_norm", "branch_ratio", "residual_cosine", "spike_score")
    variants = {name: [*COMPILED, f"--metrics.{name}.every_steps=1"] for name in names}
    variants["residual_cosine"].append("--metrics.residual_cosine.reference_ratio=0")
    variants["spike_score"].append("--metrics.spike_score.start_ratio=0")
    found = setup.compare("probes", COMPILED, variants, setup.fewer())
    rows = []
    for name in names:
        share = (found.ratios[name].median - 1) / 100
        row = ratio_row(found, name, f"probe {name} / none, in every step: time")
        row.note = f"with every_steps = 100: {100 * share:+.2f} % of training"
        rows.append(row)
    return rows


PARTS: dict[str, Callable[[Setup], list[Row]]] = {
    "prores-eager": prores_eager,
    "prores-compiled": prores_compiled,
    "compile": compiling,
    "checkpoint-eager": checkpoint_eager,
    "checkpoint-compiled": checkpoint_compiled,
    "float8": float8,
    "alpha": alpha,
    "graphs": graphs,
    "saved": saved,
    "bare": bare,
    "async": asynchronous,
    "loader": loader,
    "launch": launch,
    "probes": probes,
}


# --- The command --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parts = "\n".join(f"  {name:<20} {function.__doc__.splitlines()[0]}" for name, function in PARTS.items())
    made = argparse.ArgumentParser(
        prog="titan-prores benchmark",
        description="Measure what a recipe costs, and what ProRes, compile, activation checkpointing and float8\n"
        "change. A ratio is the median over pairs of steps taken by turns, with its 95 % interval; beside it\n"
        "stands that of two equal runs (A/A). A goal is claimed only where A/A strays by less than it allows.",
        epilog=f"parts:\n{parts}\n\nOther arguments, --section.key=value, are overrides of the recipe.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--config", type=Path, default=CONFIG, help="recipe to measure (train_configs/benchmark.toml)")
    made.add_argument("--size", help="model.flavor to measure instead of the recipe's, such as 71M")
    made.add_argument("--pairs", type=int, default=60, help="steps of each variant that count, 12 or more (60)")
    made.add_argument("--only", action="append", metavar="PART", help="a part to measure; may be given several times")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (all)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write rows and every measured time there")
    made.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help=f"write the table into this Markdown page, between <!-- {MARK}:begin --> and <!-- {MARK}:end -->",
    )
    return made


def setup_of(options: argparse.Namespace, overrides: list[str], folder: Path) -> tuple[Setup, list[str]]:
    """Check a command line; returns what the parts share and which parts to measure.

    Raises:
        ConfigError, ConfigErrors: every kind of fault in it, or in the recipe.
    """
    from titan_prores.tools.measure import load

    if options.pairs < 12:
        raise ConfigError("--pairs", "is too few for an interval", value=options.pairs, allowed="12 or more")
    if options.threads < 1:
        raise ConfigError("--threads", "not a valid number of threads", value=options.threads, allowed="1 or more")
    wanted = options.only or list(PARTS)
    for name in wanted:
        if name not in PARTS:
            raise ConfigError("--only", "unknown part", value=name, allowed=list(PARTS), nearest=nearest(name, PARTS))
    if options.json and not options.json.resolve().parent.is_dir():
        raise ConfigError("--json", "is in a folder that is not there", value=str(options.json))
    if options.write:
        tables.around(options.write, MARK)
    own = [f"--model.flavor={options.size}"] if options.size else []
    own += [f"--job.device={options.device}"] if options.device != "auto" else []
    setup = Setup(options.config.resolve(), [*own, *overrides], options.pairs, folder)
    load(setup.config, setup.overrides)
    return setup, [name for name in PARTS if name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options, overrides = parser().parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        setup, wanted = setup_of(options, overrides, Path(folder))
        logging.disable(logging.INFO)  # dozens of runs each have the same to say
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # and every profiler that it starts and stops
        import torch

        torch.set_num_threads(options.threads)
        rows, failed = measure(setup, wanted)
        about = surroundings(setup, options.threads)
    header, cells = table(rows)
    tables.show("Side by side, " + about["summary"], header, cells)
    if options.json:
        content = {"about": about, "rows": [asdict(row) for row in rows], "seconds": setup.seconds}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.write:
        written = f"Measured on {about['summary']}.\n\n{tables.markdown(header, cells)}"
        tables.replace_between(options.write, MARK, written)
    return 1 if failed else 0


def measure(setup: Setup, wanted: Sequence[str]) -> tuple[list[Row], bool]:
    """Rows of the parts asked for, and whether any failed; a part that fails does not keep the others from running."""
    from titan_prores.distributed import mesh
    from titan_prores.distributed.failures import summarise

    rows, failed = [], False
    for name in wanted:
        print(f"{name}: {PARTS[name].__doc__.splitlines()[0]}", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            rows += PARTS[name](setup)
        except Exception as error:
            failed = True
            text = error.stderr[-300:] if isinstance(error, subprocess.CalledProcessError) else summarise(error, 0)
            rows.append(Row(name, "failed", note=" ".join(text.split())))
        gc.collect()
        print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    with suppress(Exception):  # everything is measured by now
        mesh.stop()
    return rows, failed


def surroundings(setup: Setup, threads: int) -> dict[str, str | int]:
    """What was measured on what; says nothing that would tell one machine of a kind from another."""
    import torch

    from titan_prores.distributed.mesh import World, choose_device
    from titan_prores.tools.measure import load

    recipe = load(setup.config, setup.overrides)
    device = choose_device(recipe.job.device, World(0, 0, 1))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{threads} CPU threads"
    training = recipe.training
    batch = f"{training.local_batch_size} x {training.seq_len} tokens per step"
    name = setup.config.name + "".join(f" {override}" for override in setup.overrides)
    return {
        "summary": f"{where}, torch {torch.__version__}, {name}, {batch}, {setup.pairs} pairs",
        "device": where,
        "threads": threads,
        "torch": torch.__version__,
        "recipe": name,
        "pairs": setup.pairs,
        "cpu_count": os.cpu_count() or 0,
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; the figures behind a result stand below what was measured."""
    header = ["measured", "result [95 %]", "A/A [95 %]", "goal"]
    cells = [
        ["\n".join(filter(None, [row.measured, row.note])), row.result, row.same, f"{row.goal} {row.verdict}".strip()]
        for row in rows
    ]
    return header, cells


if __name__ == "__main__":
    sys.exit(main())
