"""What every registered component owes its kind: a new one is tested by existing."""

import inspect
import json
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_prores.cli import describe
from titan_prores.config import registry, sources
from titan_prores.config.engine_sections import ENGINE_SECTIONS, SLOTS
from titan_prores.config.kinds import KINDS
from titan_prores.config.resolve import Resolver
from titan_prores.config.sections import Section, slot_kind
from titan_prores.model.weight_init import match_rules
from titan_prores.prores import ResidualAdd
from titan_prores.protocols.checkpoint import CheckpointSection
from titan_prores.protocols.dataset import DatasetSection
from titan_prores.protocols.metric import Metric
from titan_prores.protocols.transform import Capability, Parallelism, Phase, Transform
from titan_prores.protocols.validator import ValidatorSection

ALL = [(kind, name) for kind in KINDS for name in registry.names(kind)]
BASES = {"dataset": DatasetSection, "checkpoint": CheckpointSection, "validator": ValidatorSection}


def names(kind):
    return registry.names(kind)


def sections_of(section: type[Section]) -> list[type[Section]]:
    """A section and those nested in the types of its keys."""
    found, left = [], [section]
    while left:
        each = left.pop()
        if inspect.isclass(each) and issubclass(each, Section):
            found.append(each)
            left += [info.annotation for info in each.model_fields.values()]
        else:
            left += typing.get_args(each)
    return found


def spec_of(kind: str, name: str, /, **settings):
    """The component with the settings given and defaults elsewhere; None, and why, where that is refused."""
    resolver = Resolver(sources.Tree())
    return resolver.component(kind, {"name": name, **settings}, (kind,)), resolver.errors


def schedule(name: str, n_layers: int, folder: Path):
    """As short as it can be. A file that a schedule reads is one of straight lines from 0 to 1 in 12 steps."""
    table = folder / f"{n_layers}.csv"
    layers = range(1, n_layers + 1)
    table.write_text(f"step,{','.join(f'alpha_{layer}' for layer in layers)}\n0{',0' * n_layers}\n12{',1' * n_layers}")
    short = {"T": 3, "path": str(table), "warmup_steps": 3, "min_steps": 2, "max_steps": 5}
    fields = registry.lookup("residual_schedule", name).Config.model_fields
    spec, errors = spec_of("residual_schedule", name, **{key: short[key] for key in short.keys() & fields.keys()})
    assert errors == []
    return spec.build(n_layers=n_layers)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_declaration(kind, name):
    component = registry.lookup(kind, name)
    assert component.__dict__.get("__doc__"), "the first line of the docstring is the summary"
    summary = registry.summary(component)
    assert 10 < len(summary) <= 120 and not summary.endswith(","), summary
    assert issubclass(component.Config, BASES.get(kind, Section))
    assert component.Config.model_config["frozen"] and component.Config.model_config["extra"] == "forbid"


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_no_key_that_the_engine_reads_itself(kind, name):
    taken = {"name"} if kind in SLOTS.values() else {"name", "enabled"}
    assert not taken & set(registry.lookup(kind, name).Config.model_fields)


@pytest.mark.parametrize("section", [*ENGINE_SECTIONS, *(f"{kind}.{name}" for kind, name in ALL)])
def test_every_key_is_described(section):
    kind, _, name = section.partition(".")
    text = describe(section)
    for declared in sections_of(registry.lookup(kind, name).Config if name else ENGINE_SECTIONS[section]):
        for key, info in declared.model_fields.items():
            assert info.description, f"{key} has no help"
            assert re.search(rf"^ +{key}: ", text, re.MULTILINE) and info.description in text
            unit = (info.json_schema_extra or {}).get("unit")
            assert unit is None or unit in text
            suffix = re.search(r"_(steps|seconds|tokens|bytes)$", key)
            if suffix and info.annotation in (int, float):
                assert unit and unit.endswith(suffix[1]), f"{key} needs its unit"


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_defaults_are_valid(kind, name):
    """With no settings a component resolves, or it says which one it wants."""
    section = registry.lookup(kind, name).Config
    preset = section.presets({})
    required = {key for key, info in section.model_fields.items() if info.is_required() and key not in preset}
    if any(slot_kind(info) for info in section.model_fields.values()):
        return  # a nested component may need settings of its own
    spec, errors = spec_of(kind, name)
    if required or errors:
        assert spec is None and errors
        said = " ".join(str(error) for error in errors)
        assert all(key in said for key in required), said
        assert all(error.problem for error in errors)
    else:
        assert type(spec.config) is section
        key = next(iter(section.model_fields), None)
        if key:
            with pytest.raises(Exception, match="frozen"):
                setattr(spec.config, key, None)
    for key, info in section.model_fields.items():  # what is declared as a default passes the key's own check
        if not info.is_required() and not slot_kind(info) and info.default is not None:
            _, errors = spec_of(
                kind, name, **{key: list(info.default) if type(info.default) is tuple else info.default}
            )
            assert not [error for error in errors if error.key == f"{kind}.{key}"]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_unknown_keys_and_wrong_types_are_refused(kind, name):
    spec, errors = spec_of(kind, name, no_such_key=1)
    assert spec is None and f"{kind}.no_such_key" in [error.key for error in errors]
    for key, info in registry.lookup(kind, name).Config.model_fields.items():
        for wrong in (object(), [object()], {"a": object()}):
            spec, errors = spec_of(kind, name, **{key: wrong})
            assert spec is None and errors, f"{key} = {wrong} ({info.annotation})"


