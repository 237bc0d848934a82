"""Resolving a recipe: sections, components, mesh, batch, and what may change on resume."""

import itertools
import random
from pathlib import Path

import pytest
import tomli_w

from titan_prores.config import registry, sources
from titan_prores.config.engine_sections import ENGINE_SECTIONS, Parallelism, Training
from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.config.layout import data_parallel_size, global_batch_size, plan_mesh
from titan_prores.config.recipe import changes_since
from titan_prores.config.resolve import resolve
from titan_prores.config.sections import Section, setting
from titan_prores.config.torchtitan_keys import TORCHTITAN_KEYS
from titan_prores.output.recipe_file import annotated_toml

ROOT = Path(__file__).resolve().parents[3]
DEBUG = ROOT / "train_configs" / "debug.toml"
DEFAULTS = ROOT / "components" / "defaults.toml"

RICH = """
[metrics.second]
name = "jsonl"
[transforms.prores]
residual_schedule = { name = "stagewise-L", total = 12 }
[model]
norm = "sandwich"
flavor = "71M"
n_kv_heads = 4
[training]
stop_after = 3
[optimizer]
lr = 1
[[optimizer.groups]]
patterns = ["*norm.weight"]
weight_decay = 0
[[optimizer.groups]]
patterns = ["layers.*"]
lr_scale = 2
[checkpoint]
resume = 7
[parallelism.fsdp]
enabled = false
"""


def recipe_of(text: str = "", *overrides: str, tmp_path: Path | None = None, world_size: int = 1):
    file = DEBUG
    if text:
        file = tmp_path / "recipe.toml"
        file.write_text(text)
    return resolve(sources.load(file, overrides, DEFAULTS), world_size)


def test_values_and_their_origins(tmp_path):
    recipe = recipe_of(RICH, "--training.seed=5", tmp_path=tmp_path)
    where = {key: origin.removeprefix(f"{tmp_path}/") for key, origin in recipe.origins.items()}
    assert (recipe.training.seed, where["training.seed"]) == (5, "--training.seed")
    assert (recipe.training.stop_after, where["training.stop_after"]) == (3, "recipe.toml:11")
    assert (recipe.slots["model"].config.dim, where["model.dim"]) == (512, "flavor 71M")
    assert recipe.slots["loss"].name == "cross_entropy" and where["loss.name"] == "components/defaults.toml:14"
    schedule = recipe.sets["transforms"][0].config.residual_schedule
    assert (schedule.name, schedule.config.total, schedule.key) == (
        "stagewise-L",
        12.0,
        "transforms.prores.residual_schedule",
    )
    assert where["transforms.prores.residual_schedule.total"] == "recipe.toml:5"
    assert [group.lr_scale for group in recipe.slots["optimizer"].config.groups] == [1.0, 2.0]
    assert where["optimizer.groups.1.lr_scale"] == "recipe.toml:19"
    # A component of a set is on because its table is there, unless it says otherwise.
    assert where["transforms.prores.enabled"] == "recipe.toml:4"
    assert where["parallelism.fsdp.enabled"] == "recipe.toml:23"
    assert where["metrics.console.enabled"] == "components/defaults.toml:34"
    assert [spec.key for spec in recipe.sets["metrics"]] == ["metrics.console", "metrics.jsonl", "metrics.second"]
    assert [spec.name for spec in recipe.sets["parallelism"]] == ["tensor_parallel"]
    assert [spec.name for spec in recipe.disabled["parallelism"]] == ["fsdp"]


def test_setting_a_key_of_a_transform_does_not_hide_what_switched_it_on():
    recipe = recipe_of("", "--transforms.prores.log_alpha=false")
    assert recipe.origins["transforms.prores.enabled"].startswith("train_configs/debug.toml:")


@pytest.mark.parametrize("text", ["", RICH])
def test_a_resolved_recipe_is_a_recipe_that_resolves_to_itself(text, tmp_path):
    recipe = recipe_of(text, tmp_path=tmp_path)
    for again in (tomli_w.dumps(recipe.to_dict()), annotated_toml(recipe)):
        (tmp_path / "again.toml").write_text(again)
        # With the defaults below it, or on its own.
        for defaults in (DEFAULTS, None):
            reloaded = resolve(sources.load(tmp_path / "again.toml", defaults=defaults))
            assert reloaded == recipe and reloaded.to_dict() == recipe.to_dict()


