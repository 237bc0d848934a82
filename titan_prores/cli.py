"""The command line of scripts/train.py. Loads torch only once a recipe's own keys are known to be right."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titan_prores import config, registry
from titan_prores.config import Section, Tree, declared_extra, slot_kind
from titan_prores.errors import ConfigError, ConfigErrors, nearest
from titan_prores.recipe import ENGINE_SECTIONS, SECTIONS, SETS, SLOTS, Recipe, load_plugins, resolve
from titan_prores.setting_types import declared, plain, type_name
from titan_prores.shell import refuse, run_command, tell_torchrun
from titan_prores.stopping import end_with_torchrun

if TYPE_CHECKING:
    from titan_prores.trainer import Trainer

USAGE = """\
Train a language model from a TOML recipe.

  titan-prores launch --nproc 2 --config FILE [--section.key=value ...]   two processes; launch --help says more
  titan-prores --config FILE [--section.key=value ...]                    one process

  Without an install: python scripts/train.py ... for titan-prores ...; under torchrun: torchrun scripts/train.py ...

  --config FILE              the recipe
  --section.key=value        override anything in it; the value as in TOML, quotes around a word may be left out
  --check                    resolve the recipe, print what it would run, and stop
  --world-size N             with --check: for this many ranks
  --list-components [KIND]   the components there are, one line each
  --help                     this text
  --help SECTION             the keys of a section, such as training or dataset
  --help KIND.NAME           the keys of a component, such as lr_scheduler.wsd
                             with --config FILE both know the components that the recipe imports

