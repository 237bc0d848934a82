"""What may be claimed of measured times, and that a run held for measuring is the trainer's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from titan_prores.distributed import mesh
from titan_prores.tools import measure
from titan_prores.tools.measure import (
    MET,
    MISSED,
    UNRESOLVED,
    Bench,
    Interval,
    by_turns,
    median_interval,
    verdict,
    verdict_at_least,
)

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("n", "low", "high"),
    # Of 6 coins none shows heads in 1 of 64 cases, 1.6 % a side. Of 10 at most one does in 11 of 1024, 1.1 %; at most
    # two in 5.5 %, which is too often. Of 20 at most five do in 2.07 %, at most six in 5.8 %.
    [(6, 1, 6), (10, 2, 9), (20, 6, 15)],
)
def test_interval_of_the_median(n: int, low: int, high: int) -> None:
    values = [float(value) for value in range(n, 0, -1)]
    assert median_interval(values) == Interval(low, (n + 1) / 2, high)


def test_too_few_for_an_interval() -> None:
    with pytest.raises(ValueError, match="5 values"):
        median_interval([1.0] * 5)


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    """20 of 1000 samples outside would be expected of an exact 96 %; an interval one rank narrower misses 115."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(1000, 20, generator=generator).tolist()
    missed = sum(not i.low <= 0.5 <= i.high for i in map(median_interval, samples))
    assert 20 < missed < 70


def test_ratios_are_of_pairs() -> None:
    """A machine that becomes ten times slower halfway changes no ratio of a pair, though it does that of the sums."""
    reference = [1.0, 1.0, 1.0, 10.0, 10.0, 10.0]
    assert measure.paired_ratio([1.5, 1.5, 1.5, 15.0, 15.0, 15.0], reference) == Interval(1.5, 1.5, 1.5)
    with pytest.raises(ValueError):
        measure.paired_ratio([1.0] * 6, [1.0] * 7)


QUIET = Interval(0.998, 1.0, 1.003)


@pytest.mark.parametrize(
    ("ratio", "same", "limit", "expected"),
    [
        (Interval(0.99, 1.0, 1.01), QUIET, 1.01, MET),
        (Interval(1.02, 1.03, 1.04), QUIET, 1.01, MISSED),
        (Interval(0.99, 1.0, 1.02), QUIET, 1.01, UNRESOLVED),  # its own interval lies on both sides
        (Interval(1.005, 1.02, 1.03), QUIET, 1.01, UNRESOLVED),
        # A/A strays as far as the goal allows: in width, to one side, or by a bias that is always there.
        (Interval(0.99, 1.0, 1.005), Interval(0.994, 1.0, 1.006), 1.01, UNRESOLVED),
        (Interval(0.99, 1.0, 1.005), Interval(1.008, 1.009, 1.011), 1.01, UNRESOLVED),
        (Interval(1.2, 1.3, 1.4), Interval(0.98, 0.985, 0.989), 1.01, UNRESOLVED),
        (Interval(1.2, 1.3, 1.4), Interval(0.98, 0.985, 0.989), 1.03, MISSED),
    ],
)
def test_verdict(ratio: Interval, same: Interval, limit: float, expected: str) -> None:
    assert verdict(ratio, same, limit) == expected


@pytest.mark.parametrize(
    ("difference", "same", "expected"),
    [
        (Interval(-0.01, 0.0, 0.02), Interval(-0.01, 0.0, 0.01), MET),
        (Interval(1.1, 1.2, 1.3), Interval(-0.01, 0.0, 0.01), MISSED),
        (Interval(0.9, 1.0, 1.1), Interval(-0.01, 0.0, 0.01), UNRESOLVED),
        (Interval(-0.01, 0.0, 0.02), Interval(-0.6, 0.0, 0.5), UNRESOLVED),
    ],
)
def test_verdict_on_a_difference(difference: Interval, same: Interval, expected: str) -> None:
    """Of two equal things it is 0; the goal is one second."""
    assert verdict(difference, same, 1.0, equal=0.0) == expected


def test_differences_are_of_pairs() -> None:
    reference = [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]
    assert measure.paired_difference([r + 0.5 for r in reference], reference) == Interval(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("ratio", "same", "expected"),
    [
        (Interval(51, 60, 70), QUIET, MET),
        (Interval(30, 40, 49), QUIET, MISSED),
        (Interval(45, 60, 70), QUIET, UNRESOLVED),
        (Interval(51, 60, 70), Interval(0.9, 1.0, 1.0), UNRESOLVED),  # off by as much it would be 46
        (Interval(51, 60, 70), Interval(1.0, 1.0, 1.1), UNRESOLVED),
        (Interval(30, 40, 49), Interval(0.9, 1.0, 1.0), UNRESOLVED),
    ],
)
def test_verdict_at_least(ratio: Interval, same: Interval, expected: str) -> None:
    assert verdict_at_least(ratio, same, 50) == expected


