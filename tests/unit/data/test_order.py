"""The permutation against brute force: it is one, it mixes, and it needs no memory for n."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from titan_prores.data import sample_windows, window_order


@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 99, 100, 101, 255, 256, 257, 1000, 1023, 4096, 4099, 10007])
def test_every_window_comes_once(n):
    for seed, epoch in itertools.product((0, 1, 2**63), (0, 1, 1000)):
        order = window_order(seed, epoch, np.arange(n), n)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_n_reaches_every_permutation(n):
    found = {tuple(window_order(seed, 0, np.arange(n), n)) for seed in range(3000)}
    assert len(found) == {2: 2, 3: 6, 4: 24}[n]


def test_a_position_does_not_depend_on_the_others():
    n = 1_000_003
    positions = np.random.default_rng(0).integers(0, n, size=(7, 5))
    together = window_order(5, 2, positions, n)
    assert together.shape == positions.shape
    for index in np.ndindex(positions.shape):
        assert window_order(5, 2, positions[index], n) == together[index]


@pytest.mark.parametrize("n", [1000, 65537, 10**12])
def test_mixes(n):
    """Neighbouring positions, and one position in neighbouring epochs and seeds, are spread evenly over range(n)."""
    count = 1000 if n == 1000 else 20_000
    positions = np.arange(count)
    rows = {
        "positions": window_order(0, 0, positions, n),
        "epochs": window_order(0, positions, np.zeros(count, dtype=int), n),
        "seeds": np.array([window_order(seed, 0, np.array(0), n) for seed in range(min(count, 5000))]),
    }
    bins = 20
    for name, ids in rows.items():
        expected = len(ids) / bins
        chi_square = ((np.bincount(ids * bins // n, minlength=bins) - expected) ** 2 / expected).sum()
        assert chi_square < 55, name  # 19 degrees of freedom: chance of 2e-5
        steps = np.diff(ids) % n
        chi_square = ((np.bincount(steps * bins // n, minlength=bins) - expected) ** 2 / expected).sum()
        assert chi_square < 55, f"steps over {name}"
    assert abs(np.corrcoef(rows["positions"], positions)[0, 1]) < 0.15


def test_epochs_and_seeds_share_few_places():
    n = 5000
    a, b, c = (window_order(seed, epoch, np.arange(n), n) for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    assert (a == b).sum() < 12 and (a == c).sum() < 12  # one is expected


def test_huge_n_takes_no_memory():
    positions = np.random.default_rng(0).integers(0, 10**12, size=100_000)
    window_order(0, 0, positions[:10], 10**12)
    tracemalloc.start()
    ids = window_order(0, 0, positions, 10**12)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert len(np.unique(ids)) == len(np.unique(positions)) and ids.max() < 10**12


def test_positions_run_through_the_epochs():
    n, seed = 37, 3
    windows = sample_windows(seed, np.arange(4 * n), n)
    for epoch in range(4):
        expected = window_order(seed, epoch, np.arange(n), n)
        np.testing.assert_array_equal(windows[epoch * n : (epoch + 1) * n], expected)
    assert sample_windows(seed, np.array([10**15]), 1).tolist() == [0]


def test_refuses_what_is_out_of_range():
    with pytest.raises(ValueError, match="positions"):
        window_order(0, 0, np.array([5]), 5)
    with pytest.raises(ValueError, match="n must"):
        window_order(0, 0, np.array([0]), 0)
    with pytest.raises(ValueError, match="negative"):
        sample_windows(0, np.array([-1]), 5)