@pytest.mark.parametrize("name", names("lr_scheduler"))
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 20), (5, 20), (18, 20)])
def test_lr_scheduler(name, warmup_steps, total_steps):
    spec, errors = spec_of("lr_scheduler", name, warmup_steps=warmup_steps)
    assert errors == []
    scheduler = spec.build(total_steps=total_steps)
    factors = [scheduler.factor(step) for step in range(total_steps)]
    assert all(type(factor) is float and 0.0 <= factor <= 1.0 for factor in factors)
    assert max(factors) == 1.0
    if warmup_steps:
        np.testing.assert_allclose(factors[:warmup_steps], np.arange(warmup_steps) / warmup_steps, rtol=1e-12)
    # Pure: neither the order of questions nor another instance matters.
    assert [scheduler.factor(step) for step in reversed(range(total_steps))] == factors[::-1]
    assert [spec.build(total_steps=total_steps).factor(step) for step in range(total_steps)] == factors


@pytest.mark.parametrize("name", names("residual_schedule"))
def test_residual_schedule(name, tmp_path):
    for n_layers in (1, 6):
        built = schedule(name, n_layers, tmp_path)
        alphas = np.stack([built.alpha(step) for step in range(40)])
        assert alphas.dtype == np.float64 and alphas.shape == (40, n_layers)
        assert (alphas >= 0).all() and (alphas <= 1).all()
        assert (np.diff(alphas, axis=0) >= 0).all(), "alpha never falls"
        for step in (39, 0, 7):
            np.testing.assert_array_equal(schedule(name, n_layers, tmp_path).alpha(step), alphas[step])
        built.alpha(3)[:] = 7.0  # what a caller does with its array is no concern of the next
        np.testing.assert_array_equal(built.alpha(3), alphas[3])
        if {"T", "path", "warmup_steps"} & registry.lookup("residual_schedule", name).Config.model_fields.keys():
            assert (alphas[-1] == 1).all() and (alphas[0] < 1).any() | (n_layers == 1)
        else:
            assert (alphas == alphas[0]).all()
        assert "\n" not in built.describe()
        if built.trained:
            logits = torch.from_numpy(built.initial_logits()).requires_grad_()
            alpha = built.alpha_of(logits)
            np.testing.assert_allclose(alpha.detach(), alphas[0], rtol=1e-12)
            (alpha.sum() + built.penalty(alpha)).backward()
            assert logits.grad.isfinite().all() and built.lr > 0
        measured = [step for step in range(20) if built.measures(step)]
        assert built.watches_layers or not measured
        for step in measured:
            built.observe(step, np.linspace(1, 2, n_layers) + 1 / (step + 1))
        other = schedule(name, n_layers, tmp_path)
        other.load_state(json.loads(json.dumps(built.state())))
        for step in range(20, 40):
            np.testing.assert_array_equal(other.alpha(step), built.alpha(step))


@pytest.mark.parametrize("name", names("tokenizer"))
def test_tokenizer(name):
    section = registry.lookup("tokenizer", name).Config
    if any(info.is_required() for info in section.model_fields.values()):
        pytest.skip("needs a file; see test_tokenizers.py")
    tokenizer = spec_of("tokenizer", name)[0].build()
    for text in ("", "plain", "naïve 漢字 🙂\r\n\t", "<|endoftext|> is plain text", "\x00"):
        ids = tokenizer.encode(text)
        assert ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
        assert tokenizer.decode(ids.tolist()) == text
        assert (ids < tokenizer.n_vocab).all() and tokenizer.eot_id not in ids
    assert 0 <= tokenizer.eot_id < tokenizer.n_vocab
    assert tokenizer.fingerprint() == spec_of("tokenizer", name)[0].build().fingerprint()


