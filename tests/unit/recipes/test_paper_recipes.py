"""The recipes of the paper's experiments, and what `--check` says of them without data, tokenizer or ranks."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_prores.build import build_components
from titan_prores.config import registry, sources
from titan_prores.config.keys import dotted
from titan_prores.config.layout import plan_mesh
from titan_prores.config.recipe import Recipe, flatten
from titan_prores.config.renamed_keys import RENAMED_KEYS
from titan_prores.config.resolve import resolve
from titan_prores.dry_run.report import report
from titan_prores.tools.sweep import command, plan

ROOT = Path(__file__).parents[3]
PAPER = ROOT / "train_configs" / "paper"
# folder -> dim, ffn_dim, heads, layers, peak learning rate, W = T * L; as the paper and its code have them.
SIZES = {
    "71m": (512, 1368, 8, 12, 2e-3, 12_000),
    "71m-24": (512, 1368, 8, 24, 2e-3, 24_000),
    "71m-48": (512, 1368, 8, 48, 2e-3, 48_000),
    "71m-72": (512, 1368, 8, 72, 2e-3, 72_000),
    "71m-96": (512, 1368, 8, 96, 2e-3, 48_000),
    "71m-120": (512, 1368, 8, 120, 2e-3, 60_000),
    "130m": (768, 2048, 12, 12, 2e-3, 12_000),
    "350m": (1024, 2736, 16, 24, 1e-3, 24_000),
    "1.3b": (2048, 5632, 32, 24, 6e-4, 24_000),
    "3b": (2560, 6848, 32, 32, 6e-4, 32_000),
    "7b": (4096, 11008, 32, 32, 3e-4, 32_000),
}
TABLE_2 = ("130m", "350m", "1.3b")
# Peak learning rates of the paper that are not Pre-LN's, and a guess of ours for 71M; elsewhere it is half of Pre-LN's.
RATES = {
    ("130m", "post"): 1e-3,
    ("350m", "post"): 5e-4,
    ("1.3b", "post"): 3e-4,
    ("130m", "deepnorm"): 1.5e-3,
    ("350m", "deepnorm"): 1e-3,
    ("1.3b", "deepnorm"): 3e-4,
    ("71m", "deepnorm"): 1.5e-3,
}
# recipe -> norm, init, warmup of the learning rate
SCHEMES = {
    "pre": ("pre", "trunc_normal", 2000),
    "pre_ds": ("pre", "ds", 2000),
    "pre_scaled": ("pre", "scaled", 2000),
    "sandwich": ("sandwich", "trunc_normal", 2000),
    "lns": ("lns", "trunc_normal", 2000),
    "post": ("post", "trunc_normal", 10_000),
    "deepnorm": ("deepnorm", "deepnorm", 10_000),
}
PAIRED = ("table2.toml", "table7.toml", "beyond.toml", "fig3.toml", "fig5.toml")
# The page's table of commands: which runs -> the sweep, and --only with placeholders in capitals.
PAGE = (PAPER / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    runs: (file, only) for runs, file, only in re.findall(r"^\| ([^|]+) \| `(\S+\.toml) --only (\S+)` \|$", PAGE, re.M)
}


@cache
def recipe(name: str, world_size: int, *overrides: str) -> Recipe:
    tree = sources.load(ROOT / f"train_configs/{name}.toml", overrides, registry.DEFAULTS)
    return resolve(tree, world_size)


@cache
def sweep_of(file: str) -> tuple[plan.Sweep, tuple[plan.Run, ...]]:
    sweep = plan.load(PAPER / file)
    return sweep, tuple(sweep.runs(lambda run: None))


def runs_of(file: str, only: str) -> list[plan.Run]:
    """Those that `titan-prores sweep FILE --only ONLY` starts."""
    sweep, runs = sweep_of(file)
    return list(filter(sweep.selection(runs, [only]), runs))


def recipe_of(file: str, only: str) -> Recipe:
    """Of the one run."""
    (run,) = runs_of(file, only)
    return sweep_recipe(sweep_of(file)[0], run)


def sweep_recipe(sweep: plan.Sweep, run: plan.Run) -> Recipe:
    tree = sources.load(sweep.recipe_of(run), sweep.overrides(run), registry.DEFAULTS)
    return resolve(tree, sweep.file.ranks)


# Every recipe and every run of a sweep as it was when each recipe had a file of its own, without job.description and
# job.dump_folder. `like` names the one that it differs from in the other keys; null means that it lacks the key.
# Written once by the code of then, never rewritten.
BEFORE = json.loads(Path(__file__).with_name("paper_recipes.json").read_text(encoding="utf-8"))
KEYS = {RENAMED_KEYS.get(key, key) for table in BEFORE.values() for key in table}


def stored(name: str) -> dict[str, Any]:
    changes = dict(BEFORE[name])
    before = (stored(changes.pop("like")) if "like" in changes else {}) | changes
    return {RENAMED_KEYS.get(key, key): value for key, value in before.items()}


def before(name: str) -> dict[str, Any]:
    """What a command of today must make of what had this name."""
    table = stored(name)
    if name.startswith("fig1.toml: ") and not table["transforms.prores.enabled"] and table["model.n_layers"] > 72:
        # The sweep stood on the recipe of 12 layers, now on that of the depth. Where ProRes is off its T has no effect.
        table["transforms.prores.residual_schedule.T"] = 500.0
    return {key: value for key, value in table.items() if value is not None}


def now(built: Recipe) -> dict[str, Any]:
    """What BEFORE says of a recipe: the keys that there were."""
    table = {dotted(key): value for key, value in flatten(built.to_dict()).items()}
    return json.loads(json.dumps({key: value for key, value in table.items() if key in KEYS}))


def moved(name: str) -> tuple[str, dict[str, str]]:
    """Which line of COMMANDS launches what had this name, and what its placeholders are."""
    file, _, run = name.partition(".toml: ")
    values = dict(part.split("=") for part in run.split(",")) if run else {}
    if file == "table6":
        return "Table 6", {"NORM": values["norm"], "SCHEDULE": values["schedule"]}
    if file.startswith("lr_search_"):
        size = file.removeprefix("lr_search_")
        return "appendix A", {"SIZE": size, "METHOD": values["method"], "LR": values["lr"]}
    if file == "fig1":
        size, method = f"71m-{values['layers']}", values["method"].removesuffix("_prores")
        if method == "deepnorm":
            return "Figs. 1 and 2, DeepNorm", {"SIZE": size, "LR": values["lr"]}
        prores = {None: "off", "equal-12k": "equal-12k"}.get(values.get("alpha"), "on")
        return "Figs. 1 and 2", {"SIZE": size, "METHOD": method, "PRORES": prores}
    folder, _, scheme = name.removesuffix(".toml").rpartition("/")
    method, prores = scheme.removesuffix("_prores"), "on" if scheme.endswith("_prores") else "off"
    if folder.startswith("climbmix/"):
        return "Table 7", {"SIZE": folder.removeprefix("climbmix/"), "PRORES": prores}
    table = "Table 2" if folder in TABLE_2 and method in SCHEMES else "beyond the paper"
    return table, {"SIZE": folder, "METHOD": method, "PRORES": prores}


def launched(runs: str, values: Mapping[str, str]) -> tuple[str, str]:
    """Sweep and --only of a line of COMMANDS."""
    file, only = COMMANDS[runs]
    assert set(re.findall(r"[A-Z]{2,}", only)) == set(values)
    return file, re.sub(r"[A-Z]{2,}", lambda match: values[match[0]], only)


UNMOVED = {"base.toml": "paper/base", "../llama_7b.toml": "llama_7b"}


@pytest.mark.parametrize("table", sorted({moved(name)[0] for name in BEFORE if name not in UNMOVED}))
def test_the_page_s_command_launches_what_each_file_was(table: str) -> None:
    names = [name for name in BEFORE if name not in UNMOVED and moved(name)[0] == table]
    for name in names:
        assert now(recipe_of(*launched(*moved(name)))) == before(name), name
    # A negative control: what is left out of the comparison is not what tells runs apart.
    assert len({json.dumps(before(name), sort_keys=True) for name in names}) == len(names)


def test_other_recipes_are_what_they_were() -> None:
    assert {name: now(recipe(new, 8)) for name, new in UNMOVED.items()} == {name: before(name) for name in UNMOVED}
    for size in SIZES:
        assert now(recipe(f"paper/{size}", 8)) == before(f"{size}/pre.toml"), "by itself Pre-LN without ProRes"
    for prores, scheme in (("off", "pre"), ("on", "pre_prores")):
        assert now(recipe_of(*launched("Fig. 5", {"PRORES": prores}))) == before(f"7b/{scheme}.toml")
        probed = recipe_of(*launched("Figs. 3 and 4", {"PRORES": prores}))
        assert now(probed) == before(f"1.3b/{scheme}.toml")
        assert {"activation_norm", "residual_cosine"} <= {spec.name for spec in probed.sets["metrics"]}
        table_3 = launched("Tables 3 and 4", {"METHOD": "lns", "PRORES": prores})
        assert table_3 == launched("Table 2", {"SIZE": "1.3b", "METHOD": "lns", "PRORES": prores})


def test_the_page_names_every_sweep_and_every_run_of_it() -> None:
    sweeps = {path.name for path in PAPER.glob("*.toml") if "folder" in sources.load(path).values}
    assert {file for file, _ in COMMANDS.values()} == sweeps
    found: dict[str, set[str]] = {"fig3.toml": set(), "fig5.toml": set()}
    for prores in ("off", "on"):
        for table in ("Figs. 3 and 4", "Fig. 5"):
            file, only = launched(table, {"PRORES": prores})
            found[file] |= {run.name for run in runs_of(file, only)}
    for name in BEFORE.keys() - UNMOVED:
        file, only = launched(*moved(name))
        found.setdefault(file, set()).update(run.name for run in runs_of(file, only))
    assert found == {file: {run.name for run in sweep_of(file)[1]} for file in sweeps}
    folders = [f"{sweep_of(file)[0].folder}/{name}" for file, names in found.items() for name in names]
    assert len(folders) == len(set(folders)), "two runs would write into one folder"


def test_examples_of_the_page() -> None:
    lines = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).replace("\\\n", "").splitlines()
    programs = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]
    for words in programs:
        if words[:2] == ["titan-prores", "sweep"]:
            (file,) = (Path(word).relative_to("train_configs/paper") for word in words if word.endswith(".toml"))
            options = command._parser().parse_args(words[2:])
            assert runs_of(str(file), *options.only) if options.only else options.collect
        else:
            name = words[words.index("--config") + 1].removeprefix("train_configs/").removesuffix(".toml")
            recipe(name, 8, *(word for word in words if word.startswith("--") and "." in word))
    assert len(programs) == 8


def test_the_sweep_s_command_line_is_the_run(capsys: pytest.CaptureFixture) -> None:
    file, only = launched("Table 2", {"SIZE": "350m", "METHOD": "post", "PRORES": "on"})
    assert command.main([str(PAPER / file), "--only", only, "--dry-run"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))
    words = shlex.split(line)
    assert words[words.index("launch") :][:3] == ["launch", "--nproc", "8"]
    start = words.index("--config")
    tree = sources.load(Path(words[start + 1]), words[start + 2 :], registry.DEFAULTS)
    assert now(resolve(tree, 8)) == before("350m/post_prores.toml") != before("350m/post.toml")


def held(report: str) -> dict[str, int]:
    """The lines of `bytes per rank`, those of one name added up."""
    found: dict[str, int] = {}
    for line in report.split("\nbytes per rank ")[1].splitlines()[1:]:
        if match := re.match(r"  (\w+) +([\d,]+) +\(", line):
            found[match[1]] = found.get(match[1], 0) + int(match[2].replace(",", ""))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_recipes_of_a_size_are_the_paper_s(size: str) -> None:
    dim, ffn_dim, n_heads, n_layers, pre_lr, total = SIZES[size]
    for scheme, (norm, init, warmup) in SCHEMES.items():
        if size not in TABLE_2 and scheme in ("pre_ds", "pre_scaled"):
            continue
        built = recipe_of(*launched(*moved(f"{size}/{scheme}_prores.toml")))
        model, optimizer, training = built.slots["model"].config, built.slots["optimizer"].config, built.training
        assert (model.dim, model.ffn_dim, model.n_heads, model.n_layers) == (dim, ffn_dim, n_heads, n_layers)
        assert (model.vocab_size, model.norm_eps, model.tie_embeddings) == (32000, 1e-5, False)
        assert (model.norm, model.init, model.init_std) == (norm, init, 0.02)
        lr = RATES.get((size, scheme), pre_lr / 2 if scheme in ("post", "deepnorm") else pre_lr)
        assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (lr, 0.9, 0.95, 0.1)
        tokens = (training.seq_len, training.global_batch_size, training.steps)
        assert (*tokens, training.max_norm) == (1024, 512, 100_000, 1)
        assert training.mixed_precision_param == "bfloat16" and training.dtype == "float32"
        schedule = built.slots["lr_scheduler"].build(total_steps=training.steps)
        assert [schedule.factor(t) for t in (0, warmup // 2, warmup, 90_000, 95_000)] == [0, 0.5, 1, 1, 0.5]
        specs = {spec.name: spec.config for spec in built.sets["transforms"]}
        assert "compile" in specs and ("activation_checkpoint" in specs) == (size in ("3b", "7b"))
        alpha = specs["prores"].residual_schedule.build(n_layers=n_layers)
        assert specs["prores"].residual_schedule.name == "linear"
        assert alpha.alpha(total)[-1] == 1 > alpha.alpha(total - 1)[-1]


@pytest.mark.parametrize("file", PAIRED)
def test_a_pair_differs_in_prores_alone(file: str) -> None:
    sweep, runs = sweep_of(file)
    assert (sweep.pair.axis, sweep.pair.baseline, sweep.pair.treatment) == ("prores", "off", "on")
    for run in runs[::2]:
        both = [run, next(each for each in runs if each.name == run.name.replace("prores=off", "prores=on"))]
        without, with_prores = (flatten(sweep_recipe(sweep, each).to_dict()) for each in both)
        differing = {key for key in without | with_prores if without.get(key) != with_prores.get(key)}
        assert differing == {("job", "dump_folder"), ("transforms", "prores", "enabled")}
        assert with_prores["transforms", "prores", "enabled"] is True


def test_data_sets_and_the_run_without_lr_warmup() -> None:
    for file in PAIRED:
        sweep, runs = sweep_of(file)
        data = {sweep_recipe(sweep, run).slots["dataset"].config for run in runs}
        climbmix = file == "table7.toml"
        expected = ("OptimalScale/ClimbMix", "default") if climbmix else ("allenai/c4", "en")
        assert {(each.path, each.subset) for each in data} == {expected}
    runs = sweep_of("table7.toml")[1]
    assert [run.values["size"] for run in runs[::2]] == list(TABLE_2)
    for size in TABLE_2:
        only = f"size={size},method=pre,prores=off"
        same = [flatten(recipe_of(file, only).to_dict()) for file in ("table2.toml", "table7.toml")]
        assert {key[0] for key in same[0] if same[0][key] != same[1][key]} == {"job", "dataset"}
    built = recipe_of("beyond.toml", "method=pre_no_lr_warmup,prores=off")
    assert built.slots["lr_scheduler"].config.warmup_steps == 0


DEEP = ("71m-72", "71m-96", "71m-120")  # take a second each


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, run.name, marks=pytest.mark.slow if run.values["size"] in DEEP else [])
        for file in PAIRED
        for run in sweep_of(file)[1]
        if run.values["prores"] == "on"
    ],
)
def test_every_recipe_builds(file: str, name: str) -> None:
    """With ProRes, one part more; on the meta device, as for `--check`, which counts bytes for the sizes below."""
    built = recipe_of(file, name)
    missing: list = []
    model = build_components(built, plan_mesh(built.parallelism, 8), missing).model
    assert {each.key for each in missing} <= {"tokenizer.path", "dataset.name"}
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
    assert len(model.layers) == built.slots["model"].config.n_layers


def test_table_6_has_the_paper_s_rows() -> None:
    sweep, runs = sweep_of("table6.toml")
    assert len(runs) == 3 * 21 + 2
    for run in runs:
        schedule = run.values["schedule"]
        built = sweep_recipe(sweep, run)
        post = run.values["norm"] in ("post", "deepnorm")
        assert built.training.steps == 60_000 and built.slots["model"].config.norm == run.values["norm"]
        assert built.slots["optimizer"].config.lr == (5e-4 if run.values["norm"] == "post" else 1e-3)
        assert built.slots["lr_scheduler"].config.warmup_steps == (6000 if post else 2000)
        prores = {spec.name: spec.config for spec in built.sets["transforms"]}.get("prores")
        if schedule == "none":
            assert prores is None
        elif schedule.startswith("fix-"):
            assert prores.residual_schedule.name == schedule
        else:
            name, _, length = schedule.rpartition("-")
            alpha = prores.residual_schedule.build(n_layers=24)
            total = int(length.removesuffix("k")) * 1000
            assert prores.residual_schedule.name == name
            assert min(alpha.alpha(total)) == 1 > min(alpha.alpha(total - 1))


# Curves of Fig. 1 -> scheme, schedule of alpha and its T at each depth, peak learning rates.
FIG_1 = {
    "Pre-LN": ("pre", None, [2e-3]),
    "DS-Init": ("pre_ds", None, [2e-3]),
    "Scaled Init": ("pre_scaled", None, [2e-3]),
    "Sandwich-LN": ("sandwich", None, [2e-3]),
    "LNS": ("lns", None, [2e-3]),
    "DeepNorm": ("deepnorm", None, [5e-4, 1e-3, 1.5e-3, 2e-3]),
    "Pre-LN + ProRes": ("pre", {24: 1000, 48: 1000, 72: 1000, 96: 500, 120: 500}, [2e-3]),
    "Pre-LN + ProRes-equal": ("pre", {24: 12_000, 48: 12_000, 72: 12_000, 96: 12_000, 120: 12_000}, [2e-3]),
}


def scheme_of(built: Recipe) -> tuple[str, str, int]:
    """Norm, init and warmup of the learning rate, as in SCHEMES."""
    model, schedule = built.slots["model"].config, built.slots["lr_scheduler"].config
    assert (schedule.decay_ratio, built.training.steps, built.training.global_batch_size) == (0.1, 100_000, 512)
    return model.norm, model.init, schedule.warmup_steps


def test_fig_1_has_the_paper_s_curves_at_every_depth() -> None:
    sweep, runs = sweep_of("fig1.toml")
    lines = sweep.runs_of_plot("depth", lambda run: None)
    assert set(lines) == set(FIG_1)
    found: dict[tuple, list[float]] = {}
    for run in runs:
        built = sweep_recipe(sweep, run)
        model = built.slots["model"].config
        assert (model.dim, model.ffn_dim, model.n_heads) == (512, 1368, 8)
        prores = {spec.name: spec.config for spec in built.sets["transforms"]}.get("prores")
        alpha = prores and (prores.residual_schedule.name, prores.residual_schedule.config.T)
        key = (*scheme_of(built), alpha, model.n_layers)
        found.setdefault(key, []).append(built.slots["optimizer"].config.lr)
    expected = {
        (*SCHEMES[scheme], T and ("equal" if "equal" in label else "linear", T[depth]), depth): rates
        for label, (scheme, T, rates) in FIG_1.items()
        for depth in (24, 48, 72, 96, 120)
    }
    assert {key: sorted(rates) for key, rates in found.items()} == expected
    # A line has one run a depth; DeepNorm's is that of the lowest metric of its depth.
    values = {"71m-24": "0.001", "71m-48": "0.0005", "71m-72": "0.002", "71m-96": "0.0015", "71m-120": "0.001"}
    chosen = sweep.runs_of_plot("depth", lambda run: float(run.values["lr"] != values[run.values["size"]]))
    assert {run.values["size"]: run.values["lr"] for run in chosen["DeepNorm"]} == values
    for label, runs in chosen.items():
        assert [run.values["size"] for run in runs] == list(values), label


# size -> the rates that appendix A tries
SEARCHES = {"130m": [1e-3, 1.5e-3, 2e-3], "350m": [5e-4, 1e-3, 1.5e-3], "1.3b": [3e-4, 6e-4, 1e-3]}


@pytest.mark.parametrize("size", SEARCHES)
def test_searches_of_the_learning_rate(size: str) -> None:
    """Every scheme of Table 2 at every rate, without ProRes; the recipe of the table is the run of the rate chosen."""
    sweep = sweep_of("lr_search.toml")[0]
    found: dict[str, list[float]] = {}
    for run in runs_of("lr_search.toml", f"size={size}"):
        built, scheme = sweep_recipe(sweep, run), run.values["method"]
        assert scheme_of(built) == SCHEMES[scheme]
        assert "prores" not in {spec.name for spec in built.sets["transforms"]}
        found.setdefault(scheme, []).append(built.slots["optimizer"].config.lr)
        table_2 = recipe_of("table2.toml", f"size={size},method={scheme},prores=off")
        mine, its = (flatten(each.to_dict()) for each in (built, table_2))
        differing = {key for key in mine | its if mine.get(key) != its.get(key)} - {("optimizer", "lr")}
        assert differing == {("job", "dump_folder")}, "nothing but the rate is searched"
        chosen = built.slots["optimizer"].config.lr == table_2.slots["optimizer"].config.lr
        where = {"size": size, "lr": run.values["lr"]}
        cells = [each.cells[scheme] for each in sweep.file.beside if each.where == where and scheme in each.cells]
        assert cells == ([paper_perplexity(scheme, size).split()[0]] if chosen else [])
    assert found == {scheme: SEARCHES[size] for scheme in SCHEMES}


def paper_perplexity(scheme: str, size: str) -> str:
    """Of Table 2, without -> with ProRes, as the page has it."""
    table = PAGE.split("\n## Table 2")[1].split("\n## ")[0]
    (line,) = re.findall(rf"^\| `{scheme}` \| [^|]+ \|(.*) \|$", table, re.M)
    return line.split("|")[TABLE_2.index(size)].strip()


def test_figures_of_table_2_stand_beside_its_runs() -> None:
    beside = sweep_of("table2.toml")[0].file.beside
    assert [each.where for each in beside] == [{"size": size} for size in TABLE_2]
    for size, each in zip(TABLE_2, beside, strict=True):
        assert each.cells == {scheme: paper_perplexity(scheme, size) for scheme in SCHEMES}


def test_the_readme_s_table_3_adds_up() -> None:
    """The columns of Pre-LN average to its row, and the mean gains to that of the seven schemes."""
    columns = re.findall(r"^\| [\w-]+ \| ([\d.]+) -> ([\d.]+) \| \+([\d.]+) \|$", PAGE, re.M)
    without, with_prores, gains = ([float(value) for value in column] for column in zip(*columns, strict=True))
    averages = re.findall(
        r"^\| `(\w+)` \| [\d.]+ -> [\d.]+ \| [\d.]+ -> [\d.]+ \| ([\d.]+) -> ([\d.]+) \|$", PAGE, re.M
    )
    assert len(columns) == 10 and [name for name, *_ in averages] == list(SCHEMES)
    pre = averages[0]
    assert [sum(without) / 10, sum(with_prores) / 10] == pytest.approx([float(pre[1]), float(pre[2])], abs=0.006)
    gain = sum(float(b) - float(a) for _, a, b in averages) / len(averages)
    assert sum(gains) / 10 == pytest.approx(gain, abs=0.01)


CHECKED = {f"paper/{size}": size for size in ("71m", "130m", "350m", "1.3b", "3b")} | {"llama_7b": "7b"}
WITH_PRORES = "--transforms.prores.enabled=true"
# On 8 ranks each holds most; on 64 too the smallest, which has least to spread, and the largest.
CELLS = [*((name, 8) for name in CHECKED), ("paper/71m", 64), ("llama_7b", 64)]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [pytest.param(*cell, marks=[] if cell == ("paper/71m", 8) else pytest.mark.slow) for cell in CELLS],
)
def test_check_on_this_machine(name: str, world_size: int) -> None:
    start = time.perf_counter()
    shown = report(built := recipe(name, world_size, WITH_PRORES), world_size)
    print(f"{name} for {world_size} ranks: {time.perf_counter() - start:.1f} s")
    dim, ffn_dim, _, n_layers, _, _ = SIZES[CHECKED[name]]
    parameters = 2 * 32000 * dim + n_layers * (4 * dim**2 + 3 * dim * ffn_dim + 2 * dim) + dim
    assert f"parameters       {parameters:,} (" in shown
    assert "tokens in total  52,428,800,000 in 100,000 steps" in shown
    assert "a run needs      train_configs/paper/base.toml" in shown.replace(f"{ROOT}/", "")

    sizes = held(shown)
    # Norms are not split by tensor parallelism, and rows do not always divide evenly.
    assert 1 <= sizes["parameters"] / (4 * parameters / world_size) < 1.01
    assert sizes["gradients"] == sizes["parameters"]
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=1e-4)
    together = sizes.pop("total")
    assert together == sum(sizes.values())
    assert together < 80 * 2**30, "a rank has 80 GB at most"

    # bf16, of a layer or of embedding, last norm and output: the larger.
    tp = built.parallelism.tensor_parallel_degree
    layer, outside = 4 * dim**2 + 3 * dim * ffn_dim + 2 * dim * tp, 2 * 32000 * dim + dim * tp
    largest = int(re.search(r"largest gather +([\d,]+) bytes", shown)[1].replace(",", ""))
    assert largest == pytest.approx(2 * max(layer, outside) / tp, rel=0.01)
    # The fp32 log-probabilities of this rank's share of the vocabulary are kept, and each layer's bf16 input.
    tokens = built.training.local_batch_size * built.training.seq_len
    assert sizes["activations"] > tokens * 4 * 32000 / tp + n_layers * tokens * dim * 2 / tp
    assert "compiled code keeps less" in shown
    if (name, world_size) == ("llama_7b", 64):
        page = (ROOT / "docs" / "recipes.md").read_text().split("--world-size 64\n(", 1)[1].split("```")[0]
        # What is kept depends a little on the version of torch, and so does the sum.
        for line in page.splitlines()[1:]:
            assert line in shown.splitlines() or line.split()[0] in ("activations", "peak", "total"), line


@pytest.mark.slow
def test_checkpointing_makes_room() -> None:
    """The 1.3B recipe, of fewer layers: what selective and full checkpointing save is in the report."""
    short = "--model.n_layers=4"
    modes = {"none": "enabled=false", "selective": "mode=selective", "full": "mode=full"}
    sizes = {
        mode: held(report(recipe("paper/1.3b", 8, WITH_PRORES, short, f"--transforms.activation_checkpoint.{key}"), 8))
        for mode, key in modes.items()
    }
    kept = {mode: size["activations"] for mode, size in sizes.items()}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert sizes["none"]["total"] > sizes["selective"]["total"] > sizes["full"]["total"]
