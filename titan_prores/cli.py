"""The command titan-prores. Loads torch only once a recipe's own keys are known to be right."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titan_prores.config import command_line, registry, sources
from titan_prores.config.errors import ConfigError, ConfigErrors, nearest
from titan_prores.config.help import describe, list_components
from titan_prores.config.recipe import Recipe
from titan_prores.config.resolve import load_plugins, resolve
from titan_prores.distributed.signals import end_with_torchrun
from titan_prores.output.shell import refuse, run_command, tell_torchrun

if TYPE_CHECKING:
    from titan_prores.trainer import Trainer

# Command -> "module:function" that takes the arguments after it and returns an exit status, and one line of help.
COMMANDS = {
    "launch": ("titan_prores.cli:launch", "train with several processes on one or more machines, as torchrun does"),
    "train": ("titan_prores.cli:run_recipe", "train in the current process; also works under torchrun"),
    "check": ("titan_prores.cli:check", "print the resolved recipe and the memory it needs, without training"),
    "components": ("titan_prores.cli:components", "list the available components"),
    "sweep": (
        "titan_prores.tools.sweep.command:main",
        "train a grid of variants of a recipe, and put them into a table",
    ),
    "plot": ("titan_prores.tools.plots.command:main", "draw figures from run folders"),
    "checkpoint": ("titan_prores.tools.checkpoint:main", "list, verify, compare and prune checkpoints"),
    "benchmark": ("titan_prores.tools.benchmark:main", "measure what ProRes and compiling cost on this machine"),
    "gpu-check": ("titan_prores.tools.gpu_check:main", "check numerics and speed of this machine's GPUs"),
}

USAGE = """\
usage: titan-prores COMMAND [arguments]

Pretrain language models from TOML recipes, with Progressive Residual Warmup.

commands:
{commands}

The default command is train. titan-prores COMMAND --help lists options; titan-prores train --help TOPIC lists the keys
of a section (training) or of a component (lr_scheduler.wsd).

First steps:
  titan-prores train --config quickstart                          300 steps on the text of Python's standard library
  titan-prores check --config my.toml                             resolve a recipe without running it
  titan-prores launch --nproc 8 --config my.toml --training.steps=100
