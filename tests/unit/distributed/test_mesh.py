"""What ranks find in the store that torchrun keeps for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from titan_prores.distributed import mesh
from titan_prores.distributed.mesh import Mesh, World


def test_each_attempt_of_torchrun_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps one store for all: an earlier attempt's addresses and wishes would be taken for ours."""
    kept = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **kwargs: iter([(kept, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(mesh, "Mesh", lambda degrees, device, store: store)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    stores = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(mesh.start({}, torch.device("cpu"), World(0, 0, 1), 10))
    stores[0].set("stop", "SIGTERM")
    assert stores[0].check(["stop"]) and not stores[1].check(["stop"])


@pytest.mark.parametrize(
    ("values", "expected"), [([None, "SIGTERM", "SIGINT"], "SIGTERM"), ([None, None], None), ([0, 1], 0)]
)
def test_the_first_rank_that_has_a_value(values: list, expected: object) -> None:
    assert Mesh.first(SimpleNamespace(gather=lambda value: values), None) == expected


def test_a_later_mesh_of_the_same_shape_has_its_own_groups():
    """As where a sweep checks several recipes in one process: DTensor would look for the groups of the first."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for other_groups in (5, 0):  # which move the names of those that the mesh makes
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        for _ in range(other_groups):
            dist.new_group()
        tp = mesh.Mesh({"dp_replicate": 1, "dp_shard": 2, "tp": 2}, torch.device("cpu"), None).device_mesh["tp"]
        rows = DTensor.from_local(torch.ones(4, 6), tp, [Shard(1)], run_check=False)
        weight = DTensor.from_local(torch.ones(6, 3), tp, [Shard(0)], run_check=False)
        summed = (rows @ weight).redistribute(placements=[Shard(0)])
        assert summed.to_local().shape == (2, 3) and summed.placements != (Replicate(),)
        mesh.stop()