def test_order_of_tables_means_nothing(tmp_path):
    whole = recipe_of(RICH, tmp_path=tmp_path)
    import tomli_w as writer

    tables = sources.load(tmp_path / "recipe.toml").values
    draw = random.Random(0)

    def shuffled(table):
        items = list(table.items())
        draw.shuffle(items)
        return {name: shuffled(value) if isinstance(value, dict) else value for name, value in items}

    for _ in range(5):
        other = recipe_of(writer.dumps(shuffled(tables)), tmp_path=tmp_path)
        assert other == whole and list(other.to_dict()) == list(whole.to_dict())
        assert annotated_toml(other).count("\n") == annotated_toml(whole).count("\n")


def test_another_component_keeps_what_it_has_too(tmp_path):
    text = '[lr_scheduler]\nname = "wsd"\nwarmup_steps = 3\ndecay_ratio = 0.2\n'
    spec = recipe_of(text, "--lr_scheduler.name=cosine", tmp_path=tmp_path).slots["lr_scheduler"]
    assert spec.name == "cosine" and spec.config.warmup_steps == 3 and not hasattr(spec.config, "decay_ratio")
    # And back again.
    overrides = ["--lr_scheduler.name=cosine", "--lr_scheduler.name=wsd"]
    assert recipe_of(text, *overrides, tmp_path=tmp_path).slots["lr_scheduler"].config.decay_ratio == 0.2
    schedule = "--transforms.prores.residual_schedule.name"
    assert recipe_of("", f"{schedule}=fix-L").sets["transforms"][0].config.residual_schedule.name == "fix-L"
    assert recipe_of("", f"{schedule}=reverse").sets["transforms"][0].config.residual_schedule.config.T == 2.0
    for overrides, key in (
        (["--lr_scheduler.name=cosine", "--lr_scheduler.decay_ratio=0.3"], "lr_scheduler.decay_ratio"),
        (["--lr_scheduler.decay_ratio=0.3", "--lr_scheduler.name=cosine"], "lr_scheduler.decay_ratio"),
        (["--lr_scheduler.name=cosine", "--lr_scheduler.warmpu_steps=1"], "lr_scheduler.warmpu_steps"),
    ):
        with pytest.raises(ConfigErrors) as caught:
            recipe_of(text, *overrides, tmp_path=tmp_path)
        assert [(error.key, error.problem) for error in caught.value.errors] == [(key, "unknown key")]


def test_a_nested_component_may_leave_out_the_usual_name():
    recipe = resolve(sources.load(None, ["--transforms.prores.residual_schedule.T=3"], DEFAULTS))
    assert recipe.sets["transforms"][0].config.residual_schedule.name == "linear"


def test_a_component_under_a_label_of_its_own(tmp_path):
    text = '[metrics."titan_prores.protocols.metric:Metric"]\nname = "jsonl"\n'
    text += '[metrics.other]\nname = "jsonl"\nenabled = false\n'
    recipe = recipe_of(text, tmp_path=tmp_path)
    assert recipe.to_dict()["metrics"]["titan_prores.protocols.metric:Metric"] == {"enabled": True, "name": "jsonl"}
    assert recipe.to_dict()["metrics"]["other"] == {"enabled": False, "name": "jsonl"}
    assert recipe.origins['metrics."titan_prores.protocols.metric:Metric".enabled'].endswith("recipe.toml:1")


# --- Mesh and batch


def test_plan_mesh_against_all_products():
    for world_size in (1, 2, 6, 8):
        for degrees in itertools.product((-1, 1, 2, 3, 4), repeat=3):
            given = Parallelism(
                data_parallel_replicate_degree=degrees[0],
                data_parallel_shard_degree=degrees[1],
                tensor_parallel_degree=degrees[2],
            )
            fitting = [
                found
                for found in itertools.product(range(1, 9), repeat=3)
                if found[0] * found[1] * found[2] == world_size
                and all(want in (-1, have) for want, have in zip(degrees, found, strict=True))
            ]
            if degrees.count(-1) > 1 or not fitting:
                with pytest.raises(ConfigErrors):
                    plan_mesh(given, world_size)
            else:
                assert tuple(plan_mesh(given, world_size).values()) == fitting[0]
    assert list(plan_mesh(Parallelism(), 4)) == ["dp_replicate", "dp_shard", "tp"]
    assert data_parallel_size({"dp_replicate": 2, "dp_shard": 3, "tp": 5}) == 6


