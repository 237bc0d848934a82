"""From a token stream to the microbatches of one data-parallel rank.

Shape suffixes: B = sequences of a microbatch, S = tokens of a sequence.
"""

from __future__ import annotations

import multiprocessing.queues
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import torch
from torch.utils.data import Dataset

from titan_prores.config.errors import ConfigError
from titan_prores.data.order import sample_windows
from titan_prores.data.shards import TokenStream
from titan_prores.protocols.batch import IGNORED_LABEL, Batch

_PLANNED_MICROBATCHES = 64  # positions are permuted for this many at once: numpy's cost is per call, not per position
POLL_SECONDS = 1.0
_OF_WORKER = re.compile(r"in DataLoader worker process (\d+)\.")


class DataError(Exception):
    """A data worker failed or ended; no batches come from it any more."""


class TokenWindows(Dataset):
    """A token stream cut into windows: window w holds tokens[w * S : w * S + S] and, as labels, those one further on.

    Neighbours share one token, as the last label and the first input, so every token of the stream but the first is a
    label exactly once. What is left at the end and fills no window is dropped, or kept with `keep_partial`.

    Args:
        stream: the tokens of one split.
        seq_len: S.
        keep_partial: keep the last, short window too, padded with the end-of-text token and with labels of -100 that
            no loss counts. For validation, whose perplexity is then exact to the token.

    Raises:
        ConfigError: the stream is too short for a single window. Its key is the full `training.seq_len`.
    """

    def __init__(self, stream: TokenStream, seq_len: int, *, keep_partial: bool = False) -> None:
        self.stream = stream
        self.seq_len = seq_len
        labels = max(len(stream) - 1, 0)
        self._n_windows = -(-labels // seq_len) if keep_partial else labels // seq_len
        if self._n_windows == 0:
            raise ConfigError(
                "training.seq_len",
                f"the {stream.name} split has {len(stream):,} tokens, too few for one window of seq_len + 1 tokens",
                value=seq_len,
                allowed="a shorter seq_len, more documents, or another dataset.validation_fraction",
            )

    def __len__(self) -> int:
        return self._n_windows

    def spread(self, count: int) -> list[int]:
        """Numbers of `count` windows at equal distances over the whole stream, or of all where there are no more."""
        count = min(count, len(self))
        return [number * len(self) // count for number in range(count)]

    def __getitem__(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, labels), each of shape [S], int64."""
        if not 0 <= window < self._n_windows:
            raise IndexError(f"window {window} of {self._n_windows}")
        start = window * self.seq_len
        length = min(self.seq_len, len(self.stream) - 1 - start)
        read = torch.from_numpy(self.stream.read(start, length + 1))
        if length == self.seq_len:
            return read[:-1], read[1:]
        tokens = torch.full((self.seq_len,), self.stream.eot_id, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORED_LABEL, dtype=torch.int64)
        tokens[:length] = read[:-1]
        labels[:length] = read[1:]
        return tokens, labels


def microbatches(
    windows: TokenWindows,
    *,
    seed: int,
    start_position: int,
    local_batch_size: int,
    data_rank: int,
    data_ranks: int,
    num_workers: int,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> Iterator[Batch]:
    """Endless microbatches of one data-parallel rank, on the CPU, pinned where there is CUDA.

    Microbatch k of rank r holds the samples at global positions
    start_position + (k * data_ranks + r) * local_batch_size + [0 .. local_batch_size). A global batch is therefore the
    same samples on any number of ranks and workers, and the global position is all that a resumed run needs to know.

    Args:
        windows: the training windows.
        seed: of the data order.
        start_position: global position of the first sample, over all epochs.
        local_batch_size: B.
        data_rank, data_ranks: this rank among those that get different samples.
        num_workers: processes that read ahead; 0 reads in this one. They end when the iterator is closed or dropped.
        waiting: called about every POLL_SECONDS while workers give no batch, with the seconds since that began; what it
            raises ends the iterator.

    Raises:
        ValueError: an argument is out of range.
        DataError: from the iterator, where a worker failed or ended.
    """
    if not 0 <= data_rank < data_ranks:
        raise ValueError(f"data_rank must be in [0, {data_ranks}), not {data_rank}")
    if start_position < 0 or local_batch_size < 1 or num_workers < 0:
        raise ValueError("start_position and num_workers must not be negative, local_batch_size must be positive")
    plan = _BatchPlan(len(windows), seed, start_position, local_batch_size, data_rank, data_ranks)
    return _load(windows, plan, num_workers, waiting)


class _BatchPlan:
    """Batch sampler: yields the window ids of microbatch after microbatch, without end."""

    def __init__(
        self, n_windows: int, seed: int, start_position: int, local_batch_size: int, data_rank: int, data_ranks: int
    ) -> None:
        self.n_windows = n_windows
        self.seed = seed
        self.local_batch_size = local_batch_size
        self.first = start_position + data_rank * local_batch_size
        self.stride = data_ranks * local_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        first = self.first
        offsets = np.arange(_PLANNED_MICROBATCHES)[:, None] * self.stride + np.arange(self.local_batch_size)
        while True:
            yield from sample_windows(self.seed, first + offsets, self.n_windows).tolist()
            first += _PLANNED_MICROBATCHES * self.stride

    def samples(self, number: int) -> torch.Tensor:
        """Global positions of the samples of microbatch `number`, from 0: int64 [B]."""
        first = self.first + number * self.stride
        return torch.arange(first, first + self.local_batch_size)


def _load(
    windows: TokenWindows, plan: _BatchPlan, num_workers: int, waiting: Callable[[float], None]
) -> Iterator[Batch]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it, newer torch complains
        # A pool of workers and no more: its state fits only the same number of workers, and the position says it all.
        loader = StatefulDataLoader(
            windows,
            batch_sampler=plan,
            num_workers=num_workers,
            collate_fn=_as_arrays,
            # A worker ends with its parent, which under forkserver is another process than this.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            persistent_workers=num_workers > 0,
            worker_init_fn=_start_worker,
            generator=torch.Generator().manual_seed(0),  # else it would draw from the global one, which is dropout's
            snapshot_every_n_steps=sys.maxsize,
        )
    batches = iter(loader)
    workers = batches._workers if num_workers else []
    if num_workers:
        batches._timeout = POLL_SECONDS  # not from the start: a busy machine may take longer to start the workers
    pin = torch.cuda.is_available()
    try:
        for number in count():
            tokens_BS, labels_BS = map(torch.from_numpy, _next(batches, waiting))
            batch = Batch(tokens_BS, labels_BS, plan.samples(number))
            yield batch.map(torch.Tensor.pin_memory) if pin else batch
    finally:
        # The pool ends with its last reference; the loader holds one to persistent workers.
        del batches
        loader._iterator = None
        for worker in workers:  # one that hangs would be waited for at the end of this process
            if worker.is_alive():
                worker.kill()
                worker.join()


def _as_arrays(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> list[np.ndarray]:
    """A microbatch as workers hand it over: arrays go through a pipe, where tensors take shared memory and sockets,
    for which a container may lack room and a long TMPDIR the name."""
    return [np.stack([each.numpy() for each in column]) for column in zip(*samples, strict=True)]


def _next(batches: Iterator[list[np.ndarray]], waiting: Callable[[float], None]) -> list[np.ndarray]:
    """The next microbatch, with `waiting` called about every POLL_SECONDS until it is there."""
    started = time.monotonic()
    while True:
        try:
            return next(batches)
        except Exception as error:
            text = str(error)
            if text.startswith("DataLoader timed out"):
                waiting(time.monotonic() - started)
            elif found := _OF_WORKER.search(text):  # what follows is the worker's traceback
                raise DataError(f"data worker {found[1]}: {text.strip().splitlines()[-1]}") from error
            elif text.startswith("DataLoader worker"):
                raise DataError(text) from error
            else:
                raise


def _start_worker(worker: int) -> None:
    # torchrun and a terminal signal the whole group. The trainer answers to that with a last checkpoint, and an
    # abruptly ended worker would keep it from getting there. Workers notice by themselves when their parent is gone.
    os.setpgid(0, 0)

    def give_up(error: Exception, batch: object) -> None:
        """As things are, Python drops what a queue cannot hand over, and the trainer would wait for it for ever."""
        os.write(2, f"data worker {worker} cannot hand over a batch: {type(error).__name__}: {error}\n".encode())
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(give_up)
