"""README and pages: every command, recipe and Python block on them works, every link leads somewhere."""

from __future__ import annotations

import ast
import importlib
import math
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.unit.test_imports import RANKS
from titan_prores import NORM_SCHEMES, WEIGHT_INITS, cli
from titan_prores.config import command_line, registry, sources
from titan_prores.config.engine_sections import ENGINE_SECTIONS, SECTIONS
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.kinds import KINDS
from titan_prores.config.recipe import Recipe
from titan_prores.config.renamed_keys import RENAMED_KEYS
from titan_prores.config.resolve import resolve
from titan_prores.prores import ProRes, ResidualAdd, Schedule
from titan_prores.tools import benchmark, checkpoint, gpu_check, launch
from titan_prores.tools.plots import command as plots
from titan_prores.tools.sweep import command as sweeps
from titan_prores.tools.sweep import plan

REPOSITORY = Path(__file__).parents[2]
README, RELIABILITY = REPOSITORY / "README.md", REPOSITORY / "docs" / "reliability.md"
PAGES = [
    page
    for page in (
        README,
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "CHANGELOG.md",
        REPOSITORY / "train_configs" / "paper" / "README.md",
        *sorted((REPOSITORY / "docs").rglob("*.md")),
    )
    if page.is_file()
]
# Its blocks are files of a plug-in, which a test of its own puts together.
WRITTEN_BY_HAND = [page for page in PAGES if page.name != "extending.md" and page.parent.name != "reference"]


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for of, block in found if of == language]


