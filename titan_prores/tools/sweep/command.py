"""The command line of titan-prores sweep."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_prores.config.errors import ConfigError, duration
from titan_prores.distributed.signals import EXIT_STATUS
from titan_prores.output.files import write_atomically
from titan_prores.output.shell import run_command
from titan_prores.output.tables import replace_between, show
from titan_prores.tools.plots import command as plots
from titan_prores.tools.sweep import plan, statistics
from titan_prores.tools.sweep.plan import Run, Sweep
from titan_prores.tools.sweep.runner import Book, Runner, command, slurm_script

TABLES = ("table.md", "table.csv", "runs.csv")  # below the folder of the runs
LONGEST_TABLE = 60  # lines that are printed at the end; of more, only the first

EPILOG = """\
FILE names a recipe, axes of changes to it, seeds and what is compared; train_configs/repro_cpu/sweep.toml is one.
Without a file: --config RECIPE --folder FOLDER --axis section.key=value,value [--axis ...] [--seeds 0,1,2]
[--pair KEY] [--section.key=value ...], the last for every run.
At its end a sweep packs what its runs gave into its file of results, prints its table and names the files it is in.
The same command again goes on where it stopped: runs that have ended are not run again, others resume from their
newest checkpoint.

Exit status: 0 all runs have ended, 1 one of them failed, 2 the sweep, the recipe or the command line is wrong,
75 stopped by SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C with everything saved.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    return run_command(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options, options.settings = parser.parse_known_args(arguments)
    if wrong := [each for each in options.settings if not (each.startswith("--") and "." in each and "=" in each)]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    return _run(options, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-prores sweep",
        description="Train a grid of variants of one recipe, and put the results into one table.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the sweep, a TOML file")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="runs side by side on this machine")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="AXIS=VALUE,...",
        help="only the runs with these values, or the one of this name; may be repeated",
    )
    parser.add_argument("--retry-failed", action="store_true", help="run failed runs again, but not diverged ones")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--dry-run", action="store_true", help="print the commands of the remaining runs, and run nothing"
    )
    modes.add_argument("--list", action="store_true", help="print every run and its state")
    modes.add_argument(
        "--collect", action="store_true", help="only pack the results, make the tables and draw the figures"
    )
    modes.add_argument("--slurm", action="store_true", help="print a Slurm array script for what is left")
    bare = parser.add_argument_group("instead of FILE")
    bare.add_argument("--config", metavar="RECIPE", help="the recipe that every run starts from")
    bare.add_argument("--folder", help="run folders go below it")
    bare.add_argument("--axis", action="append", default=[], metavar="KEY=VALUES", help="section.key=value,value")
    bare.add_argument("--seeds", type=_seeds, default=[], metavar="0,1,2", help="seeds of each combination; default 0")
    bare.add_argument("--pair", metavar="KEY", help="an axis of two values to compare: the baseline, then the other")
    bare.add_argument("--metric", help="key of metrics.jsonl whose last value is compared; default validation_loss")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def _seeds(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text} is not a list of seeds such as 0,1,2")
    return [int(part) for part in text.split(",")]


def _sweep(options: argparse.Namespace) -> Sweep:
    if options.file is not None:
        bare = ("config", "folder", "axis", "seeds", "pair", "metric", "settings")
        if given := [name for name in bare if getattr(options, name)]:
            raise ConfigError(f"--{given[0]}", "belongs into the file where there is one")
        return plan.load(options.file)
    if not options.config or not options.folder:
        raise ConfigError("FILE", "is required, or --config and --folder", allowed="see --help")
    return plan.from_arguments(
        options.config,
        options.folder,
        options.axis,
        options.seeds or [0],
        options.pair,
        options.metric,
        options.settings,
    )


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    sweep = _sweep(options)
    check_plots(sweep)
    if options.only and options.collect:
        raise ConfigError("--only", "not valid with --collect, which makes the tables of all runs")
    book = Book(sweep, retry_failed=options.retry_failed)
    if options.collect:
        finish(book)
        return 0
    runs = book.runs()
    wanted = sweep.selection(runs, options.only)
    runs = [run for run in runs if wanted(run)]
    if options.list:
        _list(book, runs)
        return 0
    runs_here = not options.dry_run and not options.slurm
    book.check(runs, data=runs_here)
    if runs_here:
        if options.only:  # other processes may be running it: the tables are left to --collect
            status = Runner(book, options.jobs, _say).run(wanted)
            _say(f"the runs are below {sweep.folder}; the same command with --collect makes the tables")
            return status
        write_tables(book)
        status = Runner(book, options.jobs, _say, lambda: write_tables(book)).run()
        if status == EXIT_STATUS:
            _say(_place(sweep))
        else:
            finish(book)
        return status
    left = [run for run in runs if run.waits or not book.result(run).ended]
    ready = [run for run in left if not run.waits]
    if options.slurm:
        again = ["python", "-m", "titan_prores", "sweep", *_without_selection(arguments)]
        print(slurm_script(book, ready, len(left) - len(ready), again), end="")
        return 0
    for run in left:
        waits = [str(value) for value in run.values.values() if not isinstance(value, str)]
        print(f"# {sweep.title(run)}" + (f": waits for the {', '.join(waits)}" if waits else ""))
        if not waits:
            print(shlex.join(command(sweep, run)))
    print(f"# {len(runs) - len(left)} have ended, {len(left)} are left")
    return 0


