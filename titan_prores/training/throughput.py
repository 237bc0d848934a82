"""How fast a run is and what it takes: tokens a second, model FLOPs utilisation, memory."""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import psutil
import torch

# Dense bf16 peaks of one device in FLOP/s, from the vendors' data sheets (without structured sparsity), by a pattern
# of the name that the driver reports. First match wins; a variant with another peak comes before its family.
PEAK_FLOPS = (
    (r"\bMIG\b", None),  # a slice of a device
    (r"\bA100\b", 312e12),
    (r"\bH100 PCIe", 756e12),
    (r"\bH[12]00 NVL", 835e12),
    (r"\bG?H[12]00\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\bG?B200\b", 2250e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bRTX 4090$", 165e12),
    (r"\bRTX 3090$", 71e12),
    (r"\bMI3(00|25)X\b", 1307e12),
    (r"\bMI250X?\b", 191.5e12),  # one of its two dies, which is what shows up as a device
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of `device` in FLOP/s; None for CPUs and for devices that are not in the table."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the device that the driver calls `name`, or None."""
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name)), None)


def mfu(tokens_per_second: float, flops_per_token: float, n_devices: int, peak: float) -> float:
    """Model FLOPs utilisation: share (0 to 1) of the devices' peak that goes into the model's own arithmetic.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: forward and backward; what activation checkpointing computes again does not count.
        n_devices: number of devices.
        peak: FLOP/s of one of them.
    """
    return tokens_per_second * flops_per_token / (n_devices * peak)


# Compute capability from which NVIDIA's devices multiply float8 tensors: with a scale for each, or for each row.
FLOAT8_CAPABILITIES = {"tensor": (8, 9), "row": (9, 0)}
# AMD's devices that do (MI300, MI350, RDNA 4); their capability numbers mean something else.
_FLOAT8_GFX = ("gfx94", "gfx95", "gfx12")


def has_float8_matmul(device: torch.device, scale_per: Literal["tensor", "row"] = "tensor") -> bool:
    """Whether `device` multiplies float8 tensors itself."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(_FLOAT8_GFX)
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITIES[scale_per]


def memory_gib(device: torch.device) -> float:
    """Peak of allocated device memory so far; without CUDA what this process has resident now. In GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


class Throughput:
    """Stopwatch of the training loop. Runs from its making; validation and checkpoints are left out with `paused`.

    Args:
        device: of this rank.
        n_devices: of all ranks.
        flops_per_token: of the model, forward and backward.
    """

    def __init__(self, device: torch.device, n_devices: int, flops_per_token: float) -> None:
        self.device, self.n_devices, self.flops_per_token = device, n_devices, flops_per_token
        self.peak = peak_flops(device)
        self.speeds: deque[float] = deque(maxlen=1000)  # tokens/s of the latest steps
        self._last = time.perf_counter()
        self._paused_seconds = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the step it falls into."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - start

    def step(self, tokens: int) -> dict[str, float]:
        """End a step in which all ranks together trained on `tokens`.

        Returns:
            For its row: its length `step_seconds`, pauses left out, `tokens_per_second` of all ranks together,
            `memory_gib` of this one, and `mfu` where the device's peak is known.
        """
        now = time.perf_counter()
        seconds = max(now - self._last - self._paused_seconds, 1e-9)
        self._last, self._paused_seconds = now, 0.0
        self.speeds.append(tokens / seconds)
        found = {"tokens_per_second": self.speeds[-1], "step_seconds": seconds, "memory_gib": memory_gib(self.device)}
        if self.peak is not None:
            found["mfu"] = mfu(self.speeds[-1], self.flops_per_token, self.n_devices, self.peak)
        return found

    def median(self) -> float | None:
        """Median tokens per second of the latest 1000 steps; None before the first."""
        return statistics.median(self.speeds) if self.speeds else None
