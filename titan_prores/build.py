"""The stages that build a run, each a function; `--check` uses those that allocate nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_prores.checkpoint.resume import changed_sources, learning_rates_changed, switched, text_sources
from titan_prores.config.component_spec import ComponentSpec
from titan_prores.config.engine_sections import SECTIONS
from titan_prores.config.errors import ConfigError, ConfigErrors, MissingError
from titan_prores.config.recipe import Recipe, changes_since
from titan_prores.data import TokenCache, TokenWindows, prepare
from titan_prores.distributed.failures import own_fault
from titan_prores.distributed.mesh import Mesh
from titan_prores.model.activation_bytes import LargestGather, looks_at_values
from titan_prores.model.loss import as_terms, cross_entropy, gives_cross_entropy
from titan_prores.model.parameter_groups import trained_parameters
from titan_prores.model.transforms import Transforms
from titan_prores.model.weight_init import allocate, init_weights, match_rules, unfilled_buffers
from titan_prores.output.log import logger, quiet
from titan_prores.output.run_folder import RunFolder
from titan_prores.protocols.checkpoint import Checkpointer
from titan_prores.protocols.dataset import Dataset
from titan_prores.protocols.loss import Loss
from titan_prores.protocols.lr_scheduler import LRScheduler
from titan_prores.protocols.metric import Metric
from titan_prores.protocols.optimizer import Optimizer
from titan_prores.protocols.tokenizer import Tokenizer
from titan_prores.protocols.transform import Phase, Transform, TransformContext
from titan_prores.protocols.validator import Validator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Components:
    """The components of a recipe that need no mesh, built; the model on the meta device and not yet transformed.

    Tokenizer and dataset may be None where only the size of a run is asked for.

    Attributes:
        validation_loss: the plain cross-entropy, as transforms compute it; known once the model is transformed.
        loss_is_cross_entropy: whether what `loss` gives as the cross-entropy is it, and so has a perplexity.
        parameter_device: where weights are kept, if not on the mesh's device; known once the model is transformed.
    """

    tokenizer: Tokenizer
    dataset: Dataset
    model: nn.Module
    loss: Loss
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    validator: Validator
    metrics: list[Metric]
    transforms: Transforms
    validation_loss: Loss = cross_entropy
    loss_is_cross_entropy: bool = True
    parameter_device: torch.device | None = None

    def build_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """The run's optimizer, each group with its `peak_lr`, and the parameters that transforms have added.

        Groups of these come first: the last one is the optimizer's own, whose learning rate the rows show. Frozen
        parameters are in no group.

        Raises:
            ConfigError: every parameter of the model is frozen, or the optimizer's settings do not fit those that are
                left.
        """
        groups = self.transforms.parameter_groups(model)
        added = [parameter for group in groups for parameter in group["params"]]
        theirs = {id(parameter) for parameter in added}
        own = [(name, parameter) for name, parameter in trained_parameters(model) if id(parameter) not in theirs]
        if not own and not added:
            raise ConfigError("model", "every parameter is frozen, so there is nothing to train")
        try:
            optimizer = self.optimizer.build(own or trained_parameters(model))
        except ConfigError as error:
            raise error.under("optimizer") from error
        if not own:  # all that is trained has groups of its own
            optimizer.param_groups.clear()
        for number, group in enumerate(groups):
            optimizer.add_param_group(group)
            optimizer.param_groups.insert(number, optimizer.param_groups.pop())
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
        return optimizer, added


def build_components(
    recipe: Recipe, degrees: Mapping[str, int], missing: list[MissingError] | None = None
) -> Components:
    """Build whatever can be built, and so checked, before a process group exists.

    Args:
        recipe: the resolved recipe.
        degrees: mesh axis -> ranks along it.
        missing: takes what this machine lacks for tokenizer and data set; None makes it a fault as any other. A model
            whose config has no vocab_size cannot be built without its tokenizer.

    Raises:
        ConfigErrors: all faults that showed.
    """
    errors: list[ConfigError] = []
    slots, training = recipe.slots, recipe.training

    def attempt(build: Callable[[], Any], prefix: str = "") -> Any:
        try:
            return build()
        except ConfigError as error:
            if error.key.split(".")[0] not in SECTIONS:  # else it is the whole key already
                error = error.under(prefix)
            errors.append(error.at(recipe.origins.get(error.key)))
        except ConfigErrors as several:
            errors.extend(several.errors)
        except Exception as error:
            errors.append(own_fault(prefix, error))
        return None

    def build_model() -> nn.Module:
        vocab_size = tokenizer.n_vocab if tokenizer is not None else 1
        try:
            with torch.device("meta"):
                model = slots["model"].build(vocab_size=vocab_size, seq_len=training.seq_len)
        except (RuntimeError, OverflowError) as error:  # such as a size that no tensor can have
            raise ConfigError("model", f"cannot be built: {error}") from error
        for parameter in model.parameters():  # and no buffers: tables are in the dtype that they were made in
            parameter.data = parameter.data.to(DTYPES[training.dtype])
        match_rules(model.init_rules(), [name for name, _ in model.named_parameters()])
        return model

    def build_component(spec: ComponentSpec, **context: Any) -> Any:
        return attempt(lambda: spec.build(**context), spec.key)

    tokenizer = build_component(slots["tokenizer"])
    dataset = build_component(slots["dataset"])
    model = attempt(build_model, "model")
    loss = build_component(slots["loss"])
    optimizer = build_component(slots["optimizer"])
    lr_scheduler = build_component(slots["lr_scheduler"], total_steps=training.steps)
    if lr_scheduler is not None:
        attempt(lambda: _check_factors(lr_scheduler, training.steps), "lr_scheduler")
    validator = build_component(slots["validation"])
    metrics = [build_component(spec) for spec in recipe.sets["metrics"]]
    found = len(errors)
    if optimizer is not None and model is not None and (own := trained_parameters(model)):
        attempt(lambda: optimizer.build(own), "optimizer")
    # What transforms will add is not there yet: where they may add what a pattern is for, `build_optimizer` decides.
    unmatched = errors[found:]

    def build_transform(spec: ComponentSpec) -> Transform:
        transform = spec.build()
        if model is not None:
            _check_extras(transform, model)
            transform.prepare(model, degrees)
            transform.check(model, degrees)
        return transform

    specs = (*recipe.sets["transforms"], *recipe.sets["parallelism"])
    transforms = [(spec.name, attempt(lambda spec=spec: build_transform(spec), spec.key)) for spec in specs]
    if errors == unmatched and any(type(each).init_rules is not Transform.init_rules for _, each in transforms):
        errors = []
    if missing is not None and (tokenizer is not None or getattr(slots["model"].config, "vocab_size", None)):
        missing += [error for error in errors if isinstance(error, MissingError)]
        errors = [error for error in errors if not isinstance(error, MissingError)]
    if errors:
        raise ConfigErrors(errors)
    return Components(
        tokenizer, dataset, model, loss, optimizer, lr_scheduler, validator, metrics, Transforms(transforms)
    )


def _check_extras(transform: Transform, model: nn.Module) -> None:
    """Raise ConfigError unless the model's forward takes what the transform adds to every batch."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in transform.batch_extras:
        if name not in parameters:
            problem = f"adds {name} to every batch, which the forward of {type(model).__name__} does not take"
            raise ConfigError("", problem)


