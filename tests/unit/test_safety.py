"""No line of the package can be made to run what a file says, or to take a path for a shell's word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("titan_prores", "components", "scripts") for path in (REPOSITORY / folder).rglob("*.py")
)

# Names, as imports in the file spell them out, and what is wrong with calling them.
NEVER = {
    **dict.fromkeys(["eval", "exec", "compile", "__import__"], "runs text as code"),
    **dict.fromkeys(
        [
            "pickle.load",
            "pickle.loads",
            "pickle.Unpickler",
            "marshal.load",
            "marshal.loads",
            "shelve.open",
            "dill.load",
            "dill.loads",
            "cloudpickle.load",
            "cloudpickle.loads",
            "joblib.load",
            "pandas.read_pickle",
            "torch.storage._load_from_bytes",
            "torch.package.PackageImporter",
            "torch.jit.load",
            "torch.hub.load",
        ],
        "runs what a file says",
    ),
    **dict.fromkeys(["yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"], "makes objects of any class"),
    **dict.fromkeys(
        [
            "os.system",
            "os.popen",
            "subprocess.getoutput",
            "subprocess.getstatusoutput",
            "asyncio.create_subprocess_shell",
        ],
        "goes through a shell",
    ),
    **dict.fromkeys(
        ["os.path.expanduser", "os.path.expandvars", "*.expanduser", "*.expandvars"], "makes another path of a path"
    ),
    **dict.fromkeys(["importlib.import_module", "importlib.util.spec_from_file_location"], "imports by name"),
}

# File and name that may be in it, and why.
ALLOWED = {
    ("components/checkpoint/_process.py", "pickle.loads"): "what the run itself sends to its child, over a socket pair",
    ("titan_prores/checkpoint/reader.py", "pickle.Unpickler"): "with a find_class that knows what it may find",
    ("titan_prores/config/registry.py", "importlib.import_module"): "plug-ins are code that a recipe asks for",
    ("titan_prores/config/kinds.py", "importlib.import_module"): "the contracts that the table in it names",
    ("titan_prores/cli.py", "importlib.import_module"): "the commands that the table in it names",
    (
        "titan_prores/config/registry.py",
        "importlib.util.spec_from_file_location",
    ): "plug-ins are code that a recipe asks for",
}


def spelled_out(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it was imported as, in full."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return found


def full_name(node: ast.AST, imported: dict[str, str]) -> str | None:
    """`a.b.c` of an expression, imports spelled out; `*.c` where it is an attribute of something computed."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, imported) or '*'}.{node.attr}"
    return None


def faults(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and fault of everything in a file that must not be there."""
    tree = ast.parse(source)
    imported = spelled_out(tree)
    for node in ast.walk(tree):
        # Also where it is only handed on, or inherited from.
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            name = full_name(node, imported)
            for known in (name, f"*.{name.rpartition('.')[2]}" if "." in name else name):
                if known in NEVER:
                    yield node.lineno, name, NEVER[known]
                    break
        if not isinstance(node, ast.Call):
            continue
        name = full_name(node.func, imported)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        constant = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        if name == "torch.load" and constant.get("weights_only") is not True:
            yield node.lineno, name, "without weights_only=True"
        if "allow_pickle" in given and constant.get("allow_pickle") is not False:
            yield node.lineno, name or "*", "allow_pickle"
        if "shell" in given and constant.get("shell") is not False:
            yield node.lineno, name or "*", "shell"
        if "trust_remote_code" in given and constant.get("trust_remote_code") is not False:
            yield node.lineno, name or "*", "trust_remote_code"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_nothing_that_runs_what_a_file_says(path: Path) -> None:
    place = path.relative_to(REPOSITORY).as_posix()
    found = [
        f"{place}:{line}: {name} {fault}"
        for line, name, fault in faults(path.read_text())
        if (place, name) not in ALLOWED
    ]
    assert not found


def test_each_exception_is_in_use() -> None:
    assert len(SOURCES) > 60
    for place, name in ALLOWED:
        assert name in [found for _, found, _ in faults((REPOSITORY / place).read_text())], f"{place} has no {name}"


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=trusted)",
        "from torch import load\nload(f)",
        "import torch as t\nt.load(f)",
        "import pickle\npickle.load(f)",
        "import pickle\nread = pickle.loads",
        "from pickle import loads as read\nread(b)",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import numpy as np\nnp.load(f, allow_pickle=flag)",
        "import yaml\nyaml.load(f)",
        "eval(text)",
        "exec(text)",
        "map(eval, texts)",
        "__import__(name)",
        "import importlib\nimportlib.import_module(name)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "from subprocess import Popen\nPopen(command, shell=flag)",
        "import os\nos.system(command)",
        "from os import popen\npopen(command)",
        "from pathlib import Path\nPath(x).expanduser()",
        "import os\nos.path.expandvars(x)",
        "from datasets import load_dataset\nload_dataset(x, trust_remote_code=True)",
    ],
)
def test_each_of_them_is_noticed(line: str) -> None:
    assert list(faults(line))


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import numpy as np\nnp.load(f)\nnp.load(f, allow_pickle=False)",
        "import yaml\nyaml.safe_load(f)",
        "model.eval()\nmodel.compile()\nregex.load(x)",
        "import subprocess\nsubprocess.run(command)\nsubprocess.run(command, shell=False)",
        "import torch\ntorch.compile(model)",
        "import json\njson.load(f)",
    ],
)
def test_nothing_else_is(line: str) -> None:
    assert not list(faults(line))