def test_global_batch_size():
    assert global_batch_size(Training(local_batch_size=3), 4) == 12
    assert global_batch_size(Training(local_batch_size=3, global_batch_size=24), 4) == 24
    for size, message in (
        (20, "(allowed: with this many ranks local_batch_size 1, 5)"),
        (22, "(allowed: a multiple of 4, or -1; 22 fits 1, 2, 11, 22 data ranks)"),
        (0, "(allowed: a multiple of 4, or -1)"),
    ):
        with pytest.raises(ConfigError) as caught:
            global_batch_size(Training(local_batch_size=3, global_batch_size=size), 4)
        assert message in str(caught.value) and caught.value.key == "training.global_batch_size"


def test_batch_and_mesh_are_checked_for_the_world_size():
    assert recipe_of("", world_size=4).training.global_batch_size == 16
    with pytest.raises(ConfigErrors, match=r"debug.toml:14: training.global_batch_size = 16: .* 4 x 3 data ranks"):
        recipe_of("", world_size=3)


# --- What a recipe is called


def test_names_of_the_base_do_not_stay_where_its_numbers_do_not(tmp_path):
    """A small model made from a recipe of 130M is neither of that flavor nor what the base says of itself."""
    (tmp_path / "base.toml").write_text("""
        job = { description = "130M, Pre-LN", dump_folder = "outputs/base" }
        model = { flavor = "130M" }
    """)
    (tmp_path / "small.toml").write_text('base = "./base.toml"\nmodel = { dim = 64, n_heads = 2, n_layers = 2 }\n')
    base, small = (resolve(sources.load(tmp_path / name, (), DEFAULTS), 1) for name in ("base.toml", "small.toml"))
    assert (base.job.description, base.slots["model"].config.flavor) == ("130M, Pre-LN", "130M")
    assert (small.job.description, small.slots["model"].config.flavor) == ("", "custom")
    assert small.job.dump_folder == "outputs/base"
    assert small.origins["model.flavor"].endswith("base.toml:3 has '130M', which other keys override")
    assert small.slots["model"].config.ffn_dim == 2048 and small.origins["model.ffn_dim"] == "flavor 130M"

    (tmp_path / "again.toml").write_text(annotated_toml(small))
    again = resolve(sources.load(tmp_path / "again.toml", (), DEFAULTS), 1)
    assert again == small


def test_a_number_that_is_the_flavors_leaves_its_name():
    assert recipe_of("", "--model.dim=64").slots["model"].config.flavor == "debug"
    assert recipe_of("", "--model.dim=128").slots["model"].config.flavor == "custom"


def test_a_custom_flavor_needs_every_number():
    with pytest.raises(ConfigErrors, match=r"model\.dim: is required"):
        recipe_of("", "--model.flavor=custom")


# --- Resume


def changed(*overrides: str, first: tuple[str, ...] = ()):
    errors, notes = changes_since(recipe_of("", *overrides), recipe_of("", *first).to_dict())
    return [str(error) for error in errors], notes


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("--training.seed=1", "training.seed"),
        ("--training.seq_len=32", "training.seq_len"),
        ("--model.n_layers=2", "model.n_layers"),
        ("--model.norm=post", "model.norm"),
        ("--model.n_kv_heads=2", "model.n_kv_heads"),  # was not set
        ("--model.vocab_size=300", "model.vocab_size"),
        ("--dataset.validation_fraction=0.1", "dataset.validation_fraction"),
        ("--dataset.include_tests=true", "dataset.include_tests"),
        ("--optimizer.beta1=0.8", "optimizer.beta1"),
        ('--optimizer.groups=[{ patterns = ["*"] }]', "optimizer.groups"),
        ("--transforms.prores.residual_schedule.T=3", "transforms.prores.residual_schedule.T"),
        ("--transforms.prores.residual_schedule.name=reverse", "transforms.prores.residual_schedule.name"),
    ],
)
def test_must_stay_the_same(override, key):
    for errors, notes in (changed(override), changed(first=(override,))):
        assert len(errors) == 1 and f"{key}" in errors[0] and "must stay so" in errors[0], errors
        assert [note for note in notes if not note.startswith("model.flavor: ")] == []
    assert changed(override)[0][0].startswith(f"--{key}: {key} = ")


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("--training.steps=30", "training.steps: 20 -> 30"),
        ("--training.stop_after=7", "training.stop_after: not set -> 7"),
        ("--optimizer.lr=0.1", "optimizer.lr: 0.003 -> 0.1"),
        ("--lr_scheduler.name=cosine", "lr_scheduler.name: 'wsd' -> 'cosine'"),
        ("--transforms.prores.enabled=false", "transforms.prores.enabled: true -> false"),
        ("--parallelism.data_parallel_replicate_degree=1", None),
        ("--parallelism.tensor_parallel_degree=-1 ", "parallelism.tensor_parallel_degree: 1 -> -1"),
        ("--dataset.num_workers=2", "dataset.num_workers: 0 -> 2"),
        ("--model.flavor=71M", None),
        ("--checkpoint.interval=5", "checkpoint.interval: 10 -> 5"),
        ("--metrics.tensorboard.enabled=true", "metrics.tensorboard.enabled: not set -> true"),
        ("--job.dump_folder=x", "job.dump_folder: 'outputs/debug' -> 'x'"),
    ],
)
def test_is_free_to_change(override, note):
    more = () if "tensor_parallel" not in override else ("--parallelism.data_parallel_shard_degree=1",)
    if "flavor" in override:  # the name alone
        more = ("--model.dim=64", "--model.n_layers=4", "--model.n_heads=4", "--model.ffn_dim=176")
        note = "model.flavor: 'debug' -> 'custom'"
    errors, notes = changed(override.strip(), *more, first=more)
    assert errors == []
    assert note in notes if note else notes == []