def _check_factors(scheduler: LRScheduler, steps: int) -> None:
    """Raise ConfigError unless the schedule gives a number for the first, a middle and the last update."""
    for step in (0, steps // 2, steps - 1):
        factor = scheduler.factor(step)
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            raise ConfigError("name", f"its factor({step}) is {factor!r} (allowed: a finite number)")


def transform_model(
    recipe: Recipe, components: Components, mesh: Mesh, *, without_data_parallel: bool = False
) -> list[str]:
    """Apply the recipe's transforms to the model in place and to the loss; returns a line for each.

    Args:
        recipe: the recipe.
        components: of the recipe; the model on the meta device and not yet transformed.
        mesh: the mesh to spread it over.
        without_data_parallel: whether the components lack the transforms of data parallelism on purpose, so that mesh
            axes and mixed precision need not be handled.

    Raises:
        ConfigError: the recipe needs something that no transform provides, the optimizer's settings do not fit what is
            trained.
    """
    context = TransformContext(
        mesh,
        dtype=DTYPES[recipe.training.dtype],
        param_dtype=DTYPES[recipe.training.mixed_precision_param or recipe.training.dtype],
        reduce_dtype=DTYPES[recipe.training.mixed_precision_reduce],
        microbatch_tokens=recipe.training.local_batch_size * recipe.training.seq_len,
        handled_axes=set(mesh.degrees) if without_data_parallel else set(),
        mixed_precision_is_handled=without_data_parallel,
    )
    try:
        lines = components.transforms.apply(components.model, context)
    except ConfigError as error:
        whole_keys = {spec.name: spec.key for spec in (*recipe.sets["transforms"], *recipe.sets["parallelism"])}
        key = whole_keys.get(error.key, error.key)
        raise error.but(key=key).at(recipe.origins.get(key)) from error
    components.parameter_device = context.parameter_device
    try:
        components.build_optimizer(components.model)  # to refuse early what does not fit those that are left to train
    except ConfigError as error:
        raise error.at(recipe.origins.get(error.key)) from error
    components.loss = components.transforms.before(Phase.COMPILE).wrap_loss(components.loss)
    try:  # here, or the example would be compiled
        components.loss_is_cross_entropy = gives_cross_entropy(components.loss)
    except (TypeError, ValueError) as error:
        raise ConfigError("loss.name", str(error), value=recipe.slots["loss"].name) from error
    components.loss = components.transforms.since(Phase.COMPILE).wrap_loss(components.loss)
    components.validation_loss = components.transforms.wrap_validation_loss(cross_entropy)
    return lines


def check_loss(recipe: Recipe, components: Components, mesh: Mesh) -> None:
    """Run the loss once, forward and backward, on fake logits split over the vocabulary as a step gives them.

    Nothing is allocated or sent. Without tensor parallelism there is nothing to check.

    Raises:
        ConfigError: it does not run on such logits, or returns something other than plain tensors.
    """
    config = recipe.slots["model"].config
    vocabulary = getattr(config, "vocab_size", None) or (components.tokenizer and components.tokenizer.n_vocab)
    if mesh.degrees["tp"] == 1 or not vocabulary:
        return
    training, tp = recipe.training, mesh.device_mesh["tp"]
    shape = (training.local_batch_size, training.seq_len)
    dtype = DTYPES[training.mixed_precision_param or training.dtype]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.compiler.set_stance("force_eager"),
        components.transforms.computing(),
        quiet("torch._subclasses.fake_tensor"),
        LargestGather() as gathered,
    ):
        whole = torch.empty(*shape, vocabulary, dtype=dtype, device=mesh.device)
        logits = distribute_tensor(whole, tp, [Shard(2)], src_data_rank=None).requires_grad_()
        labels = torch.zeros(shape, dtype=torch.int64, device=mesh.device)
        try:
            terms = as_terms(components.loss(logits, labels))
            if any(isinstance(term, DTensor) for term in (terms.cross_entropy, *terms.others.values())):
                raise TypeError("it returns a DTensor, not a plain tensor")
            terms.total.backward()
        except Exception as error:
            if looks_at_values(error):
                return
            problem = (
                f"{recipe.slots['loss'].name} does not run on logits that tensor parallelism splits over "
                "the vocabulary; titan_prores.vocab_parallel_cross_entropy and vocab_parallel_logsumexp do: "
            )
            raise own_fault("loss", error, problem) from error
    if gathered.elements >= whole.numel():
        logger.warning(
            "loss %s gathers the logits of the whole vocabulary on each rank of tensor parallelism; "
            "titan_prores.vocab_parallel_cross_entropy and vocab_parallel_logsumexp do not",
            recipe.slots["loss"].name,
        )


