"""A sample of the support matrix runs again and gives what the committed results say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import matrix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("matrix")
    matrix.run_all(matrix.SAMPLE, folder, folder / "results.jsonl")
    return matrix.read(folder / "results.jsonl")


@pytest.mark.parametrize("cell", [cell.name for cell in matrix.SAMPLE])
def test_cell_is_what_the_results_say(cell: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[cell]["status"] == matrix.read(matrix.RESULTS)[cell]["status"], results[cell]
