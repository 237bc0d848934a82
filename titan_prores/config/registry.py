"""The one table of components: register(kind, name), lookup(kind, name), names(kind).

Built-in components are imported one kind at a time, when a name of that kind is first asked for. A user's own come
from a recipe's `import` list, from a `package.module:Object` name, or from a `titan_prores.components` entry point.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from titan_prores.config.contracts import faults
from titan_prores.config.errors import ConfigError, ConfigErrors, nearest
from titan_prores.config.kinds import KINDS
from titan_prores.config.paths import PathRule, located, refuse_not_utf8
from titan_prores.config.setting_types import USABLE, unusable

T = TypeVar("T", bound=type)


_table: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}
_loaded_kinds: set[str] = set()
_loaded_entry_points = False

ENTRY_POINT_GROUP = "titan_prores.components"
# The built-in components, and the defaults of every recipe. A link in a checkout, a folder where it is installed.
BUILTIN_PACKAGE = "titan_prores.components"
BUILTIN_FOLDER = Path(__file__).parents[1] / "components"
DEFAULTS = BUILTIN_FOLDER / "defaults.toml"


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ConfigError(
            "kind", "unknown kind of component", value=kind, allowed=list(KINDS), nearest=nearest(kind, KINDS)
        )
    return kind


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class decorator that makes a component known as `name` among those of `kind`.

    The class needs a nested `Config` (a `titan_prores.config.sections.Section`) and what the `contract` of its
    kind says. The first line of its docstring is its summary.

    Raises:
        ConfigError: the kind does not exist, the class is not a valid component of it, or another one has the name.
    """
    _known_kind(kind)
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError(
            kind, "a component cannot be registered under this name", value=name, allowed="a string without a colon"
        )

    def add(component: T) -> T:
        _check_shape(kind, f"{kind}.{name}", component)
        if not component.__module__.startswith(f"{BUILTIN_PACKAGE}."):
            _refuse_second_copy(kind, name, component)
            _load_builtin(kind)  # so that it is the newcomer who is refused
        other = _table[kind].get(name)
        if other is not None and not _is_earlier_self(other, component):
            raise ConfigError(
                f"{kind}.{name}",
                f"{component.__module__}.{component.__qualname__} cannot be registered under a name that "
                f"{other.__module__}.{other.__qualname__} already has",
            )
        _table[kind][name] = component
        return component

    return add


def _refuse_second_copy(kind: str, name: str, component: type) -> None:
    """A file of ours that is imported under another name, as `import components` from a checkout would."""
    file = getattr(sys.modules.get(component.__module__), "__file__", None)
    if file and Path(file).resolve().is_relative_to(BUILTIN_FOLDER.resolve()):
        own = f"{BUILTIN_PACKAGE}.{kind}.{component.__module__.rpartition('.')[2]}"
        raise ConfigError(
            f"{kind}.{name}",
            "a built-in component is imported a second time under another name",
            value=component.__module__,
            allowed=own,
        )


def _is_earlier_self(other: type, component: type) -> bool:
    """Whether a module that is run again, after a failed import or in a notebook, brings the same class anew."""
    if (other.__module__, other.__qualname__) != (component.__module__, component.__qualname__):
        return False
    if other is component or component.__module__ == "__main__":
        return True
    return getattr(sys.modules.get(component.__module__), component.__qualname__, None) is not other


def _check_shape(kind: str, key: str, component: object) -> None:
    """A component that could not work is refused by name when it is registered or looked up, not in mid-run."""
    if not inspect.isclass(component):
        raise ConfigError(key, f"is not a valid {kind} component: it is not a class", value=component)
    contract, section = KINDS[kind].contract_class(), KINDS[kind].base_section()
    if not hasattr(component, "Config"):
        what = "lacks Config"
    elif not (inspect.isclass(component.Config) and issubclass(component.Config, section)):
        what = f"has a Config that does not derive from {section.__module__}.{section.__qualname__}"
    elif wrong := unusable(component.Config):
        what = f"has a Config with {wrong} (allowed: {USABLE})"
    elif wrong := faults(contract, component):
        what = "; ".join(wrong)
        if not getattr(contract, "_is_protocol", False) and not issubclass(component, contract):
            what += f"; it does not derive from {contract.__name__}, which has them"
    else:
        return
    where = KINDS[kind].contract.replace(":", ".")
    raise ConfigError(key, f"is not a valid {kind} component: {component.__qualname__} {what} (see {where})")


