"""Windows and microbatches: every token is a label once, and no layout changes who gets which sample when."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from titan_prores.config.engine_sections import Training
from titan_prores.config.errors import ConfigError
from titan_prores.config.layout import global_batch_size
from titan_prores.config.registry import lookup
from titan_prores.data import (
    IGNORED_LABEL,
    DataError,
    TokenStream,
    TokenWindows,
    microbatches,
    sample_windows,
    window_order,
)
from titan_prores.data.shards import Shard
from titan_prores.protocols.validator import ValidationContext

# More workers than this machine has cores are what the tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def write_stream(folder: Path, n_tokens: int, shard_tokens: int = 37) -> TokenStream:
    """Tokens 0, 1, 2 ..., so that a token tells its place."""
    shards = []
    for number, start in enumerate(range(0, n_tokens, shard_tokens)):
        path = folder / f"train-{number:05d}.bin"
        tokens = np.arange(start, min(start + shard_tokens, n_tokens), dtype="<u2")
        tokens.tofile(path)
        shards.append(Shard(path, len(tokens), tokens.nbytes, ""))
    return TokenStream("train", shards, np.dtype("<u2"), eot_id=60000)


@pytest.fixture
def windows(tmp_path) -> TokenWindows:
    return TokenWindows(write_stream(tmp_path, 10 * 8 + 1), seq_len=8)  # 10 windows


@pytest.mark.parametrize("n_tokens", [9, 16, 17, 80, 81, 88])
def test_windows_shift_labels_by_one(tmp_path, n_tokens):
    windows = TokenWindows(write_stream(tmp_path, n_tokens), 8)
    labels = [windows[w][1] for w in range(len(windows))]
    for w in range(len(windows)):
        assert windows[w][0].tolist() == list(range(8 * w, 8 * w + 8))
        assert windows[w][0].dtype == windows[w][1].dtype == torch.int64
    assert torch.cat(labels).tolist() == list(range(1, 8 * ((n_tokens - 1) // 8) + 1))
    with pytest.raises(IndexError):
        windows[len(windows)]


@pytest.mark.parametrize("n_tokens", [2, 5, 9, 16, 17, 18])
def test_partial_window_makes_every_token_but_the_first_a_label(tmp_path, n_tokens):
    windows = TokenWindows(write_stream(tmp_path, n_tokens), 8, keep_partial=True)
    tokens, labels = (torch.cat([windows[w][side] for w in range(len(windows))]) for side in (0, 1))
    assert tokens.shape == labels.shape and len(labels) % 8 == 0
    assert labels[labels != IGNORED_LABEL].tolist() == list(range(1, n_tokens))
    assert tokens[labels != IGNORED_LABEL].tolist() == list(range(n_tokens - 1))
    assert set(tokens[labels == IGNORED_LABEL].tolist()) <= {60000}
    assert len(labels) - (n_tokens - 1) < 8


def test_windows_are_spread_over_the_whole_stream(windows):
    assert [windows.spread(count) for count in (1, 2, 3, 10, 99)] == [
        [0],
        [0, 5],
        [0, 3, 6],
        [*range(10)],
        [*range(10)],
    ]


class FixedLoss(torch.nn.Module):
    """A model whose loss of the label k is k / 10^4."""

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return tokens_BS

    @staticmethod
    def loss(logits: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return (labels_BS[labels_BS != IGNORED_LABEL] / 1e4).sum()


@pytest.mark.parametrize(("data_size", "batch_size"), [(1, 1), (1, 4), (2, 3), (3, 2)])
def test_validation_scores_windows_from_all_of_the_held_out_text(tmp_path, monkeypatch, data_size, batch_size):
    """Labels are places in the text: the mean is that of the text, not of its beginning, on any layout."""
    lines = []
    monkeypatch.setattr("titan_prores.output.log.logger.info", lambda line, *values: lines.append(line % values))
    sums = []
    windows = TokenWindows(write_stream(tmp_path, 1000), 8, keep_partial=True)
    component = lookup("validator", "perplexity")
    for max_tokens, count in ((80, 10), (0, 125), (10**6, 125)):
        sums.clear()
        for data_rank in range(data_size):
            mesh = SimpleNamespace(
                device=torch.device("cpu"),
                data_size=data_size,
                data_rank=data_rank,
                sum_over_data=lambda total: sums.append(total.clone()) or total + 1e-9,
            )
            validator = component(component.Config(max_tokens=max_tokens))
            model = FixedLoss()
            context = ValidationContext(
                model, model.loss, lambda batch: batch, windows, None, mesh, batch_size, stopping=lambda: False
            )
            validator.validate(context)
        summed, tokens = sum(sums).tolist()
        chosen = [label for number in range(count) for label in windows[number * 125 // count][1].tolist()]
        chosen = [label for label in chosen if label != IGNORED_LABEL]
        assert tokens == len(chosen)
        assert summed * 1e4 / tokens == pytest.approx(np.mean(chosen))
        assert summed * 1e4 / tokens == pytest.approx(500, rel=0.12)  # the first 80 tokens' mean is 40
    assert "validation scores 10 of the 125 windows of held-out text, evenly spread" in lines
    assert lines[-1] == "validation scores 125 of the 125 windows of held-out text"


@pytest.mark.parametrize(("n_tokens", "keep_partial"), [(8, False), (0, False), (1, True), (0, True)])
def test_too_few_tokens(tmp_path, n_tokens, keep_partial):
    with pytest.raises(ConfigError, match=rf"training.seq_len = 8: the train split has {n_tokens} tokens"):
        TokenWindows(write_stream(tmp_path, n_tokens), 8, keep_partial=keep_partial)


def take(windows, count, **changed):
    settings = dict(seed=1, start_position=0, local_batch_size=2, data_rank=0, data_ranks=1, num_workers=0) | changed
    batches = microbatches(windows, **settings)
    taken = list(islice(batches, count))
    batches.close()
    return taken


def test_follows_the_order_through_epochs(windows):
    """Against the definition: sample p is window_order(seed, p // n)[p % n]; n = 10."""
    got = torch.cat([batch.tokens_BS for batch in take(windows, 30, local_batch_size=2)])
    expected = sample_windows(1, np.arange(60), 10)
    assert (got[:, 0] // 8).tolist() == expected.tolist()
    for epoch in range(6):
        assert sorted(expected[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))


@pytest.mark.parametrize("start_position", [0, 7, 10, 9995, 10**12 + 3])
def test_global_batches_are_the_same_on_every_layout(windows, start_position):
    """12 samples an update, as ranks x microbatches x batch size, in one process or three: the same ones in order."""
    n_updates, size = 4, 12
    positions = start_position + np.arange(n_updates * size).reshape(n_updates, size)
    expected = sample_windows(1, positions, 10)
    for data_ranks, num_workers, local_batch_size in (
        (1, 0, 12),
        (1, 3, 4),
        (1, 1, 1),
        (2, 0, 3),
        (2, 1, 6),
        (2, 3, 2),
        (4, 0, 1),
        (4, 1, 3),
    ):
        accumulated = size // (data_ranks * local_batch_size)
        seen = np.empty((n_updates, accumulated, data_ranks, local_batch_size), dtype=np.int64)
        for rank in range(data_ranks):
            batches = take(
                windows,
                n_updates * accumulated,
                start_position=start_position,
                data_rank=rank,
                data_ranks=data_ranks,
                num_workers=num_workers,
                local_batch_size=local_batch_size,
            )
            for k, batch in enumerate(batches):
                tokens_BS, labels_BS = batch.tokens_BS, batch.labels_BS
                assert tokens_BS.shape == labels_BS.shape == (local_batch_size, 8)
                assert torch.equal(labels_BS, tokens_BS + 1)
                seen[k // accumulated, k % accumulated, rank] = tokens_BS[:, 0] // 8
        np.testing.assert_array_equal(seen.reshape(n_updates, size), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("start_position", [0, 7, 10**12 + 3])
def test_a_batch_carries_the_global_position_of_each_sample(windows, num_workers, start_position):
    for rank in range(2):
        where = dict(start_position=start_position, data_rank=rank, data_ranks=2, num_workers=num_workers)
        for k, batch in enumerate(take(windows, 5, local_batch_size=3, **where)):
            assert batch.samples_B.tolist() == [start_position + (2 * k + rank) * 3 + i for i in range(3)]
            expected = sample_windows(1, batch.samples_B.numpy(), len(windows))
            assert (batch.tokens_BS[:, 0] // 8).tolist() == expected.tolist() and batch.extras == {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumes_on_another_layout(windows, num_workers):
    straight = torch.cat([batch.tokens_BS for batch in take(windows, 12, local_batch_size=4)])
    first = torch.cat([batch.tokens_BS for batch in take(windows, 5, local_batch_size=4)])
    resumed = torch.empty(28, 8, dtype=torch.int64)
    for rank in range(2):
        batches = take(
            windows, 7, start_position=20, local_batch_size=2, data_rank=rank, data_ranks=2, num_workers=num_workers
        )
        for k, batch in enumerate(batches):
            at = (k * 2 + rank) * 2
            resumed[at : at + 2] = batch.tokens_BS
    assert torch.equal(torch.cat([first, resumed]), straight)


def test_a_run_that_changes_its_layout_again_and_again(windows):
    """Ranks, microbatches and workers drawn anew for each stretch of a run, batch sizes that no epoch divides by.

    The trainer's own arithmetic on the left, epochs as permutations on the right: update u holds, in whatever order,
    what positions [u * size, (u + 1) * size) of the epochs, one after the other, say.
    """
    draw = random.Random(0)
    n, crossed = len(windows), 0
    for run in range(25):
        size = draw.choice([1, 2, 3, 4, 6, 7, 8, 12, 16, 24])
        begin = draw.choice([0, 1, n - 1, n, draw.randrange(10**6), draw.randrange(10**12)])
        samples = begin
        while samples < begin + 3 * n + size:
            data_ranks = draw.choice([d for d in range(1, size + 1) if size % d == 0])
            share = size // data_ranks
            local = draw.choice([d for d in range(1, share + 1) if share % d == 0])
            training = Training(local_batch_size=local, global_batch_size=size)
            accumulated = global_batch_size(training, data_ranks) // (local * data_ranks)
            updates, num_workers = draw.randint(1, 3), draw.choice([0, 0, 0, 1, 2]) if run < 5 else 0
            taken = [
                take(
                    windows,
                    updates * accumulated,
                    start_position=samples,
                    local_batch_size=local,
                    data_rank=rank,
                    data_ranks=data_ranks,
                    num_workers=num_workers,
                )
                for rank in range(data_ranks)
            ]
            for update in range(updates):
                mine = slice(update * accumulated, (update + 1) * accumulated)
                got = sorted(int(row[0]) // 8 for rank in taken for batch in rank[mine] for row in batch.tokens_BS)
                places = [divmod(position, n) for position in range(samples, samples + size)]
                assert got == sorted(int(window_order(1, epoch, within, n)) for epoch, within in places)
                crossed += places[0][0] != places[-1][0]
                samples += size
    assert crossed > 50  # an epoch ended inside of a batch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_memory_does_not_grow_with_the_data_or_the_position(tmp_path, num_workers):
    """10^12 tokens, for the order and for reads: all shards are one sparse file. A table of the order would be 8 TB."""
    path, shard_tokens, peaks = tmp_path / "sparse.bin", 10**8, {}
    with path.open("wb") as file:
        file.truncate(2 * shard_tokens)
    for n_shards in (1, 10_000):
        shards = [Shard(path, shard_tokens, 2 * shard_tokens, "")] * n_shards
        windows = TokenWindows(TokenStream("train", shards, np.dtype("<u2"), eot_id=0), seq_len=8)
        for start_position in (0, 10**9, 10**15):
            tracemalloc.start()
            batches = take(windows, 70, start_position=start_position, num_workers=num_workers)
            peaks[n_shards, start_position] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert len(batches) == 70
    assert len(windows) == (10**12 - 1) // 8
    assert max(peaks.values()) < 1e6, peaks


def test_runs_past_what_is_planned_at_once(windows):
    got = torch.cat([batch.tokens_BS for batch in take(windows, 150, local_batch_size=1)])
    assert (got[:, 0] // 8).tolist() == sample_windows(1, np.arange(150), 10).tolist()


def test_leaves_the_global_random_state_alone(windows):
    before = torch.get_rng_state()
    take(windows, 3, num_workers=0)
    take(windows, 3, num_workers=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("how", ["close", "drop"])
def test_workers_end_with_the_iterator(windows, how):
    before = set(multiprocessing.active_children())
    batches = microbatches(
        windows, seed=0, start_position=0, local_batch_size=1, data_rank=0, data_ranks=1, num_workers=2
    )
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    if how == "close":
        batches.close()
    else:
        del batches
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("changed", [{"data_rank": 1}, {"start_position": -1}, {"local_batch_size": 0}])
def test_refuses_at_once_what_is_out_of_range(windows, changed):
    settings = dict(seed=1, start_position=0, local_batch_size=2, data_rank=0, data_ranks=1, num_workers=0)
    with pytest.raises(ValueError):
        microbatches(windows, **settings | changed)


class Troubled(TokenWindows):
    """Windows that cannot be read from the fifth on: it raises, ends its process, or takes for ever."""

    def __init__(self, windows, how):
        self.__dict__.update(windows.__dict__)
        self.how, self.read = how, 0

    def __getitem__(self, window):
        self.read += 1
        if self.read > 4:
            if self.how == "raise":
                raise ValueError("the shard is gone")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(window)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "how, said",
    [
        ("raise", "data worker 0: ValueError: the shard is gone"),
        ("kill", r"killed by signal|exited unexpectedly"),
        ("hand over", "exited unexpectedly"),
        ("hang", "no more patience"),
    ],
)
def test_a_worker_that_cannot_work_ends_the_iterator(windows, how, said, monkeypatch, capfd):
    from titan_prores.data import loader

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(loader, "POLL_SECONDS", 0.2)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    if how == "hand over":
        monkeypatch.setattr(loader, "_as_arrays", lambda samples: [lambda: "no queue takes this"])
    waited = []

    def waiting(seconds):
        waited.append(seconds)
        if how == "hang" and seconds > 0.5:
            raise RuntimeError("no more patience")

    with pytest.raises((DataError, RuntimeError), match=said):  # SIGCHLD's handler may be first, and say the same
        take(Troubled(windows, how), 9, num_workers=1, waiting=waiting)
    assert how != "hang" or waited[0] < 0.5
    if how == "hand over":
        assert "data worker 0 cannot hand over a batch: " in capfd.readouterr().err
    assert set(multiprocessing.active_children()) == before


@pytest.mark.timeout(60)
def test_workers_need_no_socket(windows, tmp_path, monkeypatch):
    """A path to one may have 107 characters, and a TMPDIR alone as many."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for found, expected in zip(take(windows, 3, num_workers=1), take(windows, 3), strict=True):
        assert torch.equal(found.tokens_BS, expected.tokens_BS) and torch.equal(found.labels_BS, expected.labels_BS)


SIGNALLED = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_loader import TokenWindows, microbatches, write_stream
windows = TokenWindows(write_stream(Path(sys.argv[1]), 1001), 8)
batches = microbatches(
    windows, seed=0, start_position=0, local_batch_size=1, data_rank=0, data_ranks=1, num_workers=2
)
next(batches)
caught = []
signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
os.killpg(0, signal.SIGTERM)
time.sleep(0.5)
for _ in range(20):
    next(batches)
assert caught
batches.close()
print("went on", flush=True)
batches = microbatches(
    windows, seed=0, start_position=0, local_batch_size=1, data_rank=0, data_ranks=1, num_workers=2
)
next(batches)
print(time.monotonic())
raise SystemExit(3)  # ends without closing the iterator
"""


def test_workers_outlive_a_signal_to_the_group(tmp_path):
    """torchrun ends a job so; the trainer must still get to its last checkpoint, and to its end."""
    script = SIGNALLED.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3 and result.stdout.startswith("went on\n"), result.stderr
    assert time.monotonic() - float(result.stdout.split()[-1]) < 30, "it waits for its workers"