"""


def usage() -> str:
    """The help of the whole program."""
    width = max(map(len, COMMANDS))
    return USAGE.format(commands="\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()))


def _launcher_faults(variables: Mapping[str, str], world_size: int) -> list[ConfigError]:
    """What is wrong with the variables by which a launcher tells a process its place, as torchrun sets them."""
    several = world_size > 1
    wrong = []
    for name, least, most in (
        ("RANK", 0, world_size - 1),
        ("LOCAL_RANK", 0, world_size - 1),
        ("LOCAL_WORLD_SIZE", 1, world_size),
        ("MASTER_PORT", 0, 2**16 - 1),
    ):
        text = variables.get(name, "")
        valid = text.isascii() and text.isdecimal() and len(text) < 9 and least <= int(text) <= most
        if text and not valid:
            wrong.append(ConfigError(name, "is not valid", value=text, allowed=f"an int from {least} to {most}"))
    if several and (missing := [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not variables.get(n)]):
        hint = "start the processes with titan-prores launch or torchrun, which set it, or unset WORLD_SIZE"
        wrong.append(ConfigError("WORLD_SIZE", f"{', '.join(missing)} not set", value=world_size, allowed=hint))
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    end_with_torchrun()
    return run_command(lambda: run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """As `main`, for a caller that has its own `run_command`; raises what that prints."""
    if not arguments:
        print(usage(), end="", file=sys.stderr)
        return 2
    command, *rest = arguments
    if command in ("-h", "--help", "help") and not rest:
        print(usage(), end="")
        return 0
    if command.startswith("-"):
        return run_recipe(arguments)
    if command not in COMMANDS:
        raise ConfigError(command, "unknown command", allowed=list(COMMANDS), nearest=nearest(command, COMMANDS))
    module, _, function = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(module), function)(rest)


def launch(arguments: Sequence[str]) -> int:
    """`titan-prores launch`."""
    from titan_prores.tools import launch

    return launch.launch(arguments, run_recipe)


def components(arguments: Sequence[str]) -> int:
    """`titan-prores components [KIND] [--config RECIPE]`."""
    return run_recipe(["--list-components", *arguments])


def check(arguments: Sequence[str]) -> int:
    """`titan-prores check --config RECIPE`."""
    return run_recipe(["--check", *arguments])


def run_recipe(arguments: Sequence[str]) -> int:
    """`titan-prores train`: train, or what --check, --list-components and --help ask for instead."""
    options = command_line.parse(arguments)
    if options.help == "":
        command_line.parser().print_help()
        return 0
    tree = sources.load(options.config, options.overrides, registry.DEFAULTS)
    if options.help is not None or options.list_components is not None:
        if tree.errors:
            raise ConfigErrors(tree.errors)
        load_plugins(tree)
        print(describe(options.help, tree) if options.help else list_components(options.list_components), end="")
        return 0
    world_size = options.world_size or command_line.world_size(
        "WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), tree.errors
    )
    if not options.check and (faults := _launcher_faults(os.environ, world_size or 1)):
        return refuse(faults, say=True)  # a process that does not know its rank cannot leave it to another
    recipe = resolve(tree, world_size or 1)
    if not options.check:
        return train(recipe)
    from titan_prores.dry_run.report import report

    print(report(recipe, world_size), end="")
    return 0


def train(recipe: Recipe) -> int:
    """Train, and see to it that a failure on any rank ends all of them with one readable summary."""
    from titan_prores.distributed.failures import Failure
    from titan_prores.distributed.mesh import World
    from titan_prores.distributed.signals import EXIT_STATUS, Stopped, StopRequest
    from titan_prores.output.log import setup
    from titan_prores.trainer import Trainer
    from titan_prores.training.nonfinite import NonFiniteError

    world = World.from_environment()
    setup(None, world.rank, world.size)
    trainer = Trainer(recipe, world, StopRequest().listen())
    try:
        trainer.build()
        end = trainer.train()
        trainer.close()
        trainer.stop_request.ignore()
    except BaseException as failure:
        trainer.stop_request.can_wait = True  # this process is ending already: a signal now has nothing to add
        error = failure
        # Where a signal came to one rank alone before the first step, the others lose it, and are stopped as well.
        if trainer.failures is not None and (signal := trainer.failures.signal_behind(failure)):
            error = Stopped(signal)
        status = _status_of(error, trainer, world.rank)
        if isinstance(failure, NonFiniteError):  # all ranks are here with it, and what they are writing is good
            with contextlib.suppress(RuntimeError):
                trainer.saver.finish()
        with contextlib.suppress(OSError):  # the disk may be what failed
            if trainer.log_file is None:
                pass  # the folder is another rank's to write, or another run's
            elif status == EXIT_STATUS:
                trainer.run.write_status("stopped", trainer.step, signal=str(error))
            else:
                first = trainer.failures.first() if trainer.failures is not None else None
                first = first or Failure.of(error, world.rank, trainer.stage)
                trainer.run.write_status("failed", trainer.step, **first.for_status())
        _leave(status)
    if world.rank == 0:
        print(_farewell(end), end="")
        if end["stopped"]:
            tell_torchrun(_farewell(end).splitlines()[0])
    return EXIT_STATUS if end["stopped"] else 0


def _farewell(end: dict) -> str:
    from titan_prores.output.log import validation_text

    what = (
        f"stopped      {end['stopped']}, everything saved: the same command goes on after"
        if end["stopped"]
        else ("finished    ")
    )
    lines = [f"{what} step {end['step']}"]
    if end["validation"]:
        lines.append(f"validation   {validation_text(end['validation'])}")
    if end["tokens_per_second"]:
        lines.append(f"speed        {end['tokens_per_second']:.0f} tokens/s (median step)")
    lines.append(f"run folder   {end['run_folder']}")
    return "\n".join(lines) + "\n"


def _status_of(error: BaseException, trainer: Trainer, rank: int) -> int:
    """Say what happened, once, and choose the exit status."""
    from titan_prores.distributed.failures import Failure, report_failure
    from titan_prores.distributed.signals import EXIT_STATUS, Stopped

    if isinstance(error, (ConfigError, ConfigErrors)):
        # Most are found by all ranks alike, some by the one that met them: the first to say so speaks for all.
        faults = getattr(error, "errors", [error])
        if trainer.failures is None:
            return refuse(faults)
        return refuse(faults, say=rank == trainer.failures.report(Failure.of(error, rank, trainer.stage)).rank)
    if isinstance(error, Stopped):
        if trainer.failures is not None:
            trainer.failures.report(Failure.of(error, rank, trainer.stage, signal=str(error)))
        if rank == 0:
            lost = f"steps after {trainer.saved_step} are trained again" if trainer.step > trainer.saved_step else ""
            text = f"stopped by {error} in {trainer.stage}, {lost or 'nothing to save'}"
            logging.getLogger("titan_prores").warning(text)
            tell_torchrun(text)
        return EXIT_STATUS
    report_failure(error, rank, trainer.stage, trainer.failures, trainer.log_file)
    return 1


def _leave(status: int) -> None:
    """End the process now: the usual way out would wait for peers that are gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