def materialize(recipe: Recipe, components: Components, device: torch.device) -> nn.Module:
    """Give the transformed meta model storage, weights and buffers, and return it.

    Raises:
        ConfigError: the model leaves a buffer unset.
    """
    model = components.model
    allocate(model, device, components.parameter_device)
    init_weights(model, [*components.transforms.init_rules(), *model.init_rules()], recipe.training.seed)
    model.fill_buffers()
    components.transforms.on_materialize(model)
    if unfilled := unfilled_buffers(model):
        raise ConfigError("model", f"its fill_buffers leaves {', '.join(unfilled[:3])} unset")
    logger.info("%s: %s on %s", recipe.slots["model"].name, parameter_counts(model), device.type)
    return model.train()


def parameter_counts(model: nn.Module) -> str:
    """How many parameters there are, and how many are trained where some are frozen, for the log."""
    total = sum(parameter.numel() for parameter in model.parameters())
    count = sum(parameter.numel() for _, parameter in trained_parameters(model))
    return f"{total / 1e6:.2f}M parameters" + (f" ({count / 1e6:.2f}M trained)" if count != total else "")


def choose_checkpoint(
    checkpointer: Checkpointer | None,
    recipe: Recipe,
    components: Components,
    batch_size: int,
    run: RunFolder,
    mesh: Mesh,
) -> tuple[int | None, dict[str, Any]]:
    """Where the run starts: a checkpoint's step with its meta, or None with that of the one whose weights it takes.

    Says what was chosen and why.

    Args:
        checkpointer: None where checkpoints are switched off.
        recipe: of the run that wants to start.
        components: of the recipe.
        batch_size: its global batch size, in sequences.
        run: its folder.
        mesh: its ranks.

    Raises:
        ConfigError, ConfigErrors: there is no such checkpoint, it belongs to a run that differs in what must not, or
            the run would start at 0 in a folder that has one.
    """
    try:
        step, reason = checkpointer.choose() if checkpointer else (None, "checkpoints are off: starting at step 0")
        meta = {}
        if step is not None:
            meta = checkpointer.read_meta(step)
        elif checkpointer and hasattr(checkpointer, "initial_meta"):
            meta = checkpointer.initial_meta()
    except ConfigError as error:
        raise error.under("checkpoint") from error
    if step is None:
        if earlier := mesh.on_main(run.noted_checkpoint):
            raise ConfigError(
                "job.dump_folder",
                f"this run would start at step 0 over {earlier}",
                value=recipe.job.dump_folder,
                allowed="another folder, or checkpoints as that one has them",
            )
        logger.info(reason)
        return None, meta
    logger.info(reason)
    errors, notes = changes_since(recipe, meta["recipe"])
    errors += switched(recipe, dict(components.transforms.named), step, meta)
    was = meta["global_batch_size"]
    if was != batch_size:
        problem = f"comes to {batch_size} here and was {was} in the checkpoint: set it to {was}"
        value = recipe.training.global_batch_size
        errors.append(ConfigError("training.global_batch_size", problem, value=value))
    if errors:
        raise ConfigErrors(errors)
    for note in notes:
        logger.info("changed since the checkpoint: %s", note)
    model, optimizer, scheduler = components.model, components.optimizer, components.lr_scheduler
    if line := learning_rates_changed(recipe, optimizer, scheduler, model, meta["recipe"], step):
        logger.info(line)
    return step, meta


