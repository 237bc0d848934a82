"""The command line that names a recipe: options, and overrides of any of its keys. Needs no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from titan_prores.config.errors import ConfigError, ConfigErrors, nearest

MOST_RANKS = 100_000

USAGE = "%(prog)s --config RECIPE [--section.key=value ...]"
EPILOG = """\
--section.key=value overrides any value of the recipe. The value is TOML; quotes around a word may be left out.

Exit status: 0 the run went well, 2 the recipe or command line is wrong, 75 stopped by SIGTERM, SIGHUP, SIGUSR1 or
Ctrl-C with everything saved (the same command goes on), 1 anything else. Under torchrun see status.json in the run
folder: torchrun itself ends with 1 whatever failed.
"""


@dataclass
class Options:
    """A parsed command line. For `list_components` and `help`, "" means without an argument."""

    config: Path | None = None
    check: bool = False
    world_size: int | None = None
    list_components: str | None = None
    help: str | None = None
    overrides: list[str] = field(default_factory=list)


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but a wrong command line raises ConfigErrors, as a wrong recipe does."""

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        found = re.match(r"argument (\S+): (.*)", message)
        key, problem = (found[1].split("/")[-1], found[2]) if found else ("", message)
        if ignored := re.fullmatch(r"ignored explicit argument '(.*)'", problem):
            raise ConfigErrors([ConfigError(key, "takes no value", value=ignored[1])])
        problem = problem.replace("expected one argument", "needs a value")
        raise ConfigErrors([ConfigError(key, problem, allowed=f"see {self.prog} --help")])


def parser(prog: str = "titan-prores train") -> ArgumentParser:
    """Of the options that go with a recipe. Overrides are among the arguments that it does not know."""
    made = ArgumentParser(
        prog=prog, usage=USAGE, description="Train a language model from a TOML recipe.", epilog=EPILOG, add_help=False
    )
    # Lists, so that an option that is given twice can be told from one that is given once.
    made.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="RECIPE",
        help="TOML file, or the name of a recipe that is shipped, such as quickstart",
    )
    made.add_argument(
        "--check", action="count", default=0, help="print the resolved recipe and the memory it needs, and stop"
    )
    made.add_argument(
        "--world-size", action="append", default=[], metavar="N", help="with --check: for this many ranks"
    )
    made.add_argument(
        "--list-components",
        action="append",
        nargs="?",
        const="",
        default=[],
        metavar="KIND",
        help="list the available components, one line each, and stop",
    )
    made.add_argument(
        "-h",
        "--help",
        action="append",
        nargs="?",
        const="",
        default=[],
        metavar="TOPIC",
        help="this text; the keys of a section, such as training or dataset; or those of a component, such as "
        "lr_scheduler.wsd. With --config also of components that the recipe imports",
    )
    return made


def parse(arguments: Sequence[str]) -> Options:
    """Split a command line into options and overrides.

    Raises:
        ConfigErrors: every argument that is neither.
    """
    made = parser()
    found, left = made.parse_known_args(arguments)
    errors = []
    options = Options(
        check=found.check > 0,
        list_components=found.list_components[0] if found.list_components else None,
        help=found.help[0] if found.help else None,
    )
    for flag in ("config", "check", "world_size", "list_components", "help"):
        values = getattr(found, flag)
        if (values if isinstance(values, int) else len(values)) > 1:
            errors.append(ConfigError(f"--{flag.replace('_', '-')}", "is given twice"))
    for flag, values in (("--config", found.config), ("--world-size", found.world_size)):
        if "" in values:
            errors.append(ConfigError(flag, "needs a value"))
    if any(found.config):
        options.config = Path(found.config[0])
    if any(found.world_size):
        options.world_size = world_size("--world-size", found.world_size[0], errors)
    left = list(left)
    while left:
        argument = left.pop(0)
        flag, equals, _ = argument.partition("=")
        if not flag.startswith("--") or not ("." in flag or equals):
            flags = [name for action in made._actions for name in action.option_strings]
            errors.append(ConfigError(argument, "unknown option", nearest=nearest(flag, flags), allowed="see --help"))
        elif equals:
            options.overrides.append(argument)
        elif left and not left[0].startswith("--"):
            options.overrides.append(f"{flag}={left.pop(0)}")
        else:
            errors.append(ConfigError(flag, "needs a value", allowed="--section.key=value"))
    if found.world_size and not options.check:
        errors.append(ConfigError("--world-size", "goes with --check; a run takes its size from torchrun"))
    if not found.config and options.help is None and options.list_components is None:
        errors.append(ConfigError("--config", "is required: a TOML recipe", allowed="see --help"))
    if errors:
        raise ConfigErrors(errors)
    return options


def world_size(key: str, text: str, errors: list[ConfigError]) -> int | None:
    """A number of ranks, from the command line or the environment; None after adding to `errors`."""
    if text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_RANKS:
        return int(text)
    errors.append(ConfigError(key, "not a valid number of ranks", value=text, allowed=f"an int from 1 to {MOST_RANKS}"))
    return None
