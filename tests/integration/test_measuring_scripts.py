"""titan-prores benchmark and titan-prores gpu-check as a user runs them, at the smallest sizes there are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.launch import CORPUS, REPOSITORY
from titan_prores.tools.gpu_check import PARTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(script: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_benchmark(tmp_path: Path) -> None:
    parts = (
        "prores-compiled",
        "checkpoint-eager",
        "alpha",
        "graphs",
        "saved",
        "bare",
        "async",
        "loader",
        "launch",
        "probes",
    )
    chosen = [word for part in parts for word in ("--only", part)]
    finished = run(
        "benchmark.py",
        "--size",
        "debug",
        "--pairs",
        "12",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "out.json"),
        "--training.seq_len=32",
        f"--dataset.cache_folder={tmp_path}/tokens",
        "--dataset.name=text",
        f"--dataset.files=[{str(CORPUS)!r}]",
        "--dataset.txt_document=paragraph",
        "--dataset.validation_fraction=0.1",
        # The parts that compile switch it on again; what inductor makes of it takes longest, and is not looked at here.
        "--transforms.compile.backend=aot_eager",
        "--transforms.compile.enabled=false",
        *chosen,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert max(map(len, finished.stdout.splitlines())) <= 100
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {row["measured"]: row for row in found["rows"]}
    assert not [row for row in rows.values() if row["result"] == "failed"]
    assert rows["graphs added during a warmup"]["verdict"] == "met"
    assert rows["activation bytes saved by ProRes, eager"]["verdict"] == "met"
    ratio = rows["ProRes on / off, compiled: time"]
    assert ratio["verdict"] in ("met", "missed", "inconclusive") and ratio["same"]
    assert ratio["ratio"]["low"] <= ratio["ratio"]["median"] <= ratio["ratio"]["high"]
    seconds = found["seconds"]["prores_compiled"]
    assert {name: len(times) for name, times in seconds.items()} == {"reference": 12, "again": 12, "on": 12}
    for mode in ("thread", "process"):
        assert rows[f"stopped by a save, async_mode {mode} / disabled: time"]["ratio"]["low"] > 0
    peaks = {}
    for mode in ("selective", "every_k", "full"):
        words = rows[f"activation checkpointing {mode} / none, eager: time"]["note"].split("peak memory of a step ")[1]
        peaks[mode], _, peaks["none"], _ = (int(word) if word.isdigit() else word for word in words.split())
    assert peaks["full"] <= peaks["every_k"] <= peaks["none"] and peaks["selective"] <= peaks["none"]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("trial") / "out.json"
    # speed-medium is speed-small at another size, which on a CPU is the same.
    chosen = [word for part in PARTS if part != "speed-medium" for word in ("--only", part)]
    finished = run("gpu_check.py", "--device", "cpu", "--json", str(file), *chosen, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return {"out": finished.stdout, **json.loads(file.read_text())}


def test_gpu_check_runs_its_parts_on_a_cpu(trial: dict[str, Any]) -> None:
    status = {line["what"]: line["status"] for line in trial["lines"]}
    assert "failed" not in status.values()
    parity = [
        "activation checkpointing full = none",
        "activation checkpointing selective = none",
        "ProRes at alpha 1 = without ProRes",
        "FSDP2 on one rank = without",
        "compiled = eager",
        "FSDP2 on 2 ranks = one process",
        "TP on 2 ranks = one process",
    ]
    assert [what for what in parity if status.get(what) != "ok"] == []
    assert status["7B"] == "skipped" and status["largest that fits: debug, ProRes, compiled, full AC, bf16"] == "ok"
    assert status["debug, ProRes on / off, compiled: time"] == "ok"
    assert "a trial of this script, no result" in trial["out"]


def test_gpu_check_needs_no_torchao_and_no_torchdata(tmp_path: Path) -> None:
    """A package that cannot be imported stands in for one that is not installed."""
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "import importlib.abc, sys\n"
        "class Gone(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torchao', 'torchdata', 'pytest'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    file = tmp_path / "out.json"
    command = [
        sys.executable,
        str(REPOSITORY / "scripts" / "gpu_check.py"),
        "--device",
        "cpu",
        "--json",
        str(file),
        "--only",
        "largest",
        "--only",
        "float8-training",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    status = {line["what"]: line["status"] for line in json.loads(file.read_text())["lines"]}
    assert status["float8 training"] == "skipped"
    assert status["largest that fits: debug, ProRes, compiled, full AC, bf16"] == "ok"


def test_gpu_check_takes_its_parts_along_when_it_is_stopped() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--device", "cpu", "--only", "speed-small"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (parts := psutil.Process(process.pid).children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert parts
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(parts, timeout=10)
        assert alive == []
    finally:
        process.kill()
