"""Traces come out for the steps that were asked for, and nothing at all otherwise."""

import gzip
import json

import torch

from titan_prores.config.engine_sections import Profiling
from titan_prores.training import profiling


def train(profile, steps):
    for _ in range(steps):
        torch.ones(8, 8) @ torch.ones(8, 8)
        profile.step()


def test_a_trace_every_profile_freq_steps(tmp_path):
    config = Profiling(enable_profiling=True, profile_freq=3, save_traces_folder="traces")
    with profiling.profiler(config, tmp_path, rank=1, start_step=10) as profile:
        train(profile, 8)
    assert sorted(p.name for p in (tmp_path / "traces").iterdir()) == ["step_13", "step_16"]
    with gzip.open(tmp_path / "traces" / "step_13" / "rank_1.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 1, "one step, not the warm-up beside it"


def test_off_writes_nothing(tmp_path):
    with profiling.profiler(Profiling(), tmp_path, rank=0) as profile:
        train(profile, 30)
    assert list(tmp_path.iterdir()) == []


def test_memory_snapshot_says_once_that_it_needs_cuda(tmp_path, monkeypatch, logged):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with profiling.profiler(Profiling(enable_memory_snapshot=True, profile_freq=3), tmp_path, rank=0) as profile:
        train(profile, 7)
    assert len(logged) == 1 and "needs CUDA" in logged[0]
    assert list(tmp_path.iterdir()) == []
