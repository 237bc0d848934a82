"""The support matrix: mesh x activation checkpointing x compile x float8 x norm, every cell held against one process.

A cell is the debug recipe at two layers for three steps, in which alpha goes from 0 to 1. It passes when the loss of
each step and every parameter's gradient in each step are those of the reference: the same norm and float8 recipe in one
process, eager, without activation checkpointing and without FSDP2. What `--check` refuses is not run.

How far apart two right results may lie without float8 is rounding, and a constant here. With float8 a difference in the
last bit now and then rounds a value to the neighbouring float8 number, which sets off more of that downstream. So the
tolerance is measured: the reference runs twice more, from weights moved at random by PERTURBATION of their size, and
the largest distance between any two of the three runs is the spread. A cell may be SPREADS times as far from the
reference. That is for tensor parallelism and compiled code; eager data-parallel ranks compute the very same casts, and
are held to the tolerances without float8. Controls are cells broken on purpose; the same comparison must notice each of
them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.distributed.parity import REPOSITORY, debug_recipe, gradient_errors, swap_shards, train
from tests.distributed.spawn import RanksFailed, run_ranks
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.dry_run.report import report
from titan_prores.output.shell import run_command
from titan_prores.output.tables import markdown, replace_between
from titan_prores.trainer import Trainer

RESULTS = Path(__file__).with_name("support_matrix.jsonl")
PAGE = REPOSITORY / "docs" / "support-matrix.md"
MARK = "support-matrix"

SHARD, REPLICATE, TP = (
    f"--parallelism.{name}_degree=2" for name in ("data_parallel_shard", "data_parallel_replicate", "tensor_parallel")
)
WORLD_SIZES = {"one": 1, "fsdp2": 2, "hsdp": 4, "tp2": 2, "fsdp2xtp2": 4}
# Axis -> value -> overrides.
AXES: dict[str, dict[str, list[str]]] = {
    "mesh": {"one": [], "fsdp2": [SHARD], "hsdp": [REPLICATE, SHARD], "tp2": [TP], "fsdp2xtp2": [SHARD, TP]},
    "checkpoint": {
        "none": [],
        "full": ["--transforms.activation_checkpoint.mode=full"],
        "selective": ["--transforms.activation_checkpoint.mode=selective"],
    },
    "compile": {"eager": [], "compiled": ["--transforms.compile.enabled=true"]},
    "float8": {
        "off": [],
        "tensorwise": ["--transforms.float8.recipe_name=tensorwise"],
        "rowwise": ["--transforms.float8.recipe_name=rowwise"],
    },
    "norm": {norm: [f"--model.norm={norm}"] for norm in ("pre", "post", "sandwich")},
}
STEPS = (1, 2, 3)  # the learning rate of step 1 is 0: only step 3 has other weights
RECIPE = [
    f"--training.steps={len(STEPS)}",
    f"--lr_scheduler.warmup_steps={len(STEPS)}",
    f"--metrics.capture.steps={list(STEPS)}",
    "--validation.enabled=false",
    "--metrics.console.enabled=false",
    # float8 multiplies in blocks of 16: every size of a linear divides by that on each of two ranks, but for the 257
    # ids of the vocabulary. A microbatch is the same sequences on every mesh, for the scale of its activations.
    "--model.n_layers=2",
    "--model.ffn_dim=192",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--transforms.prores.residual_schedule.T=1",
    # Plain normals: the largest value of a weight differs from shard to shard, so an unreduced amax shows.
    "--model.init=normal",
]

GRADIENT_TOLERANCES = {"eager": 1e-5, "compiled": 1e-4}  # relative; compiled code rounds otherwise
LOSS_TOLERANCE = 1e-5
PERTURBATION, SPREADS = 1e-6, 1.5
SAME_CASTS = ("one", "fsdp2", "hsdp")

# Of a whole cell, and of any one collective in it.
CELL_SECONDS = {"eager": 60, "compiled": 300}
COLLECTIVE_SECONDS = 240


@dataclass(frozen=True)
class Cell:
    """One combination, a value for each of AXES; with a fault it is a control."""

    mesh: str
    checkpoint: str
    compile: str
    float8: str
    norm: str
    fault: str = ""

    @property
    def name(self) -> str:
        return "/".join(filter(None, astuple(self)))

    @property
    def world_size(self) -> int:
        return WORLD_SIZES[self.mesh]

    @property
    def overrides(self) -> list[str]:
        chosen = (values[getattr(self, axis)] for axis, values in AXES.items())
        return [*RECIPE, *(override for overrides in chosen for override in overrides)]

    @property
    def reference(self) -> Cell:
        return Cell("one", "none", "eager", self.float8, self.norm)

    @property
    def spreads(self) -> bool:
        """Whether float8 has a rounding of its own here: eager data-parallel ranks compute the same casts."""
        return self.float8 != "off" and not (self.mesh in SAME_CASTS and self.compile == "eager")


CELLS = [Cell(*values) for values in product(*AXES.values())]
CONTROLS = [
    *(Cell(mesh, "none", "eager", f8, "pre", "swapped-shard") for mesh in ("fsdp2", "tp2") for f8 in AXES["float8"]),
    *(Cell("tp2", "none", "eager", "tensorwise", norm, "unreduced-amax") for norm in AXES["norm"]),
    Cell("fsdp2xtp2", "none", "compiled", "off", "pre", "unawaited-embedding"),
]
# Every value of every axis and every pair of values, but for compiled code on four ranks: all of them compile, which
# takes longest, and test_trained_schedules.py does.
_SAMPLE = {
    "one": ["none/eager/off/sandwich", "full/eager/rowwise/post", "selective/compiled/tensorwise/pre"],
    "fsdp2": ["none/compiled/rowwise/sandwich", "full/eager/tensorwise/post", "selective/eager/off/pre"],
    "hsdp": ["none/eager/off/post", "full/eager/tensorwise/sandwich", "selective/eager/rowwise/pre"],
    "tp2": ["none/eager/tensorwise/pre", "full/compiled/off/post", "selective/eager/rowwise/sandwich"],
    "fsdp2xtp2": ["none/eager/rowwise/sandwich", "full/eager/tensorwise/pre", "selective/eager/off/post"],
}
SAMPLE = [Cell(mesh, *name.split("/")) for mesh, names in _SAMPLE.items() for name in names]
ALL = {cell.name: cell for cell in [*CELLS, *CONTROLS]}


# --- Faults ----------------------------------------------------------------------------------------------------------


def swapped_shard() -> AbstractContextManager[Any]:
    """Two ranks hold the halves of one weight in the wrong order."""
    return patch("titan_prores.build.init_weights", swap_shards)


def unreduced_amax() -> AbstractContextManager[Any]:
    """Each rank scales its part of a tensor by the largest value of that part, not of the whole."""
    from torch.distributed.tensor import DTensor, Replicate
    from torchao.float8 import float8_utils

    whole = float8_utils.tensor_to_amax

    def local(x: torch.Tensor, reduce_amax: bool = False, *args: Any, **options: Any) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return whole(x, False, *args, **options)
        amax = whole(x.to_local(), False, *args, **options)
        return DTensor.from_local(amax, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)

    return patch.object(float8_utils, "tensor_to_amax", local)


def unawaited_embedding() -> AbstractContextManager[Any]:
    """What leaves the embedding is still on its way between ranks when a compiled layer takes it."""
    from torch.distributed.tensor.parallel import RowwiseParallel

    from titan_prores.components.parallelism._styles import VocabularyEmbedding

    plain = staticmethod(RowwiseParallel._prepare_output_fn)
    return patch.object(VocabularyEmbedding, "_prepare_output_fn", plain)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "swapped-shard": swapped_shard,
    "unreduced-amax": unreduced_amax,
    "unawaited-embedding": unawaited_embedding,
}


# --- References and tolerances ---------------------------------------------------------------------------------------


def perturb(trainer: Trainer, seed: int) -> None:
    """Move every weight of an unsharded model by about PERTURBATION of its size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))


