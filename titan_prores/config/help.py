"""Help on sections and components, from the declarations that validate them."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import NamedTuple

from titan_prores.config import registry, sources
from titan_prores.config.engine_sections import ENGINE_SECTIONS, SECTIONS
from titan_prores.config.errors import ConfigError, nearest
from titan_prores.config.keys import inline
from titan_prores.config.kinds import KINDS, SETS, SLOTS
from titan_prores.config.sections import Section, declared_extra, slot_kind
from titan_prores.config.setting_types import declared, plain, type_name
from titan_prores.config.sources import Tree


def list_components(kind: str = "") -> str:
    """Components of a kind, or of all kinds, with the first line of their docstrings."""
    if kind and kind not in KINDS:
        raise ConfigError(
            "--list-components",
            "unknown kind of component",
            value=kind,
            allowed=list(KINDS),
            nearest=nearest(kind, KINDS),
        )
    lines = []
    for each in [kind] if kind else KINDS:
        lines.append(f"{each}: {KINDS[each].summary}")
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
    if dot and kind in KINDS:
        return _describe_component(kind, name)
    if dot or (word not in ENGINE_SECTIONS and kind not in KINDS):
        return _describe_component(*_find(topic, kind))
    blocks = []
    if word in ENGINE_SECTIONS:
        section = ENGINE_SECTIONS[word]
        blocks.append("\n".join([f"[{word}]  {registry.summary(section)}", *_describe_section(section)]) + "\n")
    if section_of_one := next((section for section, held in SLOTS.items() if held == kind), None):
        tree = tree or sources.load(None, (), registry.DEFAULTS)
        chosen = tree.values[section_of_one]["name"]
        blocks.append(f'[{section_of_one}]  name = "{chosen}"\n{_describe_component(kind, chosen)}')
    if kind in KINDS:
        blocks.append(f"{list_components(kind)}See --help {kind}.<name> for the keys of one.\n")
    return "\n".join(blocks)


def _find(topic: str, kind: str) -> tuple[str, str]:
    """Kind and name of the one component that is called `topic`.

    Raises:
        ConfigError: none or several are.
    """
    found = [each for each in KINDS if topic in registry.names(each)]
    if len(found) == 1:
        return found[0], topic
    if found:
        several = [f"{each}.{topic}" for each in found]
        raise ConfigError("--help", "is the name of several components", value=topic, allowed=several)
    every = {name: f"{each}.{name}" for each in KINDS for name in registry.names(each)}
    hint = nearest(kind, [*ENGINE_SECTIONS, *KINDS, *SECTIONS]) or every.get(nearest(topic, every) or "")
    topics = [*ENGINE_SECTIONS, *(f"{each}.<name>" for each in KINDS)]
    raise ConfigError("--help", "is neither a section nor kind.name", value=topic, allowed=topics, nearest=hint)


def _describe_component(kind: str, name: str) -> str:
    try:
        component = registry.lookup(kind, name)
    except ConfigError as error:
        raise error.under(f"--help {kind}") from error
    return "\n".join([f"{kind}.{name}  {registry.summary(component)}", *_describe_section(component.Config)]) + "\n"


class KeyHelp(NamedTuple):
    """What there is to say about one key of a section.

    Attributes:
        name: of the key.
        type: as a recipe spells it.
        default: as TOML with its unit, "(required)", or "(not set)".
        bounds: such as ">= 0, <= 1"; empty without any.
        about: what the key means.
        inner: sections that its value is made of: the tables of a list, for example.
    """

    name: str
    type: str
    default: str
    bounds: str
    about: str
    inner: list[type[Section]]


def keys_of(section: type[Section]) -> list[KeyHelp]:
    """Every key of a section, in the order of its declaration."""
    preset, found = section.presets({}), []
    for name, info in section.model_fields.items():
        extra = declared_extra(info)
        if kind := slot_kind(info):
            default = f'= {{ name = "{info.default["name"]}" }}'
            found.append(KeyHelp(name, kind, default, "", f"{info.description}; see --help {kind}", []))
            continue
        unit = f" {extra['unit']}" if extra.get("unit") else ""
        if not info.is_required():
            usual = info.get_default(call_default_factory=True)
            value = "(not set)" if usual is None else inline(plain(usual))
            default = f"= {value}" + (f", in{unit}" if unit and usual is None else unit)
        elif name in preset:
            value, origin = preset[name]
            default = f"= {inline(value)}{unit} from {origin}"
        else:
            default = f"{f', in{unit} ' if unit else ''}(required)"
        inner = _sections_in(info.annotation)
        found.append(
            KeyHelp(name, type_name(declared(info)), default, _bounds(info.metadata), info.description or "", inner)
        )
    return found


def _describe_section(section: type[Section], indent: str = "  ") -> list[str]:
    lines = [] if section.model_fields else [f"{indent}(no keys)"]
    for key in keys_of(section):
        default = key.default if key.default.startswith(",") else f" {key.default}"
        bounds = f"   [{key.bounds}]" if key.bounds else ""
        lines += [f"{indent}{key.name}: {key.type}{default}{bounds}", f"{indent}    {key.about}"]
        for inner in key.inner:
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
    return ", ".join(found)
