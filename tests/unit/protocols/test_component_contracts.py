"""What keeps a class from being a component is said by name before anything runs, whatever is missing."""

import pytest

from titan_prores.config import contracts, registry
from titan_prores.config.component_spec import ComponentSpec
from titan_prores.config.errors import ConfigError
from titan_prores.config.kinds import KINDS
from titan_prores.config.sections import Section
from titan_prores.protocols.metric import Metric
from titan_prores.protocols.tokenizer import Tokenizer
from titan_prores.protocols.transform import Phase, Transform

# What the engine calls, written down by hand: of a kind whose contract grows, too.
CALLED = {
    "model": {"init_rules", "fill_buffers", "flops_per_token", "forward"},
    "tokenizer": {"encode", "decode", "fingerprint"},
    "dataset": {"documents", "fingerprint"},
    "loss": {"__call__"},
    "optimizer": {"build"},
    "lr_scheduler": {"factor"},
    "residual_schedule": {"alpha"},
    "transform": {"apply", "check", "verify", "row", "before_step", "after_step", "wrap_loss", "state", "load_state"},
    "parallelism": {"apply", "check", "verify", "row", "held_bytes", "gathered_bytes", "before_microbatch"},
    "checkpoint": {"choose", "last_good", "read_meta", "load", "initialize", "save", "before_update", "finish"},
    "metrics": {"prepare", "start", "measure", "derive", "write", "sync", "close"},
    "validator": {"validate"},
}


@pytest.fixture
def clean():
    before = {kind: registry.names(kind) for kind in KINDS}
    yield
    for kind, names in before.items():
        for name in set(registry._table[kind]) - set(names):
            del registry._table[kind][name]


def flat(component: type, *without: str, **instead) -> type:
    """A class of its own with everything that a component has, but for some of its methods."""
    space = {}
    for base in reversed(component.__mro__[:-1]):
        space |= vars(base)
    for name in ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", *without):
        space.pop(name, None)
    return type("Mine", (), space | instead)


@pytest.mark.parametrize("kind", KINDS)
def test_a_component_without_one_of_its_methods_is_refused(kind, clean):
    contract, component = KINDS[kind].contract_class(), registry.lookup(kind, registry.names(kind)[0])
    required = {name for name, method in contracts.methods(contract).items() if not hasattr(method, "optional")}
    assert required >= CALLED[kind]
    registry.register(kind, "whole")(flat(component))
    for name in required:
        with pytest.raises(ConfigError) as caught:
            registry.register(kind, "part")(flat(component, name))
        assert caught.value.key == f"{kind}.part" and f"Mine lacks {name}" in str(caught.value)
        assert " (see titan_prores." in str(caught.value)
        with pytest.raises(ConfigError, match=f"a {name} that is not a method"):
            registry.register(kind, "part")(flat(component, **{name: 3}))
        with pytest.raises(ConfigError, match=rf"cannot be called as {name}\("):
            registry.register(kind, "part")(flat(component, **{name: lambda self, a, b, c, d, e, f, g, h: None}))
    with pytest.raises(ConfigError, match=r"cannot be called as Mine\(config"):
        registry.register(kind, "part")(flat(component, __init__=lambda self: None))
    with pytest.raises(ConfigError, match=r"cannot be called as Mine\(config"):
        registry.register(kind, "part")(flat(component, "__init__"))
    assert "part" not in registry.names(kind)


def test_inheriting_a_protocol_brings_declarations_and_no_methods(clean):
    class Mine(Tokenizer):
        class Config(Section): ...

        def __init__(self, config): ...
        def encode(self, text): ...

    with pytest.raises(
        ConfigError, match=r"Mine lacks decode, fingerprint \(see titan_prores.protocols.tokenizer.Tokenizer"
    ):
        registry.register("tokenizer", "mine")(Mine)


def test_a_model_without_forward_is_refused(clean):
    from torch import nn

    class Mine(nn.Module):
        class Config(Section): ...

        def __init__(self, config, *, vocab_size, seq_len): ...
        def init_rules(self): ...
        def fill_buffers(self): ...
        def flops_per_token(self): ...

    with pytest.raises(ConfigError, match="Mine lacks forward"):
        registry.register("model", "mine")(Mine)


def test_one_hook_of_a_base_class_is_enough(clean):
    @registry.register("metrics", "one_hook")
    class OneHook(Metric):
        class Config(Section): ...

        def derive(self, row):
            return {"x": 1}

    @registry.register("transform", "apply_alone")
    class ApplyAlone(Transform):
        class Config(Section): ...

        phase = Phase.REWRITE

        def apply(self, model, context): ...

    class Nothing(Transform):
        class Config(Section): ...

        phase = Phase.REWRITE

    with pytest.raises(ConfigError, match=r"Nothing lacks apply \(see titan_prores.protocols.transform.Transform\)"):
        registry.register("transform", "nothing")(Nothing)


@pytest.mark.parametrize(
    "method", [lambda self, *args: None, lambda self, text, extra=1: None, lambda *all_of_them: None, staticmethod(len)]
)
def test_other_names_and_more_parameters_are_fine(method, clean):
    component = registry.lookup("tokenizer", "bytes")
    registry.register("tokenizer", "other")(flat(component, encode=method))


def test_an_attribute_set_while_building_is_looked_for_then():
    class Mine(registry.lookup("tokenizer", "bytes")):
        def __init__(self, config, keep=()):
            for name in keep:
                setattr(self, name, 1)

    del_names = {"n_vocab": 1, "eot_id": 1}
    assert set(contracts.attributes(Tokenizer)) == set(del_names)
    bare = flat(Mine, *del_names)
    with pytest.raises(ConfigError) as caught:
        ComponentSpec("tokenizer", "mine", bare, bare.Config(), "tokenizer").build()
    assert str(caught.value) == (
        "tokenizer.name = 'mine': is not a valid tokenizer component: its instances lack n_vocab, eot_id "
        "(see titan_prores.protocols.tokenizer.Tokenizer)"
    )
    whole = flat(Mine, *del_names, n_vocab=3, eot_id=2)
    assert ComponentSpec("tokenizer", "mine", whole, whole.Config(), "tokenizer").build().n_vocab == 3
