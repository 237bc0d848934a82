"""A run that an earlier version has begun goes on as that version would have gone on, bitwise.

`checkpoint_of_f181736` holds what commit f181736 left of `scripts/train.py --config recipe.toml
--training.stop_after=6` (run.tar.gz: checkpoint, rows and recipe, with the key names of that commit), and what the same
commit then made of steps 7 to 12 (expected.json). Rename a key in recipe.toml, never in the archive.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.integration.launch import launch, rows

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

EARLIER = Path(__file__).parent / "checkpoint_of_f181736"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())
# Which instructions a CPU has decides the order of sums; these are what every x86 CPU has.
EVERY_CPU = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def tensors_hash(checkpoint: Path) -> str:
    """Of names, types, shapes and bytes of all tensors, weights and optimizer state."""
    reader = dcp.FileSystemReader(checkpoint)
    state = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def seen(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what depends on the machine."""
    return {key: value for key, value in row.items() if key not in ("tokens_per_second", "step_seconds", "memory_gib")}


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != EXPECTED["torch"] or platform.machine() != "x86_64",
    reason="bitwise with the version of torch, and on the kind of CPU, that wrote it",
)
def test_a_checkpoint_of_an_earlier_version_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(EARLIER / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "text.txt").write_bytes((EARLIER / "text.txt").read_bytes())
    for name, value in EVERY_CPU.items():
        monkeypatch.setenv(name, value)
    finished = launch("--config", str(EARLIER / "recipe.toml"), "--checkpoint.resume=must", cwd=tmp_path)
    assert "resuming at step 6" in finished.text
    found = [seen(row) for row in rows(tmp_path / "run") if row["step"] > 6]
    assert found == EXPECTED["rows"]
    assert tensors_hash(tmp_path / "run/checkpoint/step-00000012") == EXPECTED["tensors"]
    assert tensors_hash(tmp_path / "run/checkpoint/step-00000006") != EXPECTED["tensors"]
    lines = [line.partition("changed since the checkpoint: ")[2] for line in finished.text.splitlines()]
    changed = [line for line in lines if line]  # a key that was renamed is not one that was changed
    assert changed == ["checkpoint.resume: 'auto' -> 'must'", "training.stop_after: 6 -> not set"]