def prepare_data(
    recipe: Recipe, components: Components, mesh: Mesh, meta: Mapping[str, Any]
) -> tuple[TokenCache, TokenWindows]:
    """The token cache, built where it is not there yet, and its training windows.

    Raises:
        ConfigError: too little text, ranks that see different text, or other text than the checkpoint's `meta` tells.
    """
    source, tokenizer = recipe.slots["dataset"], recipe.slots["tokenizer"]
    try:
        cache = prepare(
            components.dataset,
            components.tokenizer,
            source.config,
            source_name=source.name,
            tokenizer_name=tokenizer.name,
            say=logger.info,
            first=mesh.is_main,
        )
        if source.config.verify == "always":
            _verify_together(cache, mesh)
    except ConfigError as error:
        raise error.under("dataset") from error
    found = mesh.gather(cache.fingerprint)
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            raise ConfigError("dataset", f"rank {rank} reads other text than rank 0")
    if meta.get("data", cache.fingerprint) != cache.fingerprint:
        changed = changed_sources(meta.get("sources"), text_sources(components.dataset))
        raise ConfigError("dataset", f"the text is not what it was when the checkpoint was written{changed}")
    windows = TokenWindows(cache.train, recipe.training.seq_len)
    ranked = recipe.slots["checkpoint"].config.enabled and recipe.slots["checkpoint"].config.needs_validation()
    if ranked and not len(cache.validation):
        raise ConfigError(
            f"checkpoint.{ranked}",
            "ranks by validation loss, and no document is held out",
            value=getattr(recipe.slots["checkpoint"].config, ranked),
            allowed="0, or a larger dataset.validation_fraction",
        )
    if recipe.slots["validation"].config.enabled and not len(cache.validation):
        logger.warning("no document is held out, so nothing will be validated (dataset.validation_fraction)")
    return cache, windows


def _verify_together(cache: TokenCache, mesh: Mesh) -> None:
    """Each rank reads its share of the shards; what one of them finds, all of them raise.

    What a rank has just written is not read again, by any of them: they share the folder.
    """
    if any(mesh.gather(cache.just_built)):
        return
    problem = None
    try:
        cache.verify(mesh.rank, mesh.size)
    except ConfigError as error:
        problem = error.problem
    if problems := [found for found in mesh.gather(problem) if found]:
        raise ConfigError("cache_folder", problems[0])