def by_step(errors: Mapping[tuple[int, str], float]) -> dict[int, float]:
    """Step -> largest error of a gradient."""
    return {step: max(error for (at, _), error in errors.items() if at == step) for step in STEPS}


def train_references(rank: int, world_size: int, cells: Sequence[Cell], folder: str) -> dict[Cell, dict[str, Any]]:
    """Losses and gradients of what each cell is held against, and the spread where a cell may spread."""

    def run(cell: Cell, name: str, *prepare: Callable[[Trainer], None]) -> dict[str, Any]:
        overrides = [*cell.overrides, "--parallelism.fsdp.enabled=false"]
        found = train(0, 1, overrides, f"{folder}/reference/{cell.float8}-{cell.norm}-{name}", *prepare)
        return {"losses": found["losses"], "gradients": found["gradients"]}

    found: dict[Cell, dict[str, Any]] = {}
    with quiet(Path(folder) / "log" / "references.txt"):
        for cell in dict.fromkeys(cell.reference for cell in cells):
            for each in (replace(cell, float8="off"), cell):
                found[each] = found.get(each) or run(each, "plain")
            unquantised, reference = found[replace(cell, float8="off")], found[cell]
            if cell.float8 == "off":
                continue
            if by_step(gradient_errors(reference["gradients"], unquantised["gradients"]))[STEPS[-1]] < 1e-3:
                raise AssertionError(f"float8 {cell.float8} changes nothing, so there is nothing to compare")
            if any(each.reference == cell and each.spreads for each in cells):
                others = [run(cell, f"seed-{n}", partial(perturb, seed=n)) for n in (1, 2)]
                reference["spread"] = spread([reference, *others])
    return found


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest distance between any two runs: of gradients by step, and of losses."""
    pairs = list(combinations(runs, 2))
    gradients = [by_step(gradient_errors(one["gradients"], other["gradients"])) for one, other in pairs]
    losses = [abs(one - other) for a, b in pairs for one, other in zip(a["losses"], b["losses"], strict=True)]
    return {"gradients": {n: max(each[n] for each in gradients) for n in STEPS}, "losses": max(losses)}


def judge(cell: Cell, run: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Result of a cell that ran: the errors that use up most of their tolerance, and whether all keep to it."""
    tolerances, loss_tolerance = dict.fromkeys(STEPS, GRADIENT_TOLERANCES[cell.compile]), LOSS_TOLERANCE
    if cell.spreads:
        apart = reference["spread"]
        tolerances = {step: max(least, SPREADS * apart["gradients"][step]) for step, least in tolerances.items()}
        loss_tolerance = max(loss_tolerance, SPREADS * apart["losses"])
    errors = gradient_errors(run["gradients"], reference["gradients"])
    (step, name), error = max(errors.items(), key=lambda item: item[1] / tolerances[item[0][0]])
    loss_errors = [abs(a - b) for a, b in zip(run["losses"], reference["losses"], strict=True)]
    loss_errors = [math.inf if math.isnan(each) else each for each in loss_errors]  # max passes over a nan
    found = {
        "gradient_error": error,
        "gradient_tolerance": tolerances[step],
        "loss_error": max(loss_errors),
        "loss_tolerance": loss_tolerance,
    }
    faults = []
    if not error <= tolerances[step]:
        what = "gradient, zero on one side only," if math.isinf(error) else "gradient"
        faults.append(f"{what} of {name} in step {step}")
    if not max(loss_errors) <= loss_tolerance:
        faults.append(f"loss of step {STEPS[loss_errors.index(max(loss_errors))]}")
    rounded = {key: float(f"{value:.2g}") for key, value in found.items() if math.isfinite(value)}
    passed, wrong = ("missed", "noticed") if cell.fault else ("passed", "failed")
    return rounded | {"status": wrong if faults else passed} | ({"reason": "; ".join(faults)} if faults else {})