def _without_selection(arguments: Sequence[str]) -> list[str]:
    """A command line without --only and --slurm."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--only")
    parser.add_argument("--slurm", action="store_true")
    return parser.parse_known_args(arguments)[1]


def _say(line: str) -> None:
    print(line, flush=True)


def _list(book: Book, runs: Sequence[Run]) -> None:
    rows = []
    for run in runs:
        result = book.result(run)
        value = result.final.get(book.sweep.file.metric)
        state = "waits" if run.waits else result.state
        at = f"{result.step} of {result.steps}" if result.steps else ""
        took = duration(result.seconds) if result.ended else ""
        rows.append([book.sweep.title(run), state, at, took, f"{value:.4f}" if value is not None else "", result.error])
    show(str(book.sweep.folder), ["run", "state", "step", "in steps", book.sweep.file.metric, "why"], rows)
    print(_place(book.sweep))


def finish(book: Book) -> None:
    """Write the file of results and the tables, print these and where they are, and draw the figures."""
    book.pack()
    text = write_tables(book)
    if text.count("\n") > LONGEST_TABLE:
        text = text.partition("\n")[0] + "\n"
    _say(f"{text}\n{_place(book.sweep)}")
    draw(book)


def _place(sweep: Sweep) -> str:
    written = [name for name in TABLES if (sweep.folder / name).exists()]
    return f"tables: {sweep.folder / written[0]}, {', '.join(written[1:])}" if written else f"runs: {sweep.folder}"


def check_plots(sweep: Sweep) -> None:
    """See that titan-prores plot would take what the sweep asks of it, before any run is started.

    Raises:
        ConfigError: it would not, for the reason that argparse has printed.
    """
    for plot in sweep.file.plots:
        try:
            plots.parser().parse_args([plot.draw, *(f"{line.label}=run" for line in plot.lines), *plot.options])
        except SystemExit:
            raise ConfigError(
                f"plots.{plot.name}", "titan-prores plot does not take this", value=[plot.draw, *plot.options]
            ) from None


def draw(book: Book) -> None:
    """Draw every figure whose runs have all ended, and say which have to wait."""
    sweep = book.sweep
    for plot in sweep.file.plots:
        lines = sweep.runs_of_plot(plot.name, book.metric)
        runs = [(label, run) for label, found in lines.items() for run in found]
        left = sum(run.waits or not book.result(run).ended for _, run in runs)
        if left:
            _say(f"figure {plot.name}: waits for {left} runs")
            continue
        status = plots.main(
            [
                plot.draw,
                *(f"{label}={sweep.results / run.name}" for label, run in runs),
                *plot.options,
                f"--output={sweep.figures / plot.name}.png",
            ]
        )
        if status:
            _say(f"figure {plot.name}: not drawn")


def write_tables(book: Book) -> str:
    """Write TABLES beside the runs, and the report if there is one; returns the tables."""
    sweep = book.sweep
    results = [book.result(run) for run in book.runs()]
    text = statistics.report(sweep, results)
    contents = (text, statistics.table_csv(sweep, results), statistics.runs_csv(sweep, results))
    for name, content in zip(TABLES, contents, strict=True):
        write_atomically(sweep.folder / name, content.encode())
    if sweep.report is not None:
        replace_between(sweep.report, "sweep", text)
    return text
