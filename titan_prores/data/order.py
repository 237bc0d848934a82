"""The order of samples: a pure function of (seed, epoch, position), so that a run needs no state to resume.

An epoch visits the n windows by a keyed pseudo-random permutation that is evaluated at single positions: a Feistel
network over pairs (left, right) of a rectangle just larger than n, walked on until it lands below n (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains"). Memory depends on the number of positions asked for, never on n.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isqrt

import numpy as np

_ROUNDS = 8  # as many 64-bit keys as one blake2b digest holds

# Mixing constants of the splitmix64 generator.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@lru_cache(maxsize=1024)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    """Shape [_ROUNDS], uint64; independent for every (seed, epoch)."""
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _shifted(values: np.ndarray, by: np.ndarray, keys: np.ndarray, n: int) -> np.ndarray:
    """(values + a pseudo-random function of `by` under `keys`) modulo n; values below n < 2**32, all uint64."""
    n = np.uint64(n)
    # The upper half of the random bits as a fraction of n, and at most one subtraction: numpy divides slowly.
    values = values + ((_mix(by, keys) >> np.uint64(32)) * n >> np.uint64(32))
    return np.where(values >= n, values - n, values)


def _mix(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Pseudo-random uint64 of each value under its key; both uint64, broadcast together."""
    mixed = values * _GOLDEN + keys  # wraps modulo 2**64 on purpose
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def window_order(seed: int, epoch: int | np.ndarray, positions: np.ndarray, n: int) -> np.ndarray:
    """Window ids at `positions` of an epoch; over all positions each of range(n) comes exactly once.

    Args:
        seed: of the data order.
        epoch: one epoch for all positions, or one for each, of the shape of `positions`.
        positions: integers in [0, n), any shape.
        n: number of windows, at least 1 and below 2**62.

    Returns:
        int64, of the shape of `positions`.

    Raises:
        ValueError: n or a position is out of range.
    """
    positions = np.asarray(positions)
    if not 1 <= n < 2**62:
        raise ValueError(f"n must be in [1, 2**62), not {n}")
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < n:
        raise ValueError(f"positions must be in [0, {n})")

    epochs, which = np.unique(epoch, return_inverse=True)
    keys = np.stack([_round_keys(seed, int(e)) for e in epochs], axis=1)  # [_ROUNDS, epochs]
    which = np.broadcast_to(which.ravel(), positions.size)

    # A rectangle rather than a square of powers of two: at most isqrt(n) of its cells lie outside range(n), so hardly
    # any position has to walk.
    height = isqrt(n - 1) + 1
    width = -(-n // height)
    ids = positions.ravel().astype(np.uint64)
    pending = np.arange(ids.size)
    while pending.size:
        left, right = np.divmod(ids[pending], np.uint64(width))
        # One epoch, the usual case, has one key a round for all; several are looked up for each position.
        chosen = keys if len(epochs) == 1 else keys[:, which[pending]]
        for round_keys in chosen.reshape(_ROUNDS // 2, 2, -1):
            left = _shifted(left, right, round_keys[0], height)
            right = _shifted(right, left, round_keys[1], width)
        ids[pending] = left * np.uint64(width) + right
        pending = pending[ids[pending] >= np.uint64(n)]
    return ids.astype(np.int64).reshape(positions.shape)


def sample_windows(seed: int, positions: np.ndarray, n: int) -> np.ndarray:
    """Window ids at global positions, which run through epoch after epoch: epoch = position // n.

    Args:
        seed: of the data order.
        positions: non-negative integers, any shape.
        n: number of windows of an epoch.

    Returns:
        int64, of the shape of `positions`.

    Raises:
        ValueError: n is out of range or a position is negative.
    """
    epoch, within = np.divmod(np.asarray(positions, dtype=np.int64), n)
    if epoch.size and epoch.min() < 0:
        raise ValueError("positions must not be negative")
    return window_order(seed, epoch, within, n)
