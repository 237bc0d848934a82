"""Bytes that a rank holds and needs, without allocating them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from titan_prores.build import build_components, transform_model
from titan_prores.config.recipe import Recipe
from titan_prores.distributed.mesh import Mesh
from titan_prores.model.activation_bytes import ActivationBytes, step_bytes
from titan_prores.model.parameter_groups import trained_parameters
from titan_prores.model.weight_init import allocate
from titan_prores.protocols.batch import Batch
from titan_prores.protocols.optimizer import Optimizer
from titan_prores.protocols.transform import Phase


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds between steps, in bytes."""

    parameters: int
    gradients: int
    optimizer: int


def state_bytes(model: nn.Module, optimizer: Optimizer) -> StateBytes:
    """Bytes of this rank's parameters, gradients and optimizer state, for a transformed model on the meta device.

    Frozen parameters have neither gradients nor optimizer state.

    The optimizer takes one real step on fake tensors shaped like the rank's shards, so its state is what it would
    allocate, whichever optimizer it is.
    """
    parts = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    local = {name: parts[name] for name, _ in trained_parameters(model)}
    with FakeTensorMode():
        shards = {}
        for name, part in local.items():
            shards[name] = nn.Parameter(torch.empty(part.shape, dtype=part.dtype))
            shards[name].grad = torch.empty_like(shards[name])
        stepped = optimizer.build(shards.items())
        stepped.step()
        state = [value for held in stepped.state.values() for value in held.values() if torch.is_tensor(value)]
        gradients = [shard.grad for shard in shards.values()]
        return StateBytes(*(sum(t.nbytes for t in held) for held in (parts.values(), gradients, state)))


def activation_bytes(recipe: Recipe, mesh: Mesh) -> ActivationBytes:
    """What a microbatch holds on this rank, by running the whole model once on fake tensors, uncompiled.

    Data parallelism is left out: of what layers compute it changes the dtype of their weights and nothing else. A model
    of its own is built for it, as tensors cannot be fake and on the meta device.
    """
    training = recipe.training
    dtype = training.mixed_precision_param or training.dtype
    recipe = replace(recipe, training=training.model_copy(update={"dtype": dtype, "mixed_precision_param": None}))
    components = build_components(recipe, mesh.degrees, missing=[])
    components.transforms = components.transforms.before(Phase.DATA_PARALLEL)
    transform_model(recipe, components, mesh, without_data_parallel=True)
    # Not all tensors are the model's: alpha of ProRes, for one, stays real.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.compiler.set_stance("force_eager"):
        allocate(components.model, torch.device("cpu"))
        tokens_BS = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
        batch = Batch(tokens_BS, tokens_BS, tokens_BS[:, 0])
        model, loss = components.model.train(), components.loss
        return step_bytes(model, loss, components.transforms, batch, fake)