@pytest.mark.parametrize("name", names("loss"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss(name, dtype):
    """The summed cross-entropy in fp64, written out, and its gradient softmax - one-hot."""
    loss = spec_of("loss", name)[0].build()
    generator = torch.Generator().manual_seed(0)
    logits_BSV = (3 * torch.randn(2, 5, 11, generator=generator)).to(dtype).requires_grad_()
    labels_BS = torch.randint(0, 11, (2, 5), generator=generator)
    labels_BS[0, 1] = labels_BS[1, 4] = -100
    found = loss(logits_BSV, labels_BS)
    assert found.shape == () and found.dtype == torch.float32
    exact_BSV = logits_BSV.detach().double()
    scored_BS = labels_BS != -100
    picked_BS = exact_BSV.gather(-1, labels_BS.clamp(min=0)[..., None])[..., 0]
    expected = ((exact_BSV.exp().sum(-1).log() - picked_BS) * scored_BS).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    found.backward()
    one_hot_BSV = torch.nn.functional.one_hot(labels_BS.clamp(min=0), 11)
    gradient_BSV = (exact_BSV.softmax(-1) - one_hot_BSV) * scored_BS[..., None]
    torch.testing.assert_close(
        logits_BSV.grad.double(), gradient_BSV, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3
    )
    nothing = loss(logits_BSV.detach(), torch.full((2, 5), -100))
    assert nothing.item() == 0.0


@pytest.mark.parametrize("name", names("model"))
def test_model(name):
    spec = spec_of("model", name)[0]
    with torch.device("meta"):
        model = spec.build(vocab_size=33, seq_len=16)
        tokens_BS = torch.zeros(2, 16, dtype=torch.int64)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model(tokens_BS).shape == (2, 16, 33)
    assert model(tokens_BS[:, :5]).shape == (2, 5, 33)
    assert set(match_rules(model.init_rules(), dict(model.named_parameters()))) == set(dict(model.named_parameters()))
    assert set(model.state_dict()) == set(dict(model.named_parameters())), "buffers are not persistent"
    assert len(model.layers) > 0
    adds = [name for name, module in model.named_modules() if isinstance(module, ResidualAdd)]
    for layer in range(len(model.layers)):
        assert [add for add in adds if add.startswith(f"layers.{layer}.")], "every block adds to the residual"
    assert all(add.startswith("layers.") for add in adds)
    assert type(model.flops_per_token()) is int and model.flops_per_token() > sum(p.numel() for p in model.parameters())
    # Every buffer is filled after to_empty, and causal: a later token changes no earlier logit.
    model.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(float("nan"))
        model.fill_buffers()
        for index, parameter in enumerate(model.parameters()):
            parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(index))
        assert all(buffer.isfinite().all() for buffer in model.buffers())
        tokens_BS = torch.randint(0, 33, (1, 16), generator=torch.Generator().manual_seed(0))
        before = model(tokens_BS)
        tokens_BS[0, 9] = (tokens_BS[0, 9] + 1) % 33
        after = model(tokens_BS)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", names("optimizer"))
def test_optimizer(name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, bias=False))
    optimizer = spec_of("optimizer", name)[0].build().build(model.named_parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters())), "each parameter in one group"
    lr = spec_of("optimizer", name)[0].config.lr
    assert all(group["lr"] == lr for group in optimizer.param_groups)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    assert all((old != new).any() for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["transform", "parallelism"])
def test_transforms(kind):
    for name in names(kind):
        component = registry.lookup(kind, name)
        assert issubclass(component, Transform) and (kind == "transform") != issubclass(component, Parallelism)
        assert isinstance(getattr(component, "phase", Phase.COMPILE), Phase)
        spec, _ = spec_of(kind, name, **{"residual_schedule": {"T": 5}} if name == "prores" else {})
        config = spec.config
        assert all(isinstance(capability, Capability) for capability in component.capabilities(config))
        component.check_combination(config, [])  # with default settings each one works alone


@pytest.mark.parametrize("name", names("dataset"))
def test_datasets_are_built_without_reading(name):
    spec, _ = spec_of("dataset", name)
    if spec is None:
        pytest.skip("needs settings; see test_datasets.py")
    dataset = spec.build()
    assert dataset.fingerprint() == spec.build().fingerprint()


@pytest.mark.parametrize("name", names("metrics"))
def test_metrics(name):
    assert issubclass(registry.lookup("metrics", name), Metric)
