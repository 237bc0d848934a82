"""Typed sections: how engine and components declare their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from titan_prores.config.errors import nearest


class Section(BaseModel):
    """Base of every config section: frozen, no unknown keys, no silent conversion (a bool is not an int)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    # Groups of keys of which one is given instead of another: one that a later file or the command line gives displaces
    # those of its group from before. A table that gives two itself keeps both, for the section's own check.
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Key -> value for where it is not `given`, and what to call its origin; a model's flavors work this way.

        Raises:
            ConfigError: a key that selects the preset has no such preset.
        """
        return {}


def setting(
    default: Any = ...,
    help: str = "",
    *,
    unit: str | None = None,
    on_resume: Literal["same", "free"] | None = None,
    **constraints: Any,
) -> Any:
    """Declare one key of a `Section`.

    Args:
        default: value when the recipe has none; leave out for a key that must be given.
        help: what the key means, shown by `--help <kind>.<name>`.
        unit: of a number, such as "steps" or "seconds".
        on_resume: whether a resumed run must have the `same` value or is `free` to change it; None takes what the
            kind of component says.
        constraints: pydantic's `gt`, `ge`, `lt`, `le`, `min_length`, `pattern` ...
    """
    extra = {"unit": unit, "on_resume": on_resume}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


def slot(kind: str, default: str, help: str = "") -> Any:
    """Declare a key of a `Section` that holds another component of `kind`: a table with `name` and its settings."""
    return Field({"name": default}, description=help, json_schema_extra={"slot": kind}, validate_default=False)


def one_of(value: str, choices: Iterable[str]) -> str:
    """For a pydantic validator: `value` if it is one of the choices, else ValueError that names them.

    For choices that live in a table; fixed ones are a `Literal`.
    """
    choices = list(choices)
    if value not in choices:
        hint = nearest(value, choices)
        raise ValueError(
            f"not one of the choices (allowed: {', '.join(choices)})" + (f"; did you mean {hint}?" if hint else "")
        )
    return value


def slot_kind(info: FieldInfo) -> str | None:
    """Kind of component that a field declared with `slot` takes; None for an ordinary setting."""
    return declared_extra(info).get("slot")


def declared_extra(info: FieldInfo) -> Mapping[str, Any]:
    """What `setting` and `slot` say of a field besides its type: unit, on_resume, slot; empty for one of pydantic's."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