def each(pages: list[Path], language: str) -> list:
    return [
        pytest.param(page, block, id=f"{name(page)}-{number}")
        for page in pages
        for number, block in enumerate(blocks(page, language))
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory like a checkout, with the files whose name is the first line of a block: `# my.toml`."""
    for link in ("docs", "scripts", "tests", "train_configs"):
        (tmp_path / link).symlink_to(REPOSITORY / link)
    for page in WRITTEN_BY_HAND:
        for block in (*blocks(page, "python"), *blocks(page, "toml")):
            if found := re.match(r"# ([\w.-]+\.(?:py|toml))\n", block):
                (tmp_path / found[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- Commands ---------------------------------------------------------------------------------------------------------


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines for line in line.split(" && ")]
    return [each for each in words if each]


def resolved(arguments: list[str], world_size: int = 1) -> Recipe | None:
    """The recipe that a command line trains; None where it asks for help instead, which is printed."""
    options = command_line.parse(arguments)
    if options.help is not None or options.list_components is not None:
        assert cli.run(["train", *arguments]) == 0
        return None
    return resolve(sources.load(options.config, options.overrides, registry.DEFAULTS), options.world_size or world_size)


def try_launch(arguments: list[str]) -> None:
    options, rest = launch.parser().parse_known_args(arguments)
    resolved(rest, options.nproc or 1)


def try_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    assert Path(options.training_script).samefile("scripts/train.py")
    resolved(options.training_script_args, int(options.nproc_per_node))


def try_sbatch(arguments: list[str]) -> None:
    script = arguments.index("scripts/slurm.sh")
    resolved(arguments[script + 1 :], 32)


def try_sweep(arguments: list[str]) -> None:
    options, options.settings = sweeps._parser().parse_known_args(arguments)
    sweep = sweeps._sweep(options)
    sweep.selection(sweep.planned, options.only)


def try_plot(arguments: list[str]) -> None:
    options, rest = plots.parser().parse_known_args(arguments)
    if config := getattr(options, "config", None):
        resolved(["--config", str(config), *rest])
    else:
        assert not rest


def try_benchmark(arguments: list[str]) -> None:
    options, overrides = benchmark.parser().parse_known_args(arguments)
    if options.json:
        options.json.parent.mkdir(exist_ok=True)
    benchmark.setup_of(options, overrides, Path())


COMMANDS = {
    "train": resolved,
    "check": lambda arguments: resolved(["--check", *arguments]),
    "components": lambda arguments: cli.run(["components", *arguments]),
    "launch": try_launch,
    "sweep": try_sweep,
    "plot": try_plot,
    "checkpoint": lambda arguments: checkpoint._parser().parse_args(arguments),
    "benchmark": try_benchmark,
    "gpu-check": lambda arguments: gpu_check.parser().parse_args(arguments),
}


def try_module(module: str, *arguments: str) -> None:
    if module == "pytest":
        assert all(Path(path).exists() for path in arguments if path.startswith("tests"))
    elif module == "titan_prores":
        try_command(["titan-prores", *arguments])
    elif module == "tests.distributed.matrix":
        with pytest.raises(SystemExit) as end:
            importlib.import_module(module).main([*arguments, "--help"])
        assert end.value.code == 0
    else:
        assert module == "tests.integration.torture"
        assert importlib.import_module(module).main([*arguments, "--list"]) == 0


def try_script(script: str, *arguments: str) -> None:
    """A shell script, of which the arguments are looked at, or a Python script, which is a command by another name."""
    path = Path(script)
    if path.suffix == ".py":
        assert path.is_file() and path.parent.name == "scripts"
        command = path.stem.replace("_", "-")
        with_command = arguments[:1] and not arguments[0].startswith("-")
        try_command(["titan-prores", *([] if command == "train" and with_command else [command]), *arguments])
        return
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if path.name == "quickstart.sh":
        resolved(["--config", "train_configs/quickstart.toml", *arguments], 2)
    else:
        assert path.name == "test.sh"
        assert all(
            word in ("--all", "-k") or not word.startswith(("-", "tests")) or Path(word).exists() for word in arguments
        )


def try_pip(install: str, *what: str) -> None:
    extras = (REPOSITORY / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    for word in what:
        if found := re.search(r"\[(.+)\]", word):
            assert set(found[1].split(",")) <= set(re.findall(r"^(\w+) = ", extras, re.M)), word


def try_command(words: list[str]) -> None:
    """Do of a command what takes no time: parse it, resolve its recipe, see that its files are there."""
    program, *arguments = words
    match program:
        case "titan-prores":
            COMMANDS[arguments[0]](arguments[1:])
        case "python" if arguments[0] == "-m":
            try_module(*arguments[1:])
        case "python" | "bash":
            try_script(*arguments)
        case "pip":
            try_pip(*arguments)
        case "torchrun":
            try_torchrun(arguments)
        case "sbatch":
            try_sbatch(arguments)
        case "ruff" | "tensorboard" | "source":
            pass
        case _:
            raise AssertionError(f"a program that this test does not know: {program}")


@pytest.mark.parametrize(("page", "block"), each(PAGES, "bash"))
def test_commands_are_right(page: Path, block: str, folder: Path) -> None:
    for words in commands(block):
        try_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "titan-prores train --config my.toml --training.stepz=5",
        "titan-prores launch --nprocs 2 --config my.toml",
        "titan-prores check --config nowhere.toml",
        "titan-prores train --help lr_scheduler.wsdd",
        "titan-prores plot alpha --layer 3",
        "titan-prores sweep nowhere.toml --list",
        "titan-prores benchmark --only nothing",
        "titan-prores checkpoint prune outputs/x",
        "titan-prores trian --config my.toml",
        "torchrun --nproc_per_node 2 scripts/tarin.py --config my.toml",
        "torchrun --nproc_per_node 2 scripts/train.py --config my.toml --optimizer.lrr=1",
        "python scripts/gone.py",
        "python -m tests.integration.torture --falts 3",
        "bash scripts/quickstart.sh --model.dimm=3",
        "pip install 'titan-prores[everything]'",
        "docker run titan-prores",
    ],
)
def test_a_wrong_command_is_noticed(line: str, folder: Path) -> None:
    with pytest.raises((ConfigError, ConfigErrors, AssertionError, KeyError, OSError, SystemExit)):
        [words] = commands(line)
        try_command(words)


# --- Recipes, sweeps and Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "block"), each(WRITTEN_BY_HAND, "toml"))
def test_recipes_and_sweeps_are_right(page: Path, block: str, folder: Path) -> None:
    """A whole recipe as it is, a part of one on top of the debug recipe, a sweep by planning its runs."""
    if found := re.match(r"# added to (\S+)\n", block):
        block = (folder / found[1]).read_text() + block
    file = folder / "block.toml"
    if re.search(r"^recipe = ", block, re.M):
        file.write_text(block)
        sweep = plan.load(file)
        # The baselines of seed 0 are runs of the first grid, whichever is the best.
        for metric in (lambda run: None, lambda run: float(run.values["seed"])):
            assert len(sweep.runs(metric)) == 2 * 3 + 2 * 3 * 2 - 2
        return
    whole = "[training]" in block and "[model]" in block
    file.write_text(block if whole else f'base = "{REPOSITORY / "train_configs" / "debug.toml"}"\n{block}')
    tree = sources.load(file, [], registry.DEFAULTS)
    resolve(tree, 8 if whole else 4)  # the debug recipe's batch can be shared by four ranks
    # What a block says is in the tree: a table that follows another one by mistake would not be noticed otherwise.
    assert set(sources._parse(block)) <= {*tree.values, "import", "base"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.add = nn.Linear(4, 4), ResidualAdd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, self.f(x))


class MyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("page", [page for page in WRITTEN_BY_HAND if blocks(page, "python")], ids=name)
def test_python_runs(page: Path) -> None:
    """All blocks of a page, one after another, in a program that has a model, batches and an optimizer."""
    x = torch.randn(2, 4)
    names = {
        "ProRes": ProRes,
        "Schedule": Schedule,
        "model": MyTransformer(),
        "step": 3,
        "MyTransformer": MyTransformer,
        "batches": [(x, x)] * 4,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": SimpleNamespace(step=lambda: None, zero_grad=lambda: None),
    }
    for block in blocks(page, "python"):
        exec(block, names)
        if "in enumerate(batches)" in block:
            assert names["prores"].values.tolist() == [torch.tensor(3 / (1000 * n)).item() for n in (1, 2, 3)]
        if "lambda step" in block:
            names["prores"].set_step(1000)
            assert names["prores"].values.tolist() == pytest.approx([1 - math.exp(-1 / n) for n in (1, 2, 3)])
    if "Block" in names:
        block = names["Block"](4)
        torch.testing.assert_close(block(x), x + block.f(block.norm(x)))


def test_the_plain_loop_is_short() -> None:
    loop = next(block for block in blocks(README, "python") if "batches" in block)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 8


# --- Text -------------------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """A page without its blocks of code and `code`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def links(text: str) -> list[str]:
    found = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)]
    return [link for link in found if not re.match(r"https?:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    found: set[str] = set()
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(each for each in (anchor, *(f"{anchor}-{n}" for n in range(1, 100))) if each not in found))
    return found


def broken(page: Path) -> list[str]:
    wrong = []
    for link in links(prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A page (really)\n```\n# no heading\n```\n")
    page.write_text(
        "[a](other.md) [b](gone.md) [c](other.md#a-page-really) [d](other.md#no-heading) `[e](x)` [f](https://x.y)\n"
        '<img src="gone.png">\n[g](#here)\n## Here\n'
    )
    assert broken(page) == ["gone.md", "other.md#no-heading", "gone.png"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set(), [README]
    while left:
        page = left.pop().resolve()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            left += [page.parent / link.partition("#")[0] for link in links(prose(page)) if not link.startswith("#")]
    assert set(PAGES) <= reached


def test_the_readme_is_short() -> None:
    text = README.read_bytes()
    assert len(text) <= 12_000 and len(text.splitlines()) <= 200


FILES = (".py", ".toml", ".json", ".jsonl", ".model", ".gz")  # names of files look like keys


def known_keys() -> set[str]:
    """Keys of recipes and names of components, dotted, and each part of a key that is a table."""
    keys = {f"{section}.{key}" for section, declared in ENGINE_SECTIONS.items() for key in declared.model_fields}
    for kind, declared in KINDS.items():
        for component in registry.names(kind):
            table = declared.section if declared.section and not declared.many else f"{declared.section}.{component}"
            fields = registry.lookup(kind, component).Config.model_fields
            keys |= {f"{kind}.{component}", table, *(f"{table}.{key}" for key in ("name", "enabled", *fields))}
    return keys


def test_keys_in_the_text_exist() -> None:
    known = known_keys()
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # has those that were
        for text in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)):
            found = re.fullmatch(r"(?:--)?(([a-z_]+)\.[a-z][\w.-]*\w)(?: = .+|=.*)?", text)
            if found and found[2] in {*SECTIONS, *KINDS} and Path(found[1]).suffix not in FILES:
                assert found[1] in known, f"{name(page)}: {text}"


def built_in(kind: str) -> list[str]:
    return [each for each in registry.names(kind) if registry.lookup(kind, each).__module__.startswith("titan_prores.")]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("norms-and-inits", lambda: [*NORM_SCHEMES, *WEIGHT_INITS]),
        ("prores", lambda: built_in("residual_schedule")),
        ("recipes", lambda: built_in("transform")),
        ("data", lambda: built_in("dataset") + built_in("tokenizer")),
    ],
)
def test_the_tables_are_complete(page: str, names: Callable[[], list[str]]) -> None:
    """Every name is in the first column of a table."""
    rows = re.findall(r"^\| (.*?) \|", (REPOSITORY / "docs" / f"{page}.md").read_text(), re.M)
    shown = {code for row in rows for code in re.findall(r"`([^`]+)`", row)}
    assert len(names()) > 3 and set(names()) <= shown