def test_settings_of_what_was_off_are_free():
    off, longer = "--transforms.prores.enabled=false", "--transforms.prores.residual_schedule.T=3"
    for overrides, first in (((longer,), (off,)), ((off, longer), ())):
        errors, notes = changed(*overrides, first=first)
        assert errors == []
        assert "transforms.prores.residual_schedule.T: 2.0 -> 3.0" in notes


def test_a_checkpoint_of_an_earlier_version_lacks_later_keys():
    recipe = recipe_of("")
    earlier = recipe.to_dict()
    del earlier["model"]["tie_embeddings"]
    assert changes_since(recipe, earlier) == ([], [])
    errors, _ = changes_since(recipe_of("", "--model.tie_embeddings=true"), earlier)
    assert [error.key for error in errors] == ["model.tie_embeddings"]


def test_tables_inside_a_setting_follow_its_rule(tmp_path, monkeypatch):
    class WithTable(registry.lookup("tokenizer", "bytes")):
        class Config(Section):
            ids: dict[str, int] = setting({}, "a table")

    monkeypatch.setitem(registry._table["tokenizer"], "with_table", WithTable)
    text = '[tokenizer]\nname = "with_table"\nids = { "<a.b>" = 1 }'
    before = recipe_of(text, tmp_path=tmp_path).to_dict()
    errors, notes = changes_since(recipe_of(text.replace("= 1", "= 2"), tmp_path=tmp_path), before)
    assert [str(error) for error in errors] == [
        f'{tmp_path}/recipe.toml:3: tokenizer.ids."<a.b>" = 2: was 1 when the checkpoint was written and must stay so'
    ]
    assert notes == []


def test_names_that_torchtitan_keys_lead_to_exist():
    recipe = recipe_of("", "--metrics.tensorboard.enabled=true")
    for theirs, ours in TORCHTITAN_KEYS.items():
        section, _, key = theirs.partition(".")
        assert not (section in ENGINE_SECTIONS and key in ENGINE_SECTIONS[section].model_fields), f"{theirs} is a key"
        if ours and "." in ours and ours.split(".")[0] in ENGINE_SECTIONS and ours.count(".") == 1:
            assert ours.split(".")[1] in ENGINE_SECTIONS[ours.split(".")[0]].model_fields
    assert recipe.sets["metrics"][-1].name == "tensorboard"


def test_the_later_of_two_alternatives_displaces_the_earlier(tmp_path):
    """T of a base gives way to `total` of a recipe or the command line; both in one place stay a contradiction."""

    def schedule(*overrides):
        tree = sources.load(ROOT / "train_configs/debug.toml", overrides, registry.DEFAULTS)
        return resolve(tree).sets["transforms"][0].config.residual_schedule.config

    prefix = "--transforms.prores.residual_schedule"
    assert (schedule().T, schedule().total) == (2.0, None)
    assert (schedule(f"{prefix}.total=80").T, schedule(f"{prefix}.total=80").total) == (None, 80.0)
    with pytest.raises(ConfigErrors, match="not both"):
        schedule(f"{prefix}.total=80", f"{prefix}.T=3")
