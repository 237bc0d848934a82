"""Per-layer gradient norms are those of the whole gradients, however these are sharded."""

import pytest

from tests.distributed.spawn import run_ranks


def norms(rank, world_size):
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from titan_prores.components.metrics.layer_grad_norm import LayerGradNorm

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    torch.manual_seed(0)
    model = Model()
    grads = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    expected = [
        torch.stack([g.norm() for name, g in grads.items() if name.startswith(f"layers.{i}.")]).norm().item()
        for i in range(2)
    ]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    fully_shard(model.layers[0], mesh=mesh)  # 5 rows on 2 ranks: uneven shards
    other = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "tp"))
    layer = model.layers[1]
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, other, [Replicate(), Shard(1)]))
    for name, parameter in model.named_parameters():
        grad = grads[name]
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    measured = LayerGradNorm(LayerGradNorm.Config(every_steps=1)).measure(1, model)["layer_grad_norm"]
    return expected, measured


def test_sharded_and_mixed_layers():
    for expected, measured in run_ranks(norms, 2):
        assert measured == pytest.approx(expected, rel=1e-6)
