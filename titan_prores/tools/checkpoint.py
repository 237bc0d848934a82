"""What titan-prores checkpoint does: look at the checkpoints of a run without the run."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_prores.checkpoint.folder import MANIFEST, CheckpointFolder
from titan_prores.config.errors import ConfigError, counted, shown
from titan_prores.config.recipe import flatten
from titan_prores.output.run_folder import RunFolder
from titan_prores.output.shell import run_command
from titan_prores.output.tables import show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 where something is damaged or differs, 2 for a wrong one."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-prores checkpoint",
        description="List, verify, compare and prune checkpoints. Nothing in them is executed.",
        epilog="Exit status: 0 all is well, 1 a checkpoint is damaged or two of them differ, 2 the command is wrong.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__.lstrip("_"), help=help, description=help)
        added.set_defaults(run=run)
        return added

    where = {"type": Path, "metavar": "FOLDER", "help": "a run folder, or the folder in it that holds checkpoints"}
    command(_list, "what there is, and whether every file has the size that it was written with").add_argument(
        "folder", **where
    )
    verify = command(_verify, "read every file and compare its hash with the manifest's")
    verify.add_argument("folder", **where)
    verify.add_argument("--step", type=int, help="this checkpoint only")
    diff = command(_diff, "recipe and tensors of two checkpoints")
    for name in ("first", "second"):
        diff.add_argument(name, type=Path, metavar=name.upper(), help="the folder of one checkpoint, step-<k>")
    prune = command(_prune, "delete checkpoints; damaged ones and the newest whole one are never deleted")
    prune.add_argument("folder", **where)
    prune.add_argument("--keep-latest", type=_positive, required=True, help="keep the K most recent checkpoints")
    prune.add_argument("--keep-every", type=_positive, default=0, help="also keep the checkpoint of every N-th step")
    prune.add_argument(
        "--keep-best", type=_positive, default=0, help="also keep the K checkpoints with the lowest validation loss"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say which would go")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def _folder(path: Path) -> CheckpointFolder:
    """The folder of checkpoints that `path` means.

    Raises:
        ConfigError: there is no checkpoint in it.
    """
    for each in (path, path / "checkpoint"):
        if (folder := CheckpointFolder(each)).steps():
            return folder
    raise ConfigError("FOLDER", "has no checkpoints", value=str(path), allowed="a folder with step-<k> in it")


def _losses(folder: CheckpointFolder) -> dict[int, Any]:
    """Step -> validation loss in the rows of the run that the checkpoints are of, where there are any."""
    rows = RunFolder(folder.path.parent, is_main=False).validations()
    return {step: row.get("validation_loss") for step, row in rows.items()}


def _list(options: argparse.Namespace) -> int:
    folder, rows, damaged = _folder(options.folder), [], False
    losses = _losses(folder)
    for step in folder.steps():
        if problems := folder.problems(step, hashes=False):
            rows.append([str(step), "", "", "", f"damaged: {problems[0]}"])
            damaged = True
            continue
        meta, size = folder.meta(step), sum(each.bytes for each in folder.records(step).values())
        loss = meta.get("validation_loss", losses.get(step))
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in meta["mesh"].items() if degree > 1) or "1 rank"
        rows.append(
            [
                str(step),
                f"{size / 2**20:.1f}",
                mesh,
                "" if loss is None else f"{loss:.4f}",
                "whole, by sizes" + ("" if meta.get("finite") else "; numbers not finite"),
            ]
        )
    show(str(folder.path), ["step", "MiB", "written by", "validation loss", "state"], rows)
    return int(damaged)


def _verify(options: argparse.Namespace) -> int:
    folder = _folder(options.folder)
    steps = folder.steps()
    if options.step is not None:
        if options.step not in steps:
            raise ConfigError("--step", "there is no checkpoint of this step", value=options.step, allowed=steps)
        steps = [options.step]
    damaged = False
    for step in steps:
        problems = folder.problems(step, hashes=True)
        damaged |= bool(problems)
        print(f"step {step}: {'as it was written' if not problems else 'DAMAGED'}")
        for problem in problems:
            print(f"  {problem}")
    return int(damaged)


def _prune(options: argparse.Namespace) -> int:
    folder = _folder(options.folder)
    doomed = folder.expendable(options.keep_latest, options.keep_every, options.keep_best, _losses(folder))
    for step in doomed:
        if not options.dry_run:
            folder.remove(step)
        print(f"{'would remove' if options.dry_run else 'removed'} step {step}")
    print(f"{len(folder.steps()) - len(doomed) * options.dry_run} left in {folder.path}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Print what differs; tensors are read one at a time."""
    pair = [_checkpoint(path) for path in (options.first, options.second)]
    metas = [folder.meta(step) for folder, step in pair]
    found = 0
    recipes = [flatten(meta["recipe"]) for meta in metas]
    for key in sorted(recipes[0].keys() | recipes[1].keys()):
        first, second = (recipe.get(key) for recipe in recipes)
        if first != second:
            found += 1
            print(f"recipe  {'.'.join(key)}: {shown(first)} -> {shown(second)}")
    for key in ("step", "samples", "mesh", "data"):
        if metas[0].get(key) != metas[1].get(key):
            found += 1
            print(f"meta    {key}: {shown(metas[0].get(key))} -> {shown(metas[1].get(key))}")
    for line in _tensor_differences(*(folder.at(step) for folder, step in pair)):
        found += 1
        print(f"tensor  {line}")
    print(counted(found, "difference") if found else "no difference")
    return int(found > 0)


def _checkpoint(path: Path) -> tuple[CheckpointFolder, int]:
    if (found := CheckpointFolder.containing(path)) is None:
        raise ConfigError("FOLDER", "not a checkpoint", value=str(path), allowed=f"a folder step-<k> with a {MANIFEST}")
    folder, step = found
    if problems := folder.problems(step, hashes=False):
        raise ConfigError("FOLDER", f"is damaged: {problems[0]}", value=str(path))
    return folder, step


def _tensor_differences(first: Path, second: Path) -> Iterator[str]:
    import torch
    import torch.distributed.checkpoint as dcp

    from titan_prores.checkpoint.reader import TensorReader

    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    entries = [TensorReader(path).read_metadata().state_dict_metadata for path in (first, second)]
    for name in sorted(entries[0].keys() | entries[1].keys()):
        if absent := [path for path, each in zip((first, second), entries, strict=True) if name not in each]:
            yield f"{name}: not in {absent[0]}"
            continue
        shapes = [(tuple(each[name].size), each[name].properties.dtype) for each in entries]
        if shapes[0] != shapes[1]:
            yield f"{name}: {shapes[0]} -> {shapes[1]}"
            continue
        tensors = []
        for path in (first, second):
            state = {name: torch.empty(shapes[0][0], dtype=shapes[0][1])}
            dcp.load(state, storage_reader=TensorReader(path), no_dist=True)
            tensors.append(state[name])
        if not torch.equal(*tensors):
            gap = (tensors[0].double() - tensors[1].double()).abs().max().item()
            yield f"{name}: differs by at most {gap:.3e}"
