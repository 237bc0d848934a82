"""What a run that goes on from a checkpoint, or from the weights of another run, must agree with or is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from titan_prores.config import registry
from titan_prores.config.component_spec import ComponentSpec
from titan_prores.config.errors import ConfigError, ConfigErrors, counted
from titan_prores.config.keys import dotted, split_key
from titan_prores.config.recipe import Recipe, flatten
from titan_prores.config.resolve import Resolver
from titan_prores.config.sources import Tree
from titan_prores.model.parameter_groups import trained_parameters
from titan_prores.output.log import logger
from titan_prores.protocols.dataset import Dataset
from titan_prores.protocols.lr_scheduler import LRScheduler
from titan_prores.protocols.optimizer import Optimizer
from titan_prores.protocols.transform import Transform, changes_model

MOST_SOURCES = 5000  # that a checkpoint remembers the names of; meta.json is read at every look at it


def check_start(
    recipe: Recipe, transforms: Mapping[str, Transform], source_meta: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigErrors where a fresh start takes its weights from elsewhere and a schedule is not told what they are.

    A model that was trained with every alpha at 1 is another one at alpha = 0. Transforms that the weights were trained
    with or without, unlike here, are said.

    Args:
        recipe: of the run that starts.
        transforms: of the recipe, by name.
        source_meta: of the checkpoint that has the weights, as far as it is known.
    """
    source = recipe.slots["checkpoint"].config.weights_from()  # with checkpoints off it is refused already
    errors = []
    for spec in recipe.sets["transforms"] if source is not None else ():
        transform, key = transforms[spec.name], spec.component.start_key
        if key is not None and getattr(spec.config, key) is None and transform.start_matters():
            which = f"{source}{_trained_with(source_meta, spec)}"
            errors.append(
                ConfigError(
                    f"{spec.key}.{key}",
                    f"has to be set, as the weights come from {which}",
                    allowed='"warm" = the model they are of is past its warmup, or was trained without one; a step = '
                    "their warmup goes on from there, such as the step of that checkpoint; "
                    '"fresh" = the warmup begins again',
                )
            )
    if errors:
        raise ConfigErrors(errors)
    if source_meta:
        for label, how in _trained_otherwise(recipe, transforms, source_meta):
            logger.warning("the weights were trained %s %s: the model computes something else with them", how, label)


