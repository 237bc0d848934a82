"""Spike scores: by the equation, and the same whether a run stops in between or not."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from titan_prores.components.metrics.spike_score import SpikeScores
from titan_prores.output.run_folder import RunFolder
from titan_prores.output.spike_score import SpikeScore, spike_score


def plain(values: list[float], total: int, window: int, threshold: float, start: float, end: float) -> float:
    """The share of spikes, value by value; `values[k]` is of step k + 1."""
    spikes = scored = 0
    for k, value in enumerate(values):
        before = [other for other in values[:k] if math.isfinite(other)][-window:]
        if len(before) < window or not start * total < k + 1 <= end * total:
            continue
        scored += 1
        far = abs(value - statistics.fmean(before)) >= threshold * statistics.pstdev(before)
        spikes += far or not math.isfinite(value)
    return spikes / scored


@pytest.mark.parametrize(("window", "threshold"), [(20, 7.0), (50, 2.0), (7, 3.5)])
@pytest.mark.parametrize(("start", "end"), [(0.1, 0.9), (0.0, 1.0), (0.5, 0.6)])
def test_against_a_plain_loop(window: int, threshold: float, start: float, end: float) -> None:
    draw = random.Random(window)
    values = [3 / (1 + k / 50) + draw.gauss(0, 0.05) for k in range(400)]
    for k in (60, 61, 150, 222, 230, 399):
        values[k] += 2.0
    values[120], values[121], values[225] = math.nan, math.inf, -math.inf
    expected = plain(values, 400, window, threshold, start, end)
    assert expected > 0
    found = spike_score(enumerate(values, 1), 400, window=window, threshold=threshold, start_ratio=start, end_ratio=end)
    assert found == expected


def test_equal_values_have_no_spike_and_any_other_is_one() -> None:
    assert spike_score(enumerate([1.0] * 50, 1), 50, window=10) == 0
    found = SpikeScore(50, window=10)
    for step, value in enumerate([1.0] * 20 + [1.001] + [1.0] * 9, 1):
        found.add(step, value)
    assert (found.spikes, found.scored) == (1, 20)


def test_the_window_is_full_before_anything_is_scored() -> None:
    assert math.isnan(spike_score(enumerate([1.0, 9.0] * 5, 1), 10, window=10, start_ratio=0, end_ratio=1))
    assert spike_score(enumerate([1.0] * 10 + [9.0], 1), 11, window=10, start_ratio=0, end_ratio=1) == 1.0


def component(run: RunFolder, start_step: int) -> SpikeScores:
    made = SpikeScores(SpikeScores.Config(every_steps=5, window=8, threshold=3))
    info = {"total_steps": 60, "end_step": 60, "start_step": start_step}
    made.prepare(run, info, None)
    made.start(run, info)
    return made


def test_a_run_that_resumes_counts_on(tmp_path) -> None:
    draw = random.Random(1)
    rows = [{"step": step, "loss": draw.gauss(3, 0.1), "grad_norm": draw.gauss(1, 0.1)} for step in range(1, 61)]
    rows[30]["loss"], rows[40]["grad_norm"], rows[33]["loss"] = 9.0, 5.0, math.nan
    run = RunFolder(tmp_path, is_main=True)
    straight = component(run, 0)
    expected = [straight.derive(row) for row in rows]
    assert expected[-1] == {
        f"{key}_spike_score": plain([row[key] for row in rows], 60, 8, 3, 0.1, 0.9) for key in ("loss", "grad_norm")
    }
    assert all(
        bool(found) == (row["step"] % 5 == 0 and row["step"] > 8) for row, found in zip(rows, expected, strict=True)
    )
    lines = [json.dumps({**row, "loss": "NaN" if row["loss"] != row["loss"] else row["loss"]}) for row in rows[:35]]
    validation = json.dumps({"step": 35, "validation": True, "validation_loss": 2.0})
    run.metrics_file.write_text("\n".join([*lines[:20], '{"step": 2', *lines[20:], validation]) + "\n")
    resumed = component(run, 35)
    assert [resumed.derive(row) for row in rows[35:]] == expected[35:]
