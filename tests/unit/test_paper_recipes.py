"""The recipes of the paper's experiments, and what `--check` says of them without data, tokenizer or ranks."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_prores import check, config, registry
from titan_prores.build import build_components
from titan_prores.config import dotted
from titan_prores.recipe import Recipe, flatten, plan_mesh, resolve
from titan_prores.sweep import plan

ROOT = Path(__file__).parents[2]
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
BASELINES = sorted(
    path.relative_to(PAPER).with_suffix("").as_posix()
    for path in PAPER.rglob("*/*.toml")
    if not path.stem.endswith("_prores")
)


@cache
def recipe(name: str, world_size: int, *overrides: str) -> Recipe:
    tree = config.load(ROOT / f"train_configs/{name}.toml", overrides, registry.builtin_folder() / "defaults.toml")
    return resolve(tree, world_size)


# Every recipe and every run of a sweep as it was when each recipe had a file of its own; `like` names the one that it
# differs from in the other keys, where null means that it lacks the key. Never rewritten.
BEFORE = json.loads((Path(__file__).parent / "golden" / "paper_recipes.json").read_text(encoding="utf-8"))


def before(name: str) -> dict[str, Any]:
    changes = dict(BEFORE[name])
    table = (before(changes.pop("like")) if "like" in changes else {}) | changes
    return {key: value for key, value in table.items() if value is not None}


KEYS = {key for table in BEFORE.values() for key in table}


def now(built: Recipe) -> dict[str, Any]:
    """What BEFORE says of a recipe: all but its description, its folder and keys that are newer."""
    table = {dotted(key): value for key, value in flatten(built.to_dict()).items()}
    return json.loads(json.dumps({key: value for key, value in table.items() if key in KEYS}))


@cache
def sweep_of(file: str) -> plan.Sweep:
    return plan.load(PAPER / file)


@pytest.mark.parametrize("file", sorted({name.partition(": ")[0] for name in BEFORE}))
def test_every_run_is_what_it_was(file: str) -> None:
    for name in BEFORE:
        if name == file:
            assert now(recipe(f"paper/{Path(file).with_suffix('')}", 8)) == before(name), name
    wanted = {name.partition(": ")[2] for name in BEFORE if name.startswith(f"{file}: ")}
    runs = {run.name: run for run in sweep_of(file).runs(lambda run: None)} if wanted else {}
    assert set(runs) == wanted
    for name, run in runs.items():
        assert now(sweep_recipe(sweep_of(file), run)) == before(f"{file}: {name}"), name


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
        built = recipe(f"paper/{size}/{scheme}_prores", 8)
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
        parts = {part.name: part.config for part in built.sets["transforms"]}
        assert "compile" in parts and ("activation_checkpoint" in parts) == (size in ("3b", "7b"))
        alpha = parts["prores"].residual_schedule.build(n_layers=n_layers)
        assert parts["prores"].residual_schedule.name == "linear"
        assert alpha.alpha(total)[-1] == 1 > alpha.alpha(total - 1)[-1]


@pytest.mark.parametrize("name", BASELINES)
def test_a_pair_differs_in_one_line(name: str) -> None:
    lines = (PAPER / f"{name}_prores.toml").read_text().split("\n\n")
    assert lines[1] == f'base = ["./{Path(name).name}.toml"]'
    assert lines[3].split() == ["[transforms.prores]", "enabled", "=", "true"] and len(lines) == 4
    without, with_prores = (flatten(recipe(f"paper/{name}{end}", 8).to_dict()) for end in ("", "_prores"))
    differing = {key for key in without | with_prores if without.get(key) != with_prores.get(key)}
    assert differing - {("job", "description")} == {("job", "dump_folder"), ("transforms", "prores", "enabled")}
    for end, table in (("", without), ("_prores", with_prores)):
        assert table["job", "dump_folder"] == f"outputs/paper/{name}{end}"


def test_data_sets_and_the_run_without_lr_warmup() -> None:
    for name in BASELINES:
        data = recipe(f"paper/{name}", 8).slots["dataset"].config
        climbmix = name.startswith("climbmix/")
        assert (data.path, data.subset) == (("OptimalScale/ClimbMix", "default") if climbmix else ("allenai/c4", "en"))
    found = {name.split("/")[1] for name in BASELINES if name.startswith("climbmix/")}
    assert found == {"130m", "350m", "1.3b"}
    for size in found:
        same = [flatten(recipe(f"paper/{where}{size}/pre", 8).to_dict()) for where in ("", "climbmix/")]
        assert {key[0] for key in same[0] if same[0][key] != same[1][key]} == {"job", "dataset"}
    assert recipe("paper/350m/pre_no_lr_warmup", 8).slots["lr_scheduler"].config.warmup_steps == 0


@pytest.mark.parametrize("name", BASELINES)
def test_every_recipe_builds(name: str) -> None:
    """With ProRes, one part more; on the meta device, as for `--check`, which counts bytes for the sizes below."""
    built = recipe(f"paper/{name}_prores", 8)
    missing: list = []
    model = build_components(built, plan_mesh(built.parallelism, 8), missing).model
    assert {each.key for each in missing} <= {"tokenizer.path", "dataset.name"}
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
    assert len(model.layers) == built.slots["model"].config.n_layers


def test_table_6_has_the_paper_s_rows() -> None:
    sweep = plan.load(PAPER / "table6.toml")
    runs = sweep.runs(lambda run: None)
    assert len(runs) == 3 * 21 + 2
    for run in runs:
        schedule = run.values["schedule"]
        built = sweep_recipe(sweep, run)
        post = run.values["norm"] in ("post", "deepnorm")
        assert built.training.steps == 60_000 and built.slots["model"].config.norm == run.values["norm"]
        assert built.slots["optimizer"].config.lr == (5e-4 if run.values["norm"] == "post" else 1e-3)
        assert built.slots["lr_scheduler"].config.warmup_steps == (6000 if post else 2000)
        prores = {part.name: part.config for part in built.sets["transforms"]}.get("prores")
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


def sweep_recipe(sweep: plan.Sweep, run: plan.Run) -> Recipe:
    tree = config.load(sweep.recipe_of(run), sweep.overrides(run), registry.builtin_folder() / "defaults.toml")
    return resolve(tree, sweep.file.ranks)


def scheme_of(built: Recipe) -> tuple[str, str, int]:
    """Norm, init and warmup of the learning rate, as in SCHEMES."""
    model, schedule = built.slots["model"].config, built.slots["lr_scheduler"].config
    assert (schedule.decay_ratio, built.training.steps, built.training.global_batch_size) == (0.1, 100_000, 512)
    return model.norm, model.init, schedule.warmup_steps


def test_fig_1_has_the_paper_s_curves_at_every_depth() -> None:
    sweep = plan.load(PAPER / "fig1.toml")
    lines = sweep.runs_of_plot("depth", lambda run: None)
    assert set(lines) == set(FIG_1)
    found: dict[tuple, list[float]] = {}
    for run in sweep.runs(lambda run: None):
        built = sweep_recipe(sweep, run)
        model = built.slots["model"].config
        assert (model.dim, model.ffn_dim, model.n_heads) == (512, 1368, 8)
        prores = {part.name: part.config for part in built.sets["transforms"]}.get("prores")
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
    values = {"24": "0.001", "48": "0.0005", "72": "0.002", "96": "0.0015", "120": "0.001"}
    chosen = sweep.runs_of_plot("depth", lambda run: float(run.values["lr"] != values[run.values["layers"]]))
    assert {run.values["layers"]: run.values["lr"] for run in chosen["DeepNorm"]} == values
    for label, runs in chosen.items():
        assert [run.values["layers"] for run in runs] == list(values), label


# size -> the rates that appendix A tries
SEARCHES = {"130m": [1e-3, 1.5e-3, 2e-3], "350m": [5e-4, 1e-3, 1.5e-3], "1.3b": [3e-4, 6e-4, 1e-3]}


@pytest.mark.parametrize("size", SEARCHES)
def test_searches_of_the_learning_rate(size: str) -> None:
    """Every scheme of Table 2 at every rate, without ProRes; the recipe of the table is the run of the rate chosen."""
    sweep = plan.load(PAPER / f"lr_search_{size}.toml")
    assert sweep.folder == Path(f"outputs/paper/lr_search_{size}")
    found: dict[str, list[float]] = {}
    for run in sweep.runs(lambda run: None):
        built, scheme = sweep_recipe(sweep, run), run.values["method"]
        assert scheme_of(built) == SCHEMES[scheme]
        assert "prores" not in {part.name for part in built.sets["transforms"]}
        found.setdefault(scheme, []).append(built.slots["optimizer"].config.lr)
        table_2 = recipe(f"paper/{size}/{scheme}", 8)
        mine, its = (flatten(each.to_dict()) for each in (built, table_2))
        differing = {key for key in mine | its if mine.get(key) != its.get(key)} - {("optimizer", "lr")}
        assert differing <= {("job", "dump_folder"), ("job", "description")}, "nothing but the rate is searched"
        chosen = built.slots["optimizer"].config.lr == table_2.slots["optimizer"].config.lr
        cells = [each.cells.get(scheme) for each in sweep.file.beside if each.where["lr"] == run.values["lr"]]
        assert cells == ([paper_perplexity(scheme, size)] if chosen else [None] * len(cells))
    assert found == {scheme: SEARCHES[size] for scheme in SCHEMES}


def paper_perplexity(scheme: str, size: str) -> str:
    """Of Table 2, without ProRes, as the README of the recipes has it."""
    table = (PAPER / "README.md").read_text().split("\n## Table 2")[1].split("\n## ")[0]
    (line,) = re.findall(rf"^\| `{scheme}`, `{scheme}_prores` \| [^|]+ \|(.*)", table, re.M)
    return line.split("|")[TABLE_2.index(size)].split()[0]


def test_the_readme_s_table_3_adds_up() -> None:
    """The columns of Pre-LN average to its row, and the mean gains to that of the seven schemes."""
    text = (PAPER / "README.md").read_text()
    columns = re.findall(r"^\| [\w-]+ \| ([\d.]+) -> ([\d.]+) \| \+([\d.]+) \|$", text, re.M)
    without, with_prores, gains = ([float(value) for value in column] for column in zip(*columns, strict=True))
    averages = re.findall(
        r"^\| `(\w+)`, `\w+` \| [\d.]+ -> [\d.]+ \| [\d.]+ -> [\d.]+ \| ([\d.]+) -> ([\d.]+) \|$", text, re.M
    )
    assert len(columns) == 10 and [name for name, *_ in averages if name != "recipe"] == list(SCHEMES)
    pre = averages[0]
    assert [sum(without) / 10, sum(with_prores) / 10] == pytest.approx([float(pre[1]), float(pre[2])], abs=0.006)
    gain = sum(float(b) - float(a) for _, a, b in averages) / len(averages)
    assert sum(gains) / 10 == pytest.approx(gain, abs=0.01)


CHECKED = {f"paper/{size}/pre_prores": size for size in ("71m", "130m", "350m", "1.3b", "3b")} | {"llama_7b": "7b"}
CELLS = [(name, size) for name in CHECKED for size in (8, 64)]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [pytest.param(*cell, marks=[] if cell == ("paper/71m/pre_prores", 8) else pytest.mark.slow) for cell in CELLS],
)
def test_check_on_this_machine(name: str, world_size: int) -> None:
    start = time.perf_counter()
    report = check.report(built := recipe(name, world_size), world_size)
    print(f"{name} for {world_size} ranks: {time.perf_counter() - start:.1f} s")
    dim, ffn_dim, _, n_layers, _, _ = SIZES[CHECKED[name]]
    parameters = 2 * 32000 * dim + n_layers * (4 * dim**2 + 3 * dim * ffn_dim + 2 * dim) + dim
    assert f"parameters       {parameters:,} (" in report
    assert "tokens in all    52,428,800,000 in 100,000 steps" in report
    assert "a run needs      train_configs/paper/base.toml" in report.replace(f"{ROOT}/", "")

    sizes = held(report)
    # Norms are not split by tensor parallelism, and rows do not always divide evenly.
    assert 1 <= sizes["parameters"] / (4 * parameters / world_size) < 1.01
    assert sizes["gradients"] == sizes["parameters"]
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=1e-4)
    together = sizes.pop("together")
    assert together == sum(sizes.values())
    assert together < 80 * 2**30, "a rank has 80 GB at most"

    # bf16, of a layer or of embedding, last norm and output: the larger.
    tp = built.parallelism.tensor_parallel_degree
    layer, outside = 4 * dim**2 + 3 * dim * ffn_dim + 2 * dim * tp, 2 * 32000 * dim + dim * tp
    largest = int(re.search(r"largest gather +([\d,]+) bytes", report)[1].replace(",", ""))
    assert largest == pytest.approx(2 * max(layer, outside) / tp, rel=0.01)
    # The fp32 log-probabilities of this rank's share of the vocabulary are kept, and each layer's bf16 input.
    tokens = built.training.local_batch_size * built.training.seq_len
    assert sizes["activations"] > tokens * 4 * 32000 / tp + n_layers * tokens * dim * 2 / tp
    assert "compiled code keeps less" in report
    if (name, world_size) == ("llama_7b", 64):
        shown = (ROOT / "README.md").read_text().split("--check --world-size 64\n(", 1)[1].split("```")[0]
        # What is kept depends a little on the version of torch, and so does the sum.
        for line in shown.splitlines()[1:]:
            assert line in report or line.split()[0] in ("activations", "computing", "together"), line


@pytest.mark.slow
def test_checkpointing_makes_room() -> None:
    """The 1.3B recipe, of fewer layers: what selective and full checkpointing save is in the report."""
    short = "--model.n_layers=4"
    modes = {"none": "enabled=false", "selective": "mode=selective", "full": "mode=full"}
    sizes = {
        mode: held(
            check.report(recipe("paper/1.3b/pre_prores", 8, short, f"--transforms.activation_checkpoint.{key}"), 8)
        )
        for mode, key in modes.items()
    }
    kept = {mode: size["activations"] for mode, size in sizes.items()}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert sizes["none"]["together"] > sizes["selective"]["together"] > sizes["full"]["together"]