def test_by_turns_takes_every_step_once_a_round_in_changing_order() -> None:
    calls: list[str] = []

    def step(name: str) -> float:
        calls.append(name)
        return float(calls.count(name))

    found = by_turns({name: lambda name=name: step(name) for name in "abc"}, rounds=20, warmup=2)
    rounds = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(rounds) == 22 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3
    assert found == {name: [float(count) for count in range(3, 23)] for name in "abc"}


def test_peak_bytes_counts_what_is_held_at_once() -> None:
    def step() -> None:
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first, second
        torch.empty(1000, 1000)

    assert measure.peak_bytes(step, torch.device("cpu")) == pytest.approx(6_000_000, rel=0.01)


def test_saved_bytes_counts_each_storage_once() -> None:
    weight = torch.ones(50, 100, requires_grad=True)
    x = torch.ones(10, 100, requires_grad=True)

    def step() -> None:
        y = torch.nn.functional.linear(x, weight)  # keeps x and, left out, weight
        y = y.exp()  # keeps its own result
        (y * y).sum().backward()  # keeps the same storage twice more

    assert measure.saved_bytes(step, [weight]) == 4 * (10 * 100 + 10 * 50)
    assert measure.saved_bytes(step, []) == 4 * (10 * 100 + 10 * 50 + 50 * 100)


@pytest.fixture(autouse=True, scope="module")
def leave_no_process_group():
    """Benches of one process share a group, which nobody after them expects."""
    yield
    mesh.stop()


@pytest.fixture
def benches(tmp_path: Path):
    def build(*overrides: str) -> Bench:
        build.count += 1
        own = [
            "--model.flavor=debug",
            "--training.seq_len=32",
            "--dataset.name=text",
            "--dataset.txt_document=paragraph",
            f"--dataset.files=[{str(REPOSITORY / 'tests/data/corpus.txt')!r}]",
            f"--dataset.cache_folder={tmp_path}/cache",
            f"--job.dump_folder={tmp_path}/{build.count}",
            *overrides,
        ]
        return Bench(measure.load(REPOSITORY / "train_configs" / "benchmark.toml", own))

    build.count = 0
    return build


def test_a_bench_steps_as_the_trainer_does(benches) -> None:
    bench = benches()
    assert bench.tokens_per_step == 4 * 32
    before = {name: p.to_local().clone() for name, p in bench.trainer.model.named_parameters()}
    assert bench.step() > 0 and bench.row["step"] == 1 and math.isfinite(bench.row["loss"])
    forward_backward = bench.forward_backward()
    assert bench.trainer.step == 2 and forward_backward > 0
    changed = [n for n, p in bench.trainer.model.named_parameters() if not torch.equal(p.to_local(), before[n])]
    assert "output.weight" in changed  # it is a whole update, whatever part of it is timed


def test_gradients_are_whole_named_and_those_before_clipping(benches) -> None:
    loose, tight = benches(), benches("--training.max_norm=1e-3")
    gradients = [bench.gradients() for bench in (loose, tight)]
    names = dict(loose.trainer.model.named_parameters())
    for found in gradients:
        assert found.keys() == names.keys()
        assert all(found[name].shape == parameter.shape for name, parameter in names.items())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in names)
    total = math.sqrt(sum(float(g.double().square().sum()) for g in gradients[0].values()))
    assert loose.row["grad_norm"] == pytest.approx(total, rel=1e-4) and total > 1e-2


def test_compare_has_an_a_a_pair(benches) -> None:
    overrides: list[tuple[str, ...]] = []

    def build(own):
        overrides.append(tuple(own))
        return benches(*own)

    off = ["--transforms.prores.enabled=false"]
    found = measure.compare(build, off, {"on": []}, pairs=6)
    assert overrides == [tuple(off), tuple(off), ()]
    assert {name: len(taken) for name, taken in found.seconds.items()} == {"reference": 6, "again": 6, "on": 6}
    assert found.ratios == {"on": measure.paired_ratio(found.seconds["on"], found.seconds["reference"])}
    assert found.same == measure.paired_ratio(found.seconds["again"], found.seconds["reference"])
    speed = found.tokens_per_second["on"]
    assert speed == pytest.approx(128 / sorted(found.seconds["on"])[2], rel=1) and speed > 0
    assert hasattr(found.benches["on"].trainer.model, "prores_alpha")
    assert not hasattr(found.benches["again"].trainer.model, "prores_alpha")
