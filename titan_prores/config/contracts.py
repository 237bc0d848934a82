"""What a component must have, read off the contract class of its kind: methods, how they are called, attributes.

A contract is a Protocol, all of whose methods a component brings unless they are marked `optional`; or a base class
whose hooks do nothing, of which a component that derives from it needs only those that are abstract.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_OURS = (object, typing.Protocol, typing.Generic)


def optional(method: F) -> F:
    """Mark a method of a Protocol that a component may leave out; the engine asks whether it is there."""
    method.optional = True
    return method


def methods(contract: type) -> dict[str, Callable[..., Any]]:
    """Name -> declaration of every method that the engine may call, in the order of the contract."""
    return {
        name: value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        for base in _bases(contract)
        for name, value in vars(base).items()
        if (not name.startswith("_") or name == "__call__")
        and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))
    }


def attributes(contract: type) -> list[str]:
    """Names that a contract annotates without a value: instances must have them."""
    return [
        name for base in _bases(contract) for name in vars(base).get("__annotations__", {}) if not hasattr(base, name)
    ]


def faults(contract: type, component: type) -> list[str]:
    """What keeps a class from being a component of this contract; empty where nothing does."""
    required = {name: method for name, method in methods(contract).items() if not hasattr(method, "optional")}
    missing = [name for name in required if _own(component, name) is None]
    found = [f"lacks {', '.join(missing)}"] if missing else []
    found += _uncallable(component, "__init__", contract.__init__)
    for name, declared in methods(contract).items():
        found += _uncallable(component, name, declared)
    return found


def missing_attributes(contract: type, instance: object) -> list[str]:
    """Attributes of the contract that an instance does not have."""
    return [name for name in attributes(contract) if not hasattr(instance, name)]


def _bases(contract: type) -> Iterator[type]:
    return (base for base in reversed(contract.__mro__) if base not in _OURS)


def _own(component: type, name: str) -> Any:
    """What the class has under a name, as it is written; None where there is only a declaration or a placeholder."""
    for base in component.__mro__[:-1]:  # every class can be called: what is asked for is that its instances can
        if name in vars(base):
            value = vars(base)[name]
            placeholder = getattr(value, "__name__", "").endswith("_unimplemented")  # of torch.nn.Module.forward
            declared = vars(base).get("_is_protocol", False) or getattr(value, "__isabstractmethod__", False)
            return None if placeholder or declared else value
    return None


def _uncallable(component: type, name: str, declared: Callable[..., Any]) -> list[str]:
    """A complaint where the engine's call, with the parameters that the contract declares, would not fit."""
    own = _own(component, name)
    if own is None and name != "__init__":
        return []
    if own is None:  # object's own
        signature = inspect.Signature()
    elif inspect.isfunction(own) or isinstance(own, (classmethod, staticmethod)):
        function = own.__func__ if isinstance(own, (classmethod, staticmethod)) else own
        signature = inspect.signature(function)
        if not isinstance(own, staticmethod):
            first, *others = signature.parameters.values() or [None]
            if first is None:
                return [f"has a {name} without self"]
            signature = signature if first.kind is first.VAR_POSITIONAL else signature.replace(parameters=others)
    else:
        return [] if callable(own) else [f"has a {name} that is not a method"]
    wanted = list(inspect.signature(declared).parameters.values())[1:]
    by_name = {each.name: each for each in wanted if each.kind is each.KEYWORD_ONLY}
    by_place = [each.name for each in wanted if each.name not in by_name]
    try:
        signature.bind(*by_place, **by_name)
    except TypeError:
        call = ", ".join([*by_place, *(f"{each}=..." for each in by_name)])
        what = component.__name__ if name == "__init__" else name
        return [f"cannot be called as {what}({call}): its parameters are {signature}"]
    return []
