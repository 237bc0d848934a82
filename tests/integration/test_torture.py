"""A short torture, and that the harness notices a run which is not what it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torture import (
    KINDS,
    LAYOUTS,
    Campaign,
    Chain,
    ChainPlan,
    Fault,
    Record,
    Round,
    describe,
    torture,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REAL = ("torchrun restarts", "kill real", "small disk")  # they start Python anew for every launch


def lost(records: list[Record]) -> list[str]:
    return [describe(record) for record in records if record.state not in ("survived", "missed")]


def test_short_torture(tmp_path: Path) -> None:
    """Six faults of nearly as many kinds."""
    records = torture(tmp_path, 6, 0, [name for name in KINDS if name not in (*REAL, "late rank")])
    assert not lost(records) and sum(record.state == "survived" for record in records) >= 6


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("torture"))


def played(campaign: Campaign, number: int, layout: int, *rounds: Round, own: tuple = (), sabotage: str = "") -> Chain:
    chain = Chain(campaign, ChainPlan(number, LAYOUTS[layout], rounds), own)
    with (chain.folder / "torture_plugin.py").open("a") as plugin:
        plugin.write(sabotage)
    chain.play()
    return chain


def test_torchrun_goes_on_by_itself_after_a_rank_is_killed(campaign: Campaign) -> None:
    """--max-restarts: rank 1 is killed in the midst of a save; rows and samples are the undisturbed run's, bitwise."""
    killed = Fault(0, "torchrun restarts", (0.9, 0.5, 0, 0, 0))
    chain = played(campaign, 0, 2, Round((), killed, 0, "disabled"))
    (record,) = chain.records
    assert record.state == "survived", describe(record)
    assert record.moment.startswith("rank 1: before ")


NOTHING = Round((), None, 0, "disabled")
# Name -> what is put into the launches alone, and what the harness has to say.
SABOTAGE = {
    "loses a step": (
        """
from titan_prores.trainer import Trainer

build = Trainer.build


def late(self):
    build(self)
    self.step += bool(self.step)


Trainer.build = late
""",
        "began with step",
    ),
    "other samples": (
        """
from titan_prores.data import loader

sample_windows = loader.sample_windows
loader.sample_windows = lambda seed, positions, n: sample_windows(seed, positions + (positions.min() > 99), n)
""",
        "consumed a sample that is not of this step",
    ),
    "other weights": (
        """
from titan_prores.components.checkpoint import _tensors

load = _tensors.load


def inexact(folder, model, optimizer):
    load(folder, model, optimizer)
    next(model.parameters()).data.mul_(1 + 1e-6)


_tensors.load = inexact
""",
        "undisturbed",
    ),
    "rows twice": (
        """
from titan_prores.output.run_folder import RunFolder

RunFolder.set_aside_metrics = lambda self, step: 0
""",
        "belongs",
    ),
    "saves too seldom": (
        """
from titan_prores.checkpoint.saver import Saver

Saver.due = lambda self, step, *, last: step % 12 == 0
""",
        "newest whole checkpoint",
    ),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_notices(name: str, campaign: Campaign) -> None:
    sabotage, said = SABOTAGE[name]
    killed = Fault(0, "kill at operation", (0, 0.9, 0, 0, 0))
    chain = played(campaign, 10 + list(SABOTAGE).index(name), 0, Round((), killed, 0, "disabled"), sabotage=sabotage)
    problems = [record.problem for record in chain.records if record.state == "lost"]
    assert problems and said in problems[0]


def test_notices_a_damaged_checkpoint_that_is_taken(campaign: Campaign) -> None:
    flipped = Fault(0, "flip", (0, 0, 0.3, 0.5, 0))
    never = ("--checkpoint.verify=never",)
    chain = played(campaign, 30, 0, Round((flipped,), None, 0, "disabled"), own=never)
    (record,) = chain.records
    assert "__0_0.distcp" in record.moment
    assert record.state == "lost" and "it went on elsewhere" in record.problem
    assert not lost(played(campaign, 31, 0, Round((flipped,), None, 0, "disabled")).records)