def _trained_otherwise(
    recipe: Recipe, transforms: Mapping[str, Transform], source_meta: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Label of each transform that weights from elsewhere were trained with or without, unlike here, and in what way.

    Where the recipe says where a schedule starts, it has said what the weights are.
    """
    tables, now = source_meta["recipe"].get("transforms", {}), recipe.to_dict()["transforms"]
    specs = {split_key(spec.key)[-1]: spec for spec in recipe.sets["transforms"]}
    for label, changes in source_meta.get("changes_model", {}).items():
        if changes and label not in specs:
            yield label, "with"
    rules = recipe.resume_rules()
    for label, spec in specs.items():
        transform, key = transforms[spec.name], spec.component.start_key
        said = key is not None and getattr(spec.config, key) is not None
        if said or not changes_model(transform) or transform.leaves_model_as_it_is(0):
            continue
        if not tables.get(label, {"enabled": False}).get("enabled", True):
            yield label, "without"
            continue
        before, after = (flatten({"transforms": {label: each[label]}}) for each in (tables, now))
        same = [key for key, rule in rules.items() if rule.rule == "same" and key[:2] == ("transforms", label)]
        if any(before.get(key, rules[key].default) != after.get(key, rules[key].default) for key in same):
            yield label, "with other settings of"


def _trained_with(meta: Mapping[str, Any] | None, spec: ComponentSpec) -> str:
    """Words on how far the run had come that weights are taken from, and whether it had a transform on."""
    if not meta:
        return ""
    label = split_key(spec.key)[-1]
    table = meta["recipe"].get("transforms", {}).get(label, {"enabled": False})
    return f", trained {counted(meta['step'], 'step')} {'with' if table.get('enabled', True) else 'without'} {label}"


def switched(
    recipe: Recipe, transforms: Mapping[str, Transform], step: int, meta: Mapping[str, Any]
) -> list[ConfigError]:
    """An error for each transform that was switched on or off since a checkpoint and changes what the model computes.

    Args:
        recipe: of the run that wants to resume.
        transforms: of the recipe, by name.
        step: of the checkpoint.
        meta: what was saved with it.
    """
    tables = meta["recipe"].get("transforms", {})
    before = {(label, table.get("name", label)) for label, table in tables.items() if table.get("enabled", True)}
    on = {(split_key(spec.key)[-1], spec.name): spec for spec in recipe.sets["transforms"]}
    problem = "was {} when the checkpoint was written, and what the model computes depends on it"
    allowed = "{}; or a new run that takes the weights alone, as checkpoint.init_from does"
    errors = []
    for (label, name), spec in on.items():
        transform = transforms[name]
        if (label, name) not in before and changes_model(transform) and not transform.leaves_model_as_it_is(step):
            key = f"{spec.key}.enabled"
            errors.append(
                ConfigError(
                    key,
                    problem.format("off"),
                    value=True,
                    allowed=allowed.format("false"),
                    where=recipe.origins.get(key) or recipe.origins.get(spec.key),
                )
            )
    for label, name in sorted(before - on.keys()):
        if meta.get("changes_model", {}).get(label, _class_changes_model(name)):
            key = dotted(("transforms", label, "enabled"))
            errors.append(
                ConfigError(
                    key,
                    problem.format("on"),
                    value=False,
                    allowed=allowed.format("true"),
                    where=recipe.origins.get(key),
                )
            )
    return errors


def _class_changes_model(name: str) -> bool:
    """Of a transform that an earlier version has saved, which did not say; one that is not there any more might."""
    try:
        return changes_model(registry.lookup("transform", name))
    except ConfigError:
        return True


def models_changed(recipe: Recipe, transforms: Mapping[str, Transform], step: int) -> dict[str, bool]:
    """Label -> whether the model computes something else without it from here on, of each transform that may."""
    return {
        split_key(spec.key)[-1]: not transforms[spec.name].leaves_model_as_it_is(step)
        for spec in recipe.sets["transforms"]
        if changes_model(transforms[spec.name])
    }


def learning_rates_changed(
    recipe: Recipe,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    model: nn.Module,
    earlier: Mapping[str, Any],
    step: int,
) -> str:
    """The learning rate of the next steps and of some later ones, before and now; empty where it is the same.

    Args:
        recipe: of the run that resumes.
        optimizer: of the recipe.
        scheduler: of the recipe.
        model: of the recipe.
        earlier: the recipe of the checkpoint, as `Recipe.to_dict` gave it.
        step: of the checkpoint.
    """
    resolver, kinds = Resolver(Tree()), ("optimizer", "lr_scheduler")
    specs = {kind: resolver.component(kind, earlier.get(kind), (kind,)) for kind in kinds}
    if resolver.errors:
        return ""  # a component that is not there any more
    total, last = earlier["training"]["steps"], recipe.training.steps
    before = _learning_rate(specs["optimizer"].build(), specs["lr_scheduler"].build(total_steps=total), model)
    now = _learning_rate(optimizer, scheduler, model)
    later = (step + 1, step + 2, *(step + 10**k for k in range(1, 7)), last - 1)
    rates = [(n + 1, before(n) if n < total else None, now(n)) for n in sorted({step, *later}) if step <= n < last]
    if all(old == new for _, old, new in rates):
        return ""
    words = [f"step {n:,}: {'past its end' if old is None else f'{old:.3g}'} -> {new:.3g}" for n, old, new in rates]
    return f"learning rate before -> now: {'; '.join(words)}"


def _learning_rate(optimizer: Optimizer, scheduler: LRScheduler, model: nn.Module) -> Callable[[int], float]:
    """Completed updates -> learning rate of the optimizer's last group, which the rows show."""
    peak = optimizer.build(trained_parameters(model)).param_groups[-1]["lr"]
    return lambda step: peak * scheduler.factor(step)


def text_sources(dataset: Dataset) -> dict[str, str] | None:
    """What `Dataset.sources` says, as far as a checkpoint keeps it; None where the data set does not say."""
    found = dataset.sources() if hasattr(dataset, "sources") else {}
    return found if 0 < len(found) <= MOST_SOURCES else None


def changed_sources(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str:
    """Which of them have changed, as the end of a sentence; empty where that is not known."""
    if before is None or now is None:
        return ""
    groups = {
        "changed": [name for name in before if name in now and now[name] != before[name]],
        "no longer there": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    words = [f"{counted(len(names), 'file')} {what}, such as {names[0]}" for what, names in groups.items() if names]
    return f": {'; '.join(words)}" if words else ""