# --- Running ---------------------------------------------------------------------------------------------------------


class quiet(AbstractContextManager):
    """What this process prints goes to a file, also what libraries print past Python's streams."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> quiet:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.before = [os.dup(1), os.dup(2)]
        with self.path.open("a") as file:
            self._redirect(file.fileno(), file.fileno())
        return self

    def say(self, line: str) -> None:
        """Print a line where it would have gone."""
        os.write(self.before[0], f"{line}\n".encode())

    def __exit__(self, *exception: object) -> None:
        self._redirect(*self.before)
        for descriptor in self.before:
            os.close(descriptor)

    def _redirect(self, out: int, err: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)


def refusal(cell: Cell, folder: Path) -> str | None:
    """Why `--check` refuses a cell; None when it does not."""
    try:
        report(debug_recipe(cell.world_size, cell.overrides, str(folder / "check" / "run")), cell.world_size)
    except (ConfigError, ConfigErrors) as found:
        errors = getattr(found, "errors", [found])
        return "; ".join(str(error.but(where=None)) for error in errors)  # the same on every machine
    return None


def result(cell: Cell, **found: Any) -> dict[str, Any]:
    """A line of the results."""
    return {"cell": cell.name, **found, "torch": torch.__version__, "torchao": version("torchao")}


def run_cells(rank: int, world_size: int, cells: Sequence[Cell], folder: str, journal: str) -> None:
    """Train cells of one mesh one after the other; rank 0 appends a line to the journal for each."""
    references = torch.load(Path(folder) / "references.pt", weights_only=False) if rank == 0 else {}
    with quiet(Path(folder) / "log" / f"{cells[0].mesh}-rank{rank}.txt") as terminal:
        for cell in cells:
            start = time.perf_counter()
            torch._dynamo.reset()
            with FAULTS[cell.fault]():
                run = train(
                    rank,
                    world_size,
                    cell.overrides,
                    f"{folder}/{cell.mesh}/{cell.name.replace('/', '-')}",
                    lambda trainer: trainer.mesh.set_timeout(COLLECTIVE_SECONDS),
                )
            if rank == 0:
                line = result(cell, **judge(cell, run, references[cell.reference]))
                append(Path(journal), line)
                terminal.say(_progress(line, time.perf_counter() - start))


def _progress(line: Mapping[str, Any], seconds: float | None = None) -> str:
    took = f"{seconds:6.1f} s" if seconds is not None else " " * 8
    error = f"{line['gradient_error']:.1e} of {line['gradient_tolerance']:.1e}" if "gradient_error" in line else ""
    return f"{took}  {line['status']:<8} {line['cell']:<48} {error:<20} {line.get('reason', '')}".rstrip()


def run_all(cells: Sequence[Cell], folder: Path, journal: Path) -> None:
    """Append a result for each cell to the journal: what is refused first, then one launch of ranks a mesh.

    A launch that ends early fails the cell it was at and goes on with the next.
    """
    folder.mkdir(parents=True, exist_ok=True)
    allowed = []
    with quiet(folder / "log" / "check.txt") as terminal:
        for cell in cells:
            if (reason := refusal(cell, folder)) is None:
                allowed.append(cell)
                continue
            line = result(cell, status="refused", reason=reason)
            append(journal, line)
            terminal.say(_progress(line))
    if not allowed:
        return
    # Ranks and meshes share what the compiler makes.
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}):
        references = run_ranks(train_references, 1, allowed, str(folder), timeout=60 + 30 * len(allowed))[0]
        torch.save(references, folder / "references.pt")
        for mesh in WORLD_SIZES:
            left = [cell for cell in allowed if cell.mesh == mesh]
            while left:
                left = _launch(left, folder, journal)


def _launch(cells: Sequence[Cell], folder: Path, journal: Path) -> list[Cell]:
    """Run cells of one mesh in one launch; returns those that come after one that ended it."""
    timeout = 60 + sum(CELL_SECONDS[cell.compile] for cell in cells)
    before = len(_lines(journal))
    try:
        run_ranks(run_cells, cells[0].world_size, cells, str(folder), str(journal), timeout=timeout)
    except RanksFailed as failure:
        done = len(_lines(journal)) - before
        log = folder / "log" / f"{cells[0].mesh}-failure.txt"
        log.write_text(str(failure))
        if done == len(cells):
            print(f"{cells[0].mesh}: the ranks did not end well after their last cell, see {log}", flush=True)
            return []
        line = result(cells[done], status="failed", reason=_exception(str(failure)))
        append(journal, line)
        print(_progress(line), flush=True)
        return list(cells[done + 1 :])
    return []


def _exception(failure: str) -> str:
    """First line of the exception of the rank that failed first; where there is none, what happened to the rank."""
    first = failure.split("\n--- rank")[0].strip().splitlines()
    frames = [number for number, line in enumerate(first) if line.startswith('  File "')]
    after = [line for line in first[frames[-1] if frames else 0 :] if line and not line.startswith(" ")]
    return (after or first)[0][:300]


# --- Results ---------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    """Complete lines: what was stopped in the middle of one is not a result."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one result to a file, in place of a last line that is not complete."""
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Cell -> its newest result, for the cells that there are, in their order."""
    found = {line["cell"]: line for line in map(json.loads, _lines(path))}
    return {name: found[name] for name in ALL if name in found}


def write(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One line a cell, in the order given."""
    path.write_text("".join(json.dumps(line) + "\n" for line in results.values()))


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of the matrix, the counts, the largest errors and the controls."""
    notes: dict[str, int] = {}

    def entry(cells: Iterable[Cell]) -> str:
        by_text: dict[str, list[str]] = {}
        for cell in cells:
            line = results.get(cell.name, {"status": "not run"})
            text = {"passed": "pass", "failed": "**FAILED**"}.get(line["status"], line["status"])
            if "reason" in line:
                text += f" [{notes.setdefault(line['reason'], len(notes) + 1)}]"
            by_text.setdefault(text, []).append(cell.norm)
        if len(by_text) == 1:
            return next(iter(by_text))
        return "; ".join(f"{', '.join(norms)}: {text}" for text, norms in by_text.items())

    columns = list(product(AXES["compile"], AXES["float8"]))
    heads = [how if f8 == "off" else f"{how}, {f8}" for how, f8 in columns]
    rows = [
        [mesh, ac, *(entry(Cell(mesh, ac, how, f8, norm) for norm in AXES["norm"]) for how, f8 in columns)]
        for mesh, ac in product(AXES["mesh"], AXES["checkpoint"])
    ]
    status = [results.get(cell.name, {"status": "not run"})["status"] for cell in CELLS]
    counts = [f"{status.count(each)} {each}" for each in ("passed", "refused", "failed")]
    counts += [f"{status.count('not run')} not run"] * ("not run" in status)
    versions = sorted({f"torch {line['torch']}, torchao {line['torchao']}" for line in results.values()})
    parts = [
        f"**{len(CELLS)} cells: {', '.join(counts)}** ({'; '.join(versions)}; gloo on CPU). "
        "`pass` stands for all three norms: pre, post, sandwich.",
        markdown(["mesh", "AC", *heads], rows),
        "\n".join(f"{number}. {reason}" for reason, number in notes.items()),
        "Largest errors found, and the tolerance there (of gradients relative to the norm of each):",
        markdown(
            ["float8", "compile", "gradient error", "tolerance", "loss error", "tolerance"], list(_worst(results))
        ),
        "Broken on purpose; each must be noticed:",
        markdown(["fault", "cell", "gradient error", "tolerance", "result"], list(_controls(results))),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _worst(results: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    for f8, how in product(AXES["float8"], AXES["compile"]):
        names = [cell.name for cell in CELLS if (cell.float8, cell.compile) == (f8, how)]
        lines = [results[name] for name in names if "gradient_error" in results.get(name, {})]
        if lines:
            shown = []
            for what in ("gradient", "loss"):
                worst = max(lines, key=lambda line: line[f"{what}_error"] / line[f"{what}_tolerance"])
                shown += [f"{worst[f'{what}_error']:.1e}", f"{worst[f'{what}_tolerance']:.1e}"]
            yield [f8, how, *shown]


def _controls(results: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    for cell in CONTROLS:
        line = results.get(cell.name, {"status": "not run"})
        error = f"{line['gradient_error']:.1e}" if "gradient_error" in line else ""
        tolerance = f"{line['gradient_tolerance']:.1e}" if "gradient_tolerance" in line else ""
        status = line["status"] if line["status"] == "noticed" else f"**{line['status']}**"
        if not error and "reason" in line:
            status += f": {line['reason']}"
        yield [cell.fault, cell.name.removesuffix(f"/{cell.fault}"), error, tolerance, status]


# --- Command line ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what has no result yet, write the results and the page's table; 0 when nothing failed or was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed.matrix",
        description=f"Run the cells of the support matrix that {RESULTS.name} has no result of, for the versions of "
        "torch and torchao that are installed, and write the table of docs/support-matrix.md. About an hour for all of "
        "them on two CPU cores; stopped and started again, it goes on where it was.",
    )
    parser.add_argument("--mesh", action="append", choices=WORLD_SIZES, help="cells of this mesh only; can be repeated")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="*",
        help="cells whose name matches, such as 'fsdp2xtp2/*/compiled/tensorwise/*'; a name is "
        "mesh/checkpoint/compile/float8/norm, and /fault for a control",
    )
    parser.add_argument("--force", action="store_true", help="run them again where there is a result")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of the results there are")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / "outputs" / "support_matrix",
        help="for logs, token cache and compiled code (default: outputs/support_matrix)",
    )
    options = parser.parse_args(arguments)
    chosen = [
        cell
        for cell in ALL.values()
        if fnmatch.fnmatchcase(cell.name, options.only) and cell.mesh in (options.mesh or WORLD_SIZES)
    ]
    if not chosen:
        parser.error(f"--only {options.only}: matches no cell, such as {CELLS[0].name}")
    if not options.table:
        known = read(RESULTS)
        fresh = result(CELLS[0])
        cells = [
            cell
            for cell in chosen
            if options.force or any(known.get(cell.name, {}).get(key) != fresh[key] for key in ("torch", "torchao"))
        ]
        print(f"{len(cells)} of {len(chosen)} cells to run; logs in {options.folder / 'log'}", flush=True)
        run_all(cells, options.folder.resolve(), RESULTS)
    results = read(RESULTS)
    write(results, RESULTS)  # sorted, also where an earlier run was stopped
    replace_between(PAGE, MARK, render(results))
    bad = [name for name, line in results.items() if line["status"] in ("failed", "missed")]
    for name in bad:
        print(f"{results[name]['status']}: {name}: {results[name].get('reason', '')}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