def _load_builtin(kind: str) -> None:
    if kind in _loaded_kinds:
        return
    _loaded_kinds.add(kind)  # first: components register while they are imported
    try:
        for module in pkgutil.iter_modules([str(BUILTIN_FOLDER / kind)]):
            if module.name.startswith("_"):  # registers nothing: a module that needs it imports it
                continue
            _import(f"{BUILTIN_PACKAGE}.{kind}.{module.name}", f"{kind} components")
    except ConfigError:
        _loaded_kinds.discard(kind)
        raise


def _import(module: str, key: str, **details: str | None) -> ModuleType:
    """Import a module; whatever goes wrong in it is a ConfigError."""
    try:
        return importlib.import_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        details.setdefault("value", module)
        raise ConfigError(key, f"cannot be imported: {_said(error)}", **details) from error


def _said(error: BaseException) -> str:
    """What an exception says, on one line, with the place in a file that cannot be parsed."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def load_entry_points() -> None:
    """Import what installed distributions offer as `titan_prores.components`, once a process.

    Raises:
        ConfigErrors: those that cannot be loaded.
    """
    global _loaded_entry_points
    if _loaded_entry_points:
        return
    _loaded_entry_points = True
    errors = []
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        where = f"installed distribution {entry_point.dist.name}" if entry_point.dist else None
        try:
            entry_point.load()
        except ConfigError as error:
            errors.append(error.at(where))
        except (Exception, SystemExit) as error:
            errors.append(
                ConfigError(
                    f"entry point {entry_point.name}",
                    f"cannot be loaded: {_said(error)}",
                    value=entry_point.value,
                    where=where,
                )
            )
    if errors:
        raise ConfigErrors(errors)


def plugin_file(reference: str, folder: Path | None) -> Path | None:
    """The file that an entry of an `import` list names, absolute; None where it names a module.

    Args:
        reference: the entry.
        folder: of the file that it is written in; None on the command line.

    Raises:
        ConfigError: it is not a path that a recipe can have.
    """
    if not reference.endswith(".py"):
        return None
    try:
        path = Path(located(reference, folder, PathRule(read=True))).resolve()
        refuse_not_utf8(path, reference)
        return path
    except ConfigError as error:
        raise error.under("import") from error


def load_plugin(reference: str, folder: Path | None) -> None:
    """Import one entry of a recipe's `import` list so that it registers its components.

    Args:
        reference: an importable module name (`pkg.module`), or a path to a file ending in `.py`.
        folder: of the recipe that names it; None on the command line.

    Raises:
        ConfigError: the file or module does not exist, or raises while it is imported.
    """
    try:
        path = plugin_file(reference, folder)
        if path is None:
            _import(reference, "import")
            return
        if not path.is_file():
            siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
            hint = nearest(path.name, siblings)
            hint = hint and os.path.join(os.path.dirname(reference), hint)
            raise ConfigError("import", f"no such file: {path}", value=reference, nearest=hint)
        _import_file(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError("import", f"cannot be imported: {_said(error)}", value=reference) from error


def _import_file(path: Path) -> None:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module_name = f"titan_prores_plugin_{path.stem}_{digest}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def names(kind: str) -> list[str]:
    """Registered names of `kind`, sorted."""
    _known_kind(kind)
    _load_builtin(kind)
    load_entry_points()
    return sorted(_table[kind])


def lookup(kind: str, name: str) -> type:
    """The component class called `name`, or the object that `package.module:Object` points to.

    Raises:
        ConfigError: nothing has that name; says what exists and which is spelled nearest.
    """
    _known_kind(kind)
    if ":" in name:
        return _import_object(kind, name)
    known = names(kind)
    if name not in known:
        raise ConfigError(
            "name", f"no {kind} is registered under this name", value=name, allowed=known, nearest=nearest(name, known)
        )
    return _table[kind][name]


def _import_object(kind: str, reference: str) -> type:
    module_name, _, attribute = reference.partition(":")
    module = _import(module_name, "name", value=reference)
    if not hasattr(module, attribute):
        raise ConfigError(
            "name",
            f"{module_name} has no {attribute or 'object without a name'}",
            value=reference,
            nearest=nearest(attribute, vars(module)),
        )
    component = getattr(module, attribute)
    _check_shape(kind, "name", component)
    return component


def summary(component: type) -> str:
    """First line of the class's own docstring."""
    return next(iter(inspect.cleandoc(component.__dict__.get("__doc__") or "").splitlines()), "(no docstring)")
