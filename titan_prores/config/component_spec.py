"""A component that a recipe has chosen, with its typed settings, not yet built; and how settings are written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_prores.config.contracts import missing_attributes
from titan_prores.config.errors import ConfigError
from titan_prores.config.keys import Key
from titan_prores.config.kinds import KINDS
from titan_prores.config.sections import Section, declared_extra
from titan_prores.config.setting_types import plain


@dataclass(frozen=True)
class ComponentSpec:
    """A component chosen by a recipe, not yet built.

    Attributes:
        kind: kind of component.
        name: name it was asked for by.
        component: its class.
        config: its own typed, frozen settings.
        key: dotted path of its table in the recipe, put before the key of errors that it raises.
    """

    kind: str
    name: str
    component: type
    config: Section
    key: str = ""

    def build(self, **context: Any) -> Any:
        """An instance: the class called with its config and the context that its kind's protocol lists.

        Raises:
            ConfigError: a setting that only proves wrong now, under its full key; or the instance lacks an attribute
                that the contract of its kind has.
        """
        try:
            built = self.component(self.config, **context)
        except ConfigError as error:
            raise error.under(self.key) from error
        contract = KINDS[self.kind].contract_class()
        if missing := missing_attributes(contract, built):
            what = f"is not a valid {self.kind} component: its instances lack {', '.join(missing)}"
            raise ConfigError(
                f"{self.key}.name", f"{what} (see {contract.__module__}.{contract.__name__})", value=self.name
            )
        return built


def dump(section: Section) -> dict[str, Any]:
    """A section as plain TOML-ready values; keys that are None are left out, components become tables with `name`."""
    table: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = _plain(getattr(section, name))
        if value is not None:
            table[name] = value
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, ComponentSpec):
        return {"name": value.name, **dump(value.config)}
    if isinstance(value, Section):
        return dump(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return plain(value)


@dataclass(frozen=True)
class ResumeRule:
    """Whether a resumed run may change a key, and the value of a run that does not mention it."""

    rule: Literal["same", "free"]
    default: Any = None


def resume_rules(section: Section, default: str, key: Key = ()) -> dict[Key, ResumeRule]:
    """Key -> its rule for every leaf of a section at `key`, those of components inside included."""
    rules: dict[Key, ResumeRule] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, ComponentSpec):
            inner = KINDS[value.kind].on_resume
            rules[(*key, name, "name")] = ResumeRule(inner)
            rules |= resume_rules(value.config, inner, (*key, name))
        else:
            rule = declared_extra(info).get("on_resume") or default
            usual = None if info.is_required() else info.get_default(call_default_factory=True)
            rules[(*key, name)] = ResumeRule(rule, _plain(usual))
    return rules