Exit status: 0 the run went well, 2 the recipe or command line is wrong, 75 stopped by SIGTERM, SIGHUP, SIGUSR1 or
Ctrl-C with everything saved (the same command goes on), 1 anything else. Under torchrun see status.json in the run
folder: torchrun itself ends with 1 whatever failed.
"""

MOST_RANKS = 100_000
FLAGS = ("--config", "--check", "--world-size", "--list-components", "--help")


@dataclass
class Options:
    """A parsed command line. For `list_components` and `help`, "" means without an argument."""

    config: Path | None = None
    check: bool = False
    world_size: int | None = None
    list_components: str | None = None
    help: str | None = None
    overrides: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> Options:
    """Split a command line into options and overrides.

    Raises:
        ConfigErrors: every argument that is neither.
    """
    options, errors, left = Options(), [], list(arguments)
    given: set[str] = set()

    def value_of(flag: str, inline: str | None, *, required: bool) -> str:
        if inline:
            return inline
        if inline is None and left and not left[0].startswith("--"):
            return left.pop(0)
        if required:
            errors.append(ConfigError(flag, "needs a value"))
        return ""

    while left:
        argument = left.pop(0)
        flag, equals, text = argument.partition("=")
        inline = text if equals else None
        if flag == "-h":
            flag = "--help"
        if flag in FLAGS and flag in given:
            errors.append(ConfigError(flag, "is given twice"))
        given.add(flag)
        if flag == "--help":
            options.help = value_of(flag, inline, required=False)
        elif flag == "--list-components":
            options.list_components = value_of(flag, inline, required=False)
        elif flag == "--check":
            options.check = True
            if inline is not None:
                errors.append(ConfigError(flag, "takes no value", value=inline))
        elif flag == "--config":
            options.config = Path(value_of(flag, inline, required=True))
        elif flag == "--world-size":
            number = value_of(flag, inline, required=True)
            if number:
                options.world_size = _world_size(flag, number, errors)
        elif flag.startswith("--") and ("." in flag or equals):
            if equals:
                options.overrides.append(argument)
            elif left and not left[0].startswith("--"):
                options.overrides.append(f"{flag}={left.pop(0)}")
            else:
                errors.append(ConfigError(flag, "needs a value", allowed="--section.key=value"))
        else:
            errors.append(ConfigError(argument, "is no option", nearest=nearest(flag, FLAGS), allowed="see --help"))
    if "--world-size" in given and not options.check:
        errors.append(ConfigError("--world-size", "goes with --check; a run takes its size from torchrun"))
    if "--config" not in given and options.help is None and options.list_components is None:
        errors.append(ConfigError("--config", "is required: a TOML recipe", allowed="see --help"))
    if errors:
        raise ConfigErrors(errors)
    return options


def _world_size(key: str, text: str, errors: list[ConfigError]) -> int | None:
    """A number of ranks, from the command line or the environment; None after adding to `errors`."""
    if text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_RANKS:
        return int(text)
    errors.append(ConfigError(key, "is no number of ranks", value=text, allowed=f"an int from 1 to {MOST_RANKS}"))
    return None


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
    if arguments[:1] == ["launch"]:
        from titan_prores.launch import launch

        return launch(arguments[1:])
    options = parse(arguments)
    if options.help == "":
        print(USAGE, end="")
        return 0
    tree = config.load(options.config, options.overrides, registry.builtin_folder() / "defaults.toml")
    if options.help is not None or options.list_components is not None:
        if tree.errors:
            raise ConfigErrors(tree.errors)
        load_plugins(tree)
        print(describe(options.help, tree) if options.help else list_components(options.list_components), end="")
        return 0
    world_size = options.world_size or _world_size("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), tree.errors)
    if not options.check and (faults := _launcher_faults(os.environ, world_size or 1)):
        return refuse(faults, say=True)  # a process that does not know its rank cannot leave it to another
    recipe = resolve(tree, world_size or 1)
    if not options.check:
        return train(recipe)
    from titan_prores.check import report

    print(report(recipe, world_size), end="")
    return 0


def train(recipe: Recipe) -> int:
    """Train, and see to it that a failure on any rank ends all of them with one readable summary."""
    from titan_prores.failures import Failure
    from titan_prores.log import setup
    from titan_prores.mesh import World
    from titan_prores.nonfinite import NonFiniteError
    from titan_prores.stopping import EXIT_STATUS, Stopped, StopRequest
    from titan_prores.trainer import Trainer

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
    from titan_prores.log import validation_text

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
    from titan_prores.failures import Failure, report_failure
    from titan_prores.stopping import EXIT_STATUS, Stopped

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


# --- Help, from the declarations that validate -----------------------------------------------------------------------


def list_components(kind: str = "") -> str:
    """Components of a kind, or of all kinds, with the first line of their docstrings."""
    if kind and kind not in registry.KINDS:
        raise ConfigError(
            "--list-components",
            "is no kind of component",
            value=kind,
            allowed=list(registry.KINDS),
            nearest=nearest(kind, registry.KINDS),
        )
    lines = []
    for each in [kind] if kind else registry.KINDS:
        lines.append(f"{each}: {registry.KINDS[each].summary}")
        names = registry.names(each)
        width = max(map(len, names), default=0)
        lines += [f"  {name:<{width}}  {registry.summary(registry.lookup(each, name))}" for name in names]
    return "\n".join(lines) + "\n"


def describe(topic: str, tree: Tree | None = None) -> str:
    """Every key of `kind.name`, of a section or of a component named alone: type, default, unit and meaning.

    Args:
        topic: what is asked for. Of a section that holds one component, such as dataset, that component is described.
        tree: the recipe that says which one; None takes the one that a recipe gets by default.

    Raises:
        ConfigError: there is no such component or section.
    """
    word, dot, name = topic.partition(".")
    kind = SLOTS.get(word, SETS.get(word, word))
    if dot and kind in registry.KINDS:
        return _describe_component(kind, name)
    if dot or (word not in ENGINE_SECTIONS and kind not in registry.KINDS):
        return _describe_component(*_find(topic, kind))
    blocks = []
    if word in ENGINE_SECTIONS:
        section = ENGINE_SECTIONS[word]
        blocks.append("\n".join([f"[{word}]  {registry.summary(section)}", *_describe_section(section)]) + "\n")
    if section_of_one := next((section for section, held in SLOTS.items() if held == kind), None):
        tree = tree or config.load(None, (), registry.builtin_folder() / "defaults.toml")
        chosen = tree.values[section_of_one]["name"]
        blocks.append(f'[{section_of_one}]  name = "{chosen}"\n{_describe_component(kind, chosen)}')
    if kind in registry.KINDS:
        blocks.append(f"{list_components(kind)}See --help {kind}.<name> for the keys of one.\n")
    return "\n".join(blocks)


def _find(topic: str, kind: str) -> tuple[str, str]:
    """Kind and name of the one component that is called `topic`.

    Raises:
        ConfigError: none or several are.
    """
    found = [each for each in registry.KINDS if topic in registry.names(each)]
    if len(found) == 1:
        return found[0], topic
    if found:
        several = [f"{each}.{topic}" for each in found]
        raise ConfigError("--help", "is the name of several components", value=topic, allowed=several)
    every = {name: f"{each}.{name}" for each in registry.KINDS for name in registry.names(each)}
    hint = nearest(kind, [*ENGINE_SECTIONS, *registry.KINDS, *SECTIONS]) or every.get(nearest(topic, every) or "")
    topics = [*ENGINE_SECTIONS, *(f"{each}.<name>" for each in registry.KINDS)]
    raise ConfigError("--help", "is neither a section nor kind.name", value=topic, allowed=topics, nearest=hint)


def _describe_component(kind: str, name: str) -> str:
    try:
        component = registry.lookup(kind, name)
    except ConfigError as error:
        raise error.under(f"--help {kind}") from error
    return "\n".join([f"{kind}.{name}  {registry.summary(component)}", *_describe_section(component.Config)]) + "\n"


def _describe_section(section: type[Section], indent: str = "  ") -> list[str]:
    lines = []
    if not section.model_fields:
        lines.append(f"{indent}(no keys)")
    preset = section.presets({})
    for name, info in section.model_fields.items():
        extra = declared_extra(info)
        if kind := slot_kind(info):
            lines.append(f'{indent}{name}: {kind} = {{ name = "{info.default["name"]}" }}')
            lines.append(f"{indent}    {info.description}; see --help {kind}")
            continue
        unit = f" {extra['unit']}" if extra.get("unit") else ""
        if not info.is_required():
            usual = info.get_default(call_default_factory=True)
            value = "(not set)" if usual is None else config.inline(plain(usual))
            default = f" = {value}" + (f", in{unit}" if unit and usual is None else unit)
        elif name in preset:
            value, origin = preset[name]
            default = f" = {config.inline(value)}{unit} from {origin}"
        else:
            default = f"{f', in{unit}' if unit else ''} (required)"
        lines.append(f"{indent}{name}: {type_name(declared(info))}{default}{_bounds(info.metadata)}")
        lines.append(f"{indent}    {info.description}")
        for inner in _sections_in(info.annotation):
            lines += _describe_section(inner, indent + "      ")
    return lines


def _sections_in(annotation: object) -> list[type[Section]]:
    """Sections that a key's type is made of: the tables of a list, for example."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in typing.get_args(annotation) for section in _sections_in(inner)]


def _bounds(metadata: Sequence[object]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{signs[key]} {getattr(rule, key)}" for rule in metadata for key in signs if hasattr(rule, key)]
    return f"   [{', '.join(found)}]" if found else ""


if __name__ == "__main__":
    sys.exit(main())