def test_the_changelog_has_every_renamed_key() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert all(f"| `{old}` | `{new}` |" in text for old, new in RENAMED_KEYS.items())


def test_the_rooms_are_named() -> None:
    """In the README's tree all of them, in CONTRIBUTING in the order in which they import each other."""
    [tree] = [block for block in blocks(README, "") if block.startswith("titan_prores/")]
    rooms = {path.parent.name for path in (REPOSITORY / "titan_prores").glob("*/__init__.py") if path.parent.is_dir()}
    assert set(re.findall(r"^  (\w+)/ ", tree, re.M)) == rooms - {"components"}
    folders = re.findall(r"^(\w+)/ ", tree, re.M)
    assert all((REPOSITORY / folder).is_dir() for folder in folders) and len(folders) == 6
    table = (
        (REPOSITORY / "CONTRIBUTING.md")
        .read_text()
        .split("| rooms | what they hold |\n|---|---|\n")[1]
        .split("\n\n")[0]
    )
    ranks = [set(re.findall(r"`(\w+)(?:\.py)?`", row.split(" | ")[0])) for row in table.splitlines()]
    assert ranks == [rank for rank in RANKS if rank != {"__main__"}]


def test_words_have_one_meaning() -> None:
    words = re.findall(
        r"^\| ([\w -]+) \| .+ \|$", (REPOSITORY / "CONTRIBUTING.md").read_text().split("## Glossary")[1], re.M
    )
    assert words[0] == "word" and len(words) > 30 and words[1:] == sorted(set(words[1:]))


def defined(tests: Path) -> set[str]:
    """Names of test files, and of the test functions in them, that pytest would collect."""
    found = set()
    for path in tests.rglob("test_*.py"):
        found.add(path.name)
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
            found |= {each.name for each in inside if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return {name for name in found if name.startswith("test_")}


def test_every_test_that_a_page_names_exists() -> None:
    named = {test for page in PAGES for test in re.findall(r"`(test_[^`]*)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 30 and not named - defined(REPOSITORY / "tests")
    promises = RELIABILITY.read_text(encoding="utf-8").split("## Promises\n\n- ")[1].split("\n\n")[0].split("\n- ")
    assert len(promises) > 20
    for promise in promises:
        _, *proofs = re.split(r"\s+Tests?: ", promise)
        test = r"`test_\w+(\.py)?`"
        assert len(proofs) == 1 and re.fullmatch(rf"{test}(,\s+{test})*", proofs[0]), f"no test proves this: {promise}"


def test_a_test_that_is_not_there_would_be_missed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_one(): ...\ndef helper():\n    def test_inside(): ...\n# def test_two(): ...\n"
        "class TestThree:\n    def test_four(self): ..."
    )
    assert defined(tmp_path) == {"test_a.py", "test_one", "test_four"}
