"""Token caches: content against plain Python, and what is left after kills, races and damage."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from titan_prores.config.errors import ConfigError
from titan_prores.data import TokenCache, TokenStream, prepare
from titan_prores.protocols.dataset import DatasetSection


class Words:
    """A tokenizer without a library: one token a byte, end of text = 256."""

    def __init__(self, n_vocab: int = 257) -> None:
        self.n_vocab, self.eot_id = n_vocab, n_vocab - 1

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")

    def fingerprint(self) -> str:
        return f"words {self.n_vocab}"


class Listed:
    """A data set of given texts; counts how often it is read, and may take its time."""

    def __init__(self, texts: list[str], name: str = "listed", pause_seconds: float = 0) -> None:
        self.texts, self.name, self.pause_seconds, self.reads = texts, name, pause_seconds, 0

    def documents(self):
        self.reads += 1
        for text in self.texts:
            time.sleep(self.pause_seconds)
            yield text

    def fingerprint(self) -> str:
        return self.name


TEXTS = [f"document {i} " + "x" * (i * 7 % 50) for i in range(300)]


def make(folder: Path, dataset=None, tokenizer=None, say=lambda line: None, **settings) -> TokenCache:
    settings = {"validation_fraction": 0.2, "shard_tokens": 1000, **settings}
    config = DatasetSection(cache_folder=str(folder), **settings)
    return prepare(
        dataset or Listed(TEXTS), tokenizer or Words(), config, source_name="listed", tokenizer_name="words", say=say
    )


def documents(stream: TokenStream) -> list[str]:
    ids = stream.read(0, len(stream))
    ends = np.flatnonzero(ids == stream.eot_id)
    assert not len(ids) or ends[-1] == len(ids) - 1
    return [bytes(part[part != stream.eot_id].astype(np.uint8)).decode() for part in np.split(ids, ends + 1)[:-1]]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_document_is_in_one_split_with_its_end_marked(tmp_path):
    said = []
    cache = make(tmp_path, say=said.append)
    held_out = [
        t for t in TEXTS if int.from_bytes(hashlib.blake2b(t.encode(), digest_size=6).digest(), "little") < 0.2 * 2**48
    ]
    assert 30 < len(held_out) < 90
    assert documents(cache.validation) == held_out
    assert documents(cache.train) == [t for t in TEXTS if t not in held_out]
    assert cache.n_documents == len(TEXTS) and cache.n_vocab == 257
    assert len(said) == 1 and "300 documents" in said[0]
    cache.verify()


def test_a_held_out_document_never_appears_in_train(tmp_path):
    """Not by being listed twice, and not when others join the data set."""
    cache = make(tmp_path, Listed(TEXTS + TEXTS, "twice"))
    train, held_out = set(documents(cache.train)), set(documents(cache.validation))
    assert held_out and not train & held_out
    more = make(tmp_path, Listed(["another", *TEXTS[::-1]], "more"))
    assert not set(documents(more.train)) & held_out


def test_is_built_once_and_anew_when_anything_changes(tmp_path):
    dataset = Listed(TEXTS)
    first = make(tmp_path, dataset)
    assert make(tmp_path, dataset).folder == first.folder and dataset.reads == 1
    changed = [
        make(tmp_path, Listed(TEXTS, "other")),
        make(tmp_path, tokenizer=Words(300)),
        make(tmp_path, validation_fraction=0.1),
        make(tmp_path, shard_tokens=999),
    ]
    assert len({first.folder, *(cache.folder for cache in changed)}) == 5
    assert changed[0].fingerprint == first.fingerprint  # the same content
    assert changed[3].fingerprint == first.fingerprint  # however it is cut into shards
    assert len({first.fingerprint, changed[1].fingerprint, changed[2].fingerprint}) == 3


def test_says_who_built_it(tmp_path):
    assert make(tmp_path).just_built
    assert not make(tmp_path).just_built


@pytest.mark.parametrize(("just_built", "reads"), [((False, True), 0), ((False, False), 1)])
def test_what_any_rank_has_just_built_is_not_read_again(tmp_path, monkeypatch, just_built, reads):
    """Seen from the rank that did not build it."""
    from titan_prores.build import prepare_data  # with torch, which the processes that import this file need not load

    read = []
    monkeypatch.setattr(TokenCache, "verify", lambda cache, part, parts: read.append((part, parts)))
    ranks = SimpleNamespace(
        is_main=False, rank=1, size=2, gather=lambda own: list(just_built) if isinstance(own, bool) else [own] * 2
    )
    config = DatasetSection(cache_folder=str(tmp_path))
    part = SimpleNamespace(config=config, name="listed")
    recipe = SimpleNamespace(
        slots={
            "dataset": part,
            "tokenizer": part,
            "validation": SimpleNamespace(config=SimpleNamespace(enabled=False)),
            "checkpoint": SimpleNamespace(config=SimpleNamespace(enabled=False)),
        },
        training=SimpleNamespace(seq_len=8),
    )
    components = SimpleNamespace(dataset=Listed(TEXTS), tokenizer=Words())
    prepare_data(recipe, components, ranks, {})
    assert read == [(1, 2)] * reads


def test_reads_across_shard_borders(tmp_path):
    cache = make(tmp_path)
    index = json.loads((cache.folder / "index.json").read_text())
    counts = [shard["tokens"] for shard in index["splits"]["train"]["shards"]]
    assert len(counts) > 5 and set(counts[:-1]) == {1000} and counts[-1] <= 1000
    files = [cache.folder / shard["file"] for shard in index["splits"]["train"]["shards"]]
    whole = np.concatenate([np.fromfile(file, dtype="<u2") for file in files])
    stream = cache.train
    assert len(stream) == len(whole)
    rng = np.random.default_rng(0)
    for _ in range(300):
        start = int(rng.integers(0, len(whole)))
        count = int(rng.integers(0, min(2500, len(whole) - start) + 1))
        got = stream.read(start, count)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, whole[start : start + count])
    for start in range(0, len(whole), 1000):
        np.testing.assert_array_equal(stream.read(max(start - 1, 0), 2), whole[max(start - 1, 0) :][:2])
    for start, count in ((-1, 2), (0, len(whole) + 1), (len(whole), 1)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    copy = pickle.dumps(stream)
    assert len(copy) < 10_000  # names of files, not their content
    np.testing.assert_array_equal(pickle.loads(copy).read(0, len(whole)), whole)


@pytest.mark.parametrize(("n_vocab", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_smallest_dtype_that_holds_the_vocabulary(tmp_path, n_vocab, dtype):
    cache = make(tmp_path, tokenizer=Words(n_vocab))
    assert json.loads((cache.folder / "index.json").read_text())["dtype"] == dtype
    assert cache.train.read(0, len(cache.train)).max() == n_vocab - 1
    assert (cache.folder / "train-00000.bin").stat().st_size == 1000 * np.dtype(dtype).itemsize


def test_refuses_ids_outside_the_vocabulary(tmp_path):
    tokenizer = Words()
    tokenizer.n_vocab = 100
    with pytest.raises(ValueError, match="outside its vocabulary"):
        make(tmp_path, tokenizer=tokenizer)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


class Streaming(Words):
    """Encodes part by part."""

    def encode_long(self, chunks):
        return map(self.encode, chunks)


@pytest.mark.parametrize("tokenizer", [Words(), Streaming()])
def test_a_document_in_pieces_is_the_document(tmp_path, tokenizer):
    whole = make(tmp_path / "whole", tokenizer=tokenizer)
    pieces = [[text[i : i + 7] for i in range(0, len(text), 7)] for text in TEXTS]
    assert tree(make(tmp_path / "pieces", Listed([*pieces, [], [""]]), tokenizer=tokenizer).folder) == tree(
        whole.folder
    )
    long = ["é" * 3_000_000, "b"]  # longer than what is encoded together
    found = make(tmp_path / "long", Listed(long), tokenizer=tokenizer, validation_fraction=0.0, shard_tokens=10**7)
    assert documents(found.train) == long and found.n_documents == 2


def test_a_long_document_takes_no_memory_for_all_its_tokens(tmp_path):
    text = "a" * 30_000_000
    tracemalloc.start()
    make(tmp_path, Listed([text]), tokenizer=Streaming(), shard_tokens=10**8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6 + 5e7, peak  # a copy of it, cut into chunks, and one chunk's tokens


def test_half_surrogates_are_replaced(tmp_path):
    cache = make(tmp_path, Listed(["a\ud800b", "c\ud83d\ude00"]), validation_fraction=0.0)
    assert documents(cache.train) == ["a\ufffdb", "c😀"]
    assert len(cache.validation) == 0


# --- Killed and concurrent builds -----------------------------------------------------------------------------------


def _build(folder: Path, pause_seconds: float, said) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    make(folder, Listed(TEXTS, pause_seconds=pause_seconds), say=said.put)


def start_build(folder: Path, pause_seconds: float):
    """A process that builds, and what it says."""
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    process = context.Process(target=_build, args=(folder, pause_seconds, said))
    process.start()
    return process, said


def wait_for_unfinished(folder: Path, files: int) -> Path:
    for _ in range(600):
        found = [p for p in folder.glob("*.unfinished") if len(list(p.iterdir())) >= files]
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError("the build did not start")


def test_killed_build_leaves_nothing_that_is_trusted(tmp_path):
    build, _ = start_build(tmp_path / "killed", 0.02)
    unfinished = wait_for_unfinished(tmp_path / "killed", files=4)
    build.kill()
    build.join()
    assert unfinished.exists() and not list((tmp_path / "killed").glob("*/index.json"))
    (unfinished / "train-00099.bin").write_bytes(b"stale")

    again = make(tmp_path / "killed")
    undisturbed = make(tmp_path / "undisturbed")
    assert tree(again.folder) == tree(undisturbed.folder)
    assert not unfinished.exists()


def test_two_processes_together_build_once(tmp_path):
    first, told = start_build(tmp_path, 0.01)
    wait_for_unfinished(tmp_path, files=1)
    dataset, said = Listed(TEXTS), []
    cache = make(tmp_path, dataset, say=said.append)  # comes while the other one builds
    assert dataset.reads == 0
    assert len(said) == 1 and "waiting" in said[0] and str(cache.folder) in said[0]
    assert "300 documents" in told.get()
    first.join(timeout=60)
    assert first.exitcode == 0
    assert sum(p.is_dir() for p in tmp_path.iterdir()) == 1


def _race(folder: Path, barrier, results) -> None:
    dataset = Listed(TEXTS)
    barrier.wait()
    results.put((make(folder, dataset).fingerprint, dataset.reads))


def test_a_race_has_one_winner(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(reads for _, reads in found) == 1
    assert len({fingerprint for fingerprint, _ in found}) == 1


def test_waiting_can_be_interrupted(tmp_path):
    builder, _ = start_build(tmp_path, 0.2)
    wait_for_unfinished(tmp_path, files=1)
    waiter, said = start_build(tmp_path, 0)
    assert "waiting" in said.get()
    for process in (waiter, builder):  # and so can building, which tidies up
        os.kill(process.pid, signal.SIGINT)
        process.join(timeout=60)
        assert process.exitcode not in (None, 0)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


# --- Errors -----------------------------------------------------------------------------------------------------------


def _truncate(folder: Path) -> str:
    os.truncate(folder / "train-00001.bin", 1999)
    return "train-00001.bin"


def _remove(folder: Path) -> str:
    (folder / "validation-00000.bin").unlink()
    return "validation-00000.bin"


def _grow(folder: Path) -> str:
    with (folder / "train-00000.bin").open("ab") as file:
        file.write(b"12")
    return "train-00000.bin"


def _no_index(folder: Path) -> str:
    (folder / "index.json").unlink()
    return "index.json"


def _broken_index(folder: Path) -> str:
    (folder / "index.json").write_text("{")
    return "index.json"


def _empty_index(folder: Path) -> str:
    (folder / "index.json").write_text("{}")
    return "index.json"


def _newer_index(folder: Path) -> str:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "format": 99}))
    return "index.json"


@pytest.mark.parametrize("damage", [_truncate, _remove, _grow, _no_index, _broken_index, _empty_index, _newer_index])
def test_damage_is_refused_by_name(tmp_path, damage):
    folder = make(tmp_path).folder
    name = damage(folder)
    with pytest.raises(ConfigError) as error:
        make(tmp_path)
    assert error.value.key == "cache_folder"
    assert name in str(error.value) and f"delete the folder {folder}" in str(error.value)


def edited(folder: Path, edit) -> None:
    """Change index.json as its author could."""
    index = json.loads((folder / "index.json").read_text())
    edit(index, index["splits"]["train"]["shards"][0])
    (folder / "index.json").write_text(json.dumps(index))


def _as_many(shard, tokens, n_bytes) -> None:
    shard["tokens"], shard["bytes"] = tokens, n_bytes


CRAFTED = {
    "above": lambda index, shard: shard.update(file="../secret.bin"),
    "absolute": lambda index, shard: shard.update(file="/etc/passwd"),
    "the folder above": lambda index, shard: shard.update(file=".."),
    "a folder below": lambda index, shard: shard.update(file="sub/x.bin"),
    "a line end after it": lambda index, shard: shard.update(file="train-00000.bin\n"),
    "no name": lambda index, shard: shard.update(file=""),
    "NUL": lambda index, shard: shard.update(file="x\0.bin"),
    "a list of names": lambda index, shard: shard.update(file=["train-00000.bin"]),
    "negative": lambda index, shard: _as_many(shard, -1000, -2000),
    "nothing": lambda index, shard: _as_many(shard, 0, 0),
    "huge": lambda index, shard: _as_many(shard, 2**62, 2**63),
    "beyond 64 bits": lambda index, shard: _as_many(shard, 10**30, 2 * 10**30),
    "infinite": lambda index, shard: _as_many(shard, float("inf"), float("inf")),
    "fractions": lambda index, shard: _as_many(shard, 1000.0, 2000.0),
    "truth": lambda index, shard: _as_many(shard, True, True),
    "objects": lambda index, shard: index.update(dtype="object"),
    "objects, in short": lambda index, shard: index.update(dtype="O"),
    "signed": lambda index, shard: index.update(dtype="int16"),
    "records": lambda index, shard: index.update(dtype=[["a", "<u2"]]),
    "end mark outside": lambda index, shard: index.update(eot_id=70000),
    "end mark negative": lambda index, shard: index.update(eot_id=-1),
    "larger vocabulary": lambda index, shard: index.update(n_vocab=100_000),
    "no vocabulary": lambda index, shard: index.update(n_vocab=0),
    "a key more": lambda index, shard: index.update(command="x"),
    "a split more": lambda index, shard: index["splits"].update(test={}),
    "documents negative": lambda index, shard: index["splits"]["train"].update(documents=-1),
    "shards as a table": lambda index, shard: index["splits"]["train"].update(shards={}),
}


@pytest.mark.parametrize("edit", CRAFTED.values(), ids=CRAFTED)
def test_crafted_index_is_refused_by_name(tmp_path, edit):
    """Before any shard is opened; what is outside of the folder stays unread."""
    folder = make(tmp_path).folder
    (tmp_path / "secret.bin").write_bytes((folder / "train-00000.bin").read_bytes())
    edited(folder, edit)
    with pytest.raises(ConfigError) as error:
        make(tmp_path)
    assert error.value.key == "cache_folder" and "\n" not in str(error.value) and len(str(error.value)) < 600
    assert f"{folder}/" in str(error.value) and f"delete the folder {folder}" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**6,
        b'{"format":' * 10**5,
        b"",
        b"\x80\x04cos\nsystem\n(S'x'\ntR.",
        b"\xff\xfe{}",
        b"[]",
        b'{"format": ' + b"9" * 10**5 + b"}",
        b'{"format": NaN}',
        b" " * (1 << 26) + b" ",
    ],
    ids=["deep list", "deep table", "empty", "pickle", "no UTF-8", "list", "long number", "NaN", "large"],
)
def test_index_that_is_none_is_refused_by_name(tmp_path, content):
    folder = make(tmp_path).folder
    (folder / "index.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.json (is not an|has .* bytes, more than an) index of token shards"):
        make(tmp_path)


@pytest.mark.parametrize("name", ["train-00000.bin", "index.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, name, kind):
    """A link to the very same content, too; opening a pipe would wait for ever."""
    path = make(tmp_path).folder / name
    path.rename(tmp_path / "elsewhere")
    {"link": lambda: path.symlink_to(tmp_path / "elsewhere"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file; delete the folder"):
        make(tmp_path)


def test_verify_finds_tokens_outside_the_vocabulary_whose_hash_fits(tmp_path):
    cache = make(tmp_path)
    path = cache.folder / "train-00001.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 257
    tokens.tofile(path)
    index = json.loads((cache.folder / "index.json").read_text())
    index["splits"]["train"]["shards"][1]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (cache.folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"train-00001\.bin holds token 257 of a vocabulary of 257"):
        make(tmp_path).verify()
    tokens[3] = 256
    tokens.tofile(path)
    index["splits"]["train"]["shards"][1]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (cache.folder / "index.json").write_text(json.dumps(index))
    make(tmp_path).verify()


def test_verify_finds_a_flipped_byte(tmp_path):
    cache = make(tmp_path)
    path = cache.folder / "train-00002.bin"
    content = bytearray(path.read_bytes())
    content[777] ^= 1
    path.write_bytes(content)
    cache = make(tmp_path)  # the size is right
    with pytest.raises(ConfigError, match=r"train-00002\.bin does not hold what was written"):
        cache.verify()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_folder = .* cannot be written"):
        make(tmp_path / "file" / "cache")


def test_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device") as error:
        make(tmp_path)
    assert error.value.key == "cache_folder"
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_a_failing_dataset_is_not_blamed_on_the_cache(tmp_path):
    class Failing(Listed):
        def documents(self):
            yield "a"
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        make(tmp_path, Failing([]))


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_documents(tmp_path, texts):
    with pytest.raises(ConfigError, match="no documents"):
        make(tmp_path, Listed(texts))


@pytest.mark.parametrize("answer", [None, ["a"], KeyError("unk")])
def test_a_tokenizer_that_fails_is_told_with_its_document(tmp_path, answer):
    tokenizer = Words()
    encode = tokenizer.encode

    def failing(text):
        if text != "three":
            return encode(text)
        if isinstance(answer, Exception):
            raise answer
        return answer

    tokenizer.encode = failing
    with pytest.raises(ConfigError, match="tokenizer fails on document 3"):
        make(tmp_path, Listed(["one", "two", "three"]), tokenizer=tokenizer)
