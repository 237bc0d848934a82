"""Who may import whom, by reading every import statement, and what is loaded when."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import titan_prores
from titan_prores.config.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
FACE = re.findall(r"^from \.\S+ import \w+ as (\w+)", (ROOT / "titan_prores/__init__.pyi").read_text(), re.MULTILINE)
HEAVY = {"torchao", "datasets", "tokenizers", "wandb", "pyarrow", "zstandard", "transformers", "lm_eval", "matplotlib"}


def imports(source: str, *, top_only: bool = False) -> set[str]:
    """Dotted names that a module imports; with `top_only` just those that importing the module imports too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(node.args[0].value)
        if top_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if top_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


# Rooms and modules of titan_prores, each beside those of its rank; one imports only what stands on an earlier line, or
# in its own room. Imports for types count as any other.
RANKS = (
    {"config"},
    {"output", "prores"},
    {"distributed"},
    {"protocols"},
    {"data"},
    {"model"},
    {"checkpoint", "training"},
    {"build"},
    {"dry_run", "trainer"},
    {"tools"},
    {"cli"},
    {"__main__"},
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}


def breaches(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the checkout."""
    wrong = []
    here = path.parts[1].removesuffix(".py")
    for name in sorted(imports(source)):
        package, *rest = name.split(".")
        if package in ("scripts", "tests", "components"):
            wrong.append(f"{path} imports {name}")
        if package != "titan_prores" or not rest:
            continue
        if path.parts[0] == "components":
            if rest[0] == "components" and rest[1:2] != [here]:
                wrong.append(f"{path} imports {name}, of another kind")
            if rest[0] not in ("components", "prores", *FACE) and rest[0] != here:
                wrong.append(f"{path} imports {name}, which is not in the public face")
        elif rest[0] == "components":
            wrong.append(f"{path} imports the component {name}")
        elif rest[0] in RANK and rest[0] != here and RANK[rest[0]] >= RANK[here]:
            wrong.append(f"{path} imports {name}, of a room above its own")
        elif rest[0] not in RANK and rest[0] != "__version__":
            wrong.append(f"{path} imports {name} from the public face, which is for others")
    if path.parts[0] == "components":
        heavy = {name for name in imports(source, top_only=True) if name.split(".")[0] in HEAVY}
        wrong += [f"{path} imports {name} at its top" for name in sorted(heavy)]
    return wrong


def test_no_module_is_outside_of_a_room():
    modules = {path.stem for path in (ROOT / "titan_prores").glob("*.py")}
    assert modules == {"__init__", "__main__", "cli", "trainer", "build"}
    rooms = {path.name for path in (ROOT / "titan_prores").iterdir() if path.is_dir() and not path.is_symlink()}
    assert rooms - {"__pycache__"} == {name for name in RANK if name not in modules}


def test_the_public_face_is_there_and_each_name_is_what_its_module_has():
    assert len(FACE) > 60 and set(titan_prores.__all__) == set(FACE)
    for name in FACE:
        assert getattr(titan_prores, name) is not None
    assert titan_prores.Section.__module__ == "titan_prores.config.sections"
    with pytest.raises(AttributeError):
        getattr(titan_prores, "no_such_name")  # noqa: B009


def test_directions():
    files = [*sorted((ROOT / "components").rglob("*.py"))]
    files += [f for f in sorted((ROOT / "titan_prores").rglob("*.py")) if f.parts[len(ROOT.parts) + 1] != "components"]
    assert len(files) > 100
    found = [b for file in files for b in breaches(file.relative_to(ROOT), file.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("titan_prores/config/x.py", "import titan_prores.components.model.llama"),
        ("titan_prores/config/x.py", "def f():\n    from titan_prores.components.model import llama"),
        (
            "titan_prores/config/x.py",
            "import importlib\nimportlib.import_module('titan_prores.components.model.llama')",
        ),
        ("components/loss/x.py", "from titan_prores.components.model.llama import Llama"),
        ("components/loss/x.py", "from titan_prores.components import model"),
        ("titan_prores/model/x.py", "from titan_prores.tools import sweep"),
        ("titan_prores/model/x.py", "def f():\n    from titan_prores.trainer import Trainer"),
        ("titan_prores/model/x.py", "if TYPE_CHECKING:\n    from titan_prores.training.metrics_hub import MetricsHub"),
        ("titan_prores/model/x.py", "from titan_prores import Section"),
        ("components/loss/x.py", "from titan_prores.config.sections import Section"),
        ("components/loss/x.py", "import components.loss.y"),
        ("components/loss/x.py", "import torchao.float8"),
        ("components/loss/x.py", "try:\n    from datasets import load\nexcept ImportError:\n    pass"),
        ("components/loss/x.py", "class A:\n    import wandb"),
        ("components/loss/x.py", "import scripts.train"),
    ],
)
def test_the_test_sees_a_breach(path, source):
    assert breaches(Path(path), source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from titan_prores import Section\nfrom titan_prores.prores import SCHEDULES",
        "from titan_prores.components.loss.y import z",
        "def f():\n    import wandb",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import datasets",
    ],
)
def test_the_test_lets_the_rest_pass(source):
    assert breaches(Path("components/loss/x.py"), source) == []


def test_folders_are_kinds():
    folders = {f.name for f in (ROOT / "components").iterdir() if f.is_dir() and f.name != "__pycache__"}
    assert folders == set(KINDS)


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_first_pass_loads_no_torch_and_no_component():
    loaded = loaded_after("from titan_prores import cli")
    assert {"titan_prores.cli", "pydantic"} <= loaded
    assert not loaded & ({"torch", "numpy", "rich", "tiktoken", "components"} | HEAVY)


def test_all_components_load_nothing_heavy():
    loaded = loaded_after("from titan_prores import cli\ncli.list_components()")
    assert "titan_prores.components.model.llama" in loaded
    assert not loaded & (HEAVY - {"torchao", "zstandard"})  # those two, other packages load where they find them


def test_names_of_tracked_files():
    """No = or , which shells and URLs treat specially, and no figure but as PNG."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = listed.stdout.split("\0")
    assert len(names) > 100
    assert [name for name in names if set("=,") & set(name) or name.endswith((".svg", ".pdf"))] == []


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_scripts_work_from_a_checkout_without_an_install(script, tmp_path):
    """-S leaves out what an editable install hooks into Python; the packages themselves are named instead."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    command = [sys.executable, "-S", str(ROOT / "scripts" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
