"""Ranks, the device mesh and reductions over it. The only place that starts a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_prores.config.errors import ConfigError, ConfigErrors, MissingError, counted
from titan_prores.distributed.failures import PeerError
from titan_prores.distributed.watchdog import group_timeout

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands among those that torchrun started; one rank without torchrun."""

    rank: int
    local_rank: int
    size: int
    local_size: int = 1  # ranks on this host

    @classmethod
    def from_environment(cls) -> World:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, which torchrun sets."""
        names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(os.environ.get(name) or default) for name, default in names.items()))


def choose_device(wanted: str, world: World) -> torch.device:
    """The device of this rank.

    Args:
        wanted: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: CUDA was asked for and is not there, or has fewer devices than this host has ranks; on all of them.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("job.device", "no CUDA device is available", value=wanted, allowed="auto, cpu")
    if world.local_size > (count := torch.cuda.device_count()):
        ranks, devices = counted(world.local_size, "rank"), counted(count, "CUDA device")
        raise ConfigError("job.device", f"{ranks} on a host with {devices}", value=wanted)
    return torch.device("cuda", world.local_rank)


class Mesh:
    """The device mesh of a run with the few reductions that the engine needs.

    Attributes:
        degrees: axis -> ranks along it, outermost first.
        device_mesh: the same as torch sees it; every axis is there, of degree 1 too.
        device: this rank's device.
        store: key-value store that all ranks share; None on a fake process group.
        is_first_with_data: whether no rank before this one sees the same samples.
    """

    def __init__(self, degrees: Mapping[str, int], device: torch.device, store: dist.Store | None) -> None:
        self.degrees = dict(degrees)
        self.device = device
        self.store = store
        self.device_mesh: DeviceMesh = init_device_mesh(
            device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
        )
        data = self.device_mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self._data_group = data.get_group()
        self.data_rank = data.get_local_rank()
        self.data_size = data.size()
        self._groups = [dist.group.WORLD, self._data_group, *(self.device_mesh.get_group(axis) for axis in degrees)]
        if degrees.get("tp", 1) > 1:
            # DTensor finds it and sums a norm over both axes at once: one collective, one result on all ranks.
            self._groups.append(self.device_mesh["dp_shard", "tp"]._flatten("dp_shard_tp").get_group())
        self.is_first_with_data = self.device_mesh.get_local_rank("tp") == 0
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, metrics and the run folder."""
        return self.rank == 0

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over ranks that see different samples, in place; every rank of a TP group gets the same."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self._data_group)
        return tensor

    def sum_over(self, axis: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks along one axis, in place. Collective."""
        if self.degrees[axis] > 1:
            dist.all_reduce(tensor, group=self.device_mesh.get_group(axis))
        return tensor

    def concatenate_over(self, axis: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of the ranks along one axis, all of one shape, joined in `dim`. Collective."""
        if self.degrees[axis] == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.degrees[axis])]
        dist.all_gather(parts, tensor.contiguous(), group=self.device_mesh.get_group(axis))
        return torch.cat(parts, dim)

    def agree(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers that ranks with the same samples have in common; NaN on all of them where one's is not finite."""
        if self.degrees["tp"] == 1:
            return numbers
        troubled = self.sum_over("tp", (~numbers.isfinite()).float())
        return torch.where(numbers.isfinite() & (troubled > 0), torch.nan, numbers)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective."""
        if self.size == 1:
            return flag
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; every rank gets its picklable result.

        Raises:
            ConfigError, ConfigErrors: what it raised, on all ranks.
            PeerError: on the other ranks, for anything else that it raised.
        """
        result, failure, shown = None, None, None
        if self.is_main:
            try:
                result = action()
            except (ConfigError, ConfigErrors) as error:
                failure = shown = error
            except Exception as error:
                failure, shown = error, PeerError(f"rank 0 failed: {error}")
        box = [result, shown]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        if failure or box[1]:
            raise failure or box[1]
        return box[0]

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's picklable value, by rank, on all ranks; over `group`, of all ranks too, from another thread."""
        values: list[Any] = [None] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=group)
            return values
        return [value]

    def first(self, value: T | None) -> T | None:
        """The value of the first rank that has one, on all ranks; None where none has. Collective."""
        return next((found for found in self.gather(value) if found is not None), None)

    def new_group(self) -> dist.ProcessGroup:
        """A group of all ranks for collectives on the CPU from a thread of one's own. Collective."""
        return dist.new_group(backend="gloo")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def set_timeout(self, seconds: float) -> None:
        """Timeout of every collective from now on; the watchdog's, with its margin on top."""
        for group in self.groups():
            dist.distributed_c10d._set_pg_timeout(group_timeout(seconds), group)

    def groups(self) -> list[dist.ProcessGroup]:
        """Process groups of the run: the world, the data axes together, one an axis, and those of several axes."""
        return list(self._groups)


def start(degrees: Mapping[str, int], device: torch.device, world: World, timeout_seconds: float) -> Mesh:
    """Start the process group, or take the one that the caller's program has started, and lay the mesh over it.

    Args:
        degrees: axis -> degree; their product is the world's size.
        device: this rank's device; decides between nccl and gloo.
        timeout_seconds: of every collective.

    Raises:
        MissingError: this machine has no network interface that gloo could use.
    """
    if dist.is_initialized():
        return Mesh(degrees, device, dist.distributed_c10d._get_default_store())
    timeout = group_timeout(timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        store.set_timeout(timeout)
        # All attempts of one torchrun share a store: an earlier one's addresses, wishes and failures are not ours.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("default", store), rank=rank, world_size=size, timeout=timeout
        )
    except RuntimeError as error:
        if "Unable to find" not in str(error):  # an interface, or its address
            raise
        if name := os.environ.get("GLOO_SOCKET_IFNAME"):
            raise MissingError("GLOO_SOCKET_IFNAME", "is not a network interface here", value=name) from error
        raise no_interface() from error
    return Mesh(degrees, device, store)


def no_interface() -> MissingError:
    """What is wrong with a machine on which not even the ranks of one run could talk to each other."""
    return MissingError("", "no network interface is up, not even that of this machine to itself (ip link set lo up)")


def start_fake(degrees: Mapping[str, int]) -> Mesh:
    """A mesh of any size in this one process, for `--check`: collectives do nothing, tensors stay on meta."""
    # Registers the backend called "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = 1
    for degree in degrees.values():
        size *= degree
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return Mesh(degrees, torch.device("cpu"), None)


def stop() -> None:
    """End the process group, if there is one, after a run that went well on all ranks."""
    if dist.is_initialized():
        if dist.get_backend() != "fake" and dist.get_world_size() > 1:
            dist.barrier()  # without it a rank now and then aborts at exit while another still talks to it
        dist.destroy_process_group()
        # DTensor remembers how it computed, with the mesh, and takes an equal mesh of a later group for the same one.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
