"""Datasets: every format gives the same documents, and faults name file, line and the nearest right name."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import os
import random
import sysconfig
import time
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from titan_prores.config.errors import ConfigError
from titan_prores.config.registry import lookup, names
from titan_prores.data import TokenWindows, prepare

TEXTS = ["one", "two\nlines", "naïve 漢字 🙂", "\tlast — with \u2028 inside", "x" * 5000] + [
    f"more {i}" for i in range(2500)
]


def make(name: str, **settings):
    component = lookup("dataset", name)
    return component(component.Config(**settings))


def read(*files: str | Path, **settings) -> list[str]:
    """The documents of files, those in pieces put together."""
    documents = make("text", files=tuple(map(str, files)), **settings).documents()
    return [document if isinstance(document, str) else "".join(document) for document in documents]


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Warnings that were logged."""
    lines = []
    monkeypatch.setattr("titan_prores.output.log.logger.warning", lambda line, *values: lines.append(line % values))
    return lines


def json_lines(texts=TEXTS, field="text") -> bytes:
    return "".join(
        json.dumps({"url": "u", field: t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)
    ).encode()


def write_parquet(path: Path, texts=TEXTS) -> None:
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=700)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(json_lines()),
    "a.json": lambda path: path.write_bytes(json_lines().replace(b"\n", b"\r\n")),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json_lines())),
    # Written in two parts, as appending and parallel compressors do.
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(json_lines()[:999]) + gzip.compress(json_lines()[999:])),
    "a.jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(json_lines()[:999]) + zstandard.compress(json_lines()[999:])
    ),
    "A.JSONL.ZST": lambda path: path.write_bytes(zstandard.compress(json_lines())),
    "a.ndjson": lambda path: path.write_bytes(json_lines()),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(json_lines()[:999]) + bz2.compress(json_lines()[999:])),
    "a.ndjson.xz": lambda path: path.write_bytes(lzma.compress(json_lines()[:999]) + lzma.compress(json_lines()[999:])),
    "array.json": lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS])),
    "lines.json": lambda path: path.write_text(" \n" + json.dumps([{"text": text} for text in TEXTS], indent=1) + "\n"),
    "a.json.xz": lambda path: path.write_bytes(lzma.compress(json.dumps([{"text": text} for text in TEXTS]).encode())),
    "a.parquet": write_parquet,
}

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def test_all_are_registered():
    assert {"python_stdlib", "text", "huggingface"} <= set(names("dataset"))


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_yields_the_same_documents(tmp_path, name):
    WRITERS[name](tmp_path / name)
    dataset = make("text", files=(str(tmp_path / name),))
    assert list(dataset.documents()) == TEXTS
    assert list(dataset.documents()) == TEXTS  # each time


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_txt(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    content = b"a b\nc\r\n\n \n\nd\n\n"
    Path("x.txt" + suffix).write_bytes(COMPRESS[suffix](content) if suffix else content)
    expected = {"file": ["a b\nc\n\n \n\nd\n\n"], "line": ["a b", "c", "d"], "paragraph": ["a b\nc", "d"]}
    for txt_document, documents in expected.items():
        dataset = make("text", files=("*.txt*",), txt_document=txt_document)
        assert list(dataset.documents()) == documents


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path, suffix, share):
    """Not taken for a shorter one."""
    whole = COMPRESS[suffix](json_lines([os.urandom(5000).hex() for _ in range(50)]))
    path = tmp_path / ("a.jsonl" + suffix)
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(make("text", files=(str(path),)).documents())


def test_zstd_frames_of_every_kind_and_cut_anywhere(tmp_path):
    """Against zstandard itself: with and without checksum and size, blocks raw, repeated and compressed."""
    draw = random.Random(0)
    path = tmp_path / "a.txt.zst"
    texts = [b"", b"a", b"ab\n" * 99_999, bytes(draw.randrange(32, 127) for _ in range(300_000)), b"x" * 400_000]
    skipped = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    for text in texts:
        for checksum, size in ((True, True), (False, False)):
            frame = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=size).compress(text)
            path.write_bytes(skipped + frame + skipped + frame)
            assert read(path) == [text.decode() * 2]
            for cut in {draw.randrange(1, len(frame)) for _ in range(20)}:
                path.write_bytes(frame + frame[:cut])
                with pytest.raises(ConfigError, match="cannot be read"):
                    read(path)


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_memory_does_not_grow_with_a_file(tmp_path, suffix):
    """Ten million characters in lines of two: a list of them would take 300 MB."""
    path = tmp_path / f"a.txt{suffix}"
    content = b"a\n" * 5_000_000
    path.write_bytes(COMPRESS[suffix](content) if suffix else content)
    n_bytes, digest = len(content), hashlib.sha256(content).digest()
    del content
    tracemalloc.start()
    (document,) = make("text", files=(str(path),)).documents()
    found, size = hashlib.sha256(), 0
    for piece in document:
        found.update(piece.encode())
        size += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (size, found.digest()) == (n_bytes, digest)
    assert peak < 2e7, peak  # of which xz takes 8 MB for its window


def test_zstd_that_is_mostly_repetition_is_read_in_linear_time(tmp_path):
    """64 KiB of it can hold 2 GiB; at 32 MB gzip takes a tenth of a second, and square time half a minute."""
    content, seconds = b"the same\n" * 4_000_000, {}
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(COMPRESS[suffix](content))
        started = time.process_time()
        (document,) = make("text", files=(str(path),)).documents()
        assert sum(map(len, [document] if isinstance(document, str) else document)) == len(content)
        seconds[suffix] = time.process_time() - started
    assert seconds[".zst"] < 5 * seconds[".gz"] + 1, seconds


def test_short_lines_of_a_long_paragraph_take_no_memory_of_their_own(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\n" * 300_000)
    tracemalloc.start()
    (document,) = read(tmp_path / "a.txt", txt_document="paragraph")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert document == "a\n" * 299_999 + "a" and peak < 9e6


def test_an_array_is_streamed(tmp_path):
    (tmp_path / "a.json").write_text("[" + ",".join(['{"text": "' + "x" * 1000 + '"}'] * 20_000) + "]")
    tracemalloc.start()
    assert sum(len(text) for text in make("text", files=(str(tmp_path / "a.json"),)).documents()) == 20_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e7, peak


def test_arrays_against_the_json_module():
    """Random arrays, cut anywhere: the same elements, and a fault where there is one."""
    from titan_prores.components.dataset._records import array_items

    draw = random.Random(0)

    def value(depth: int):
        kind = draw.randrange(8 if depth else 6)
        if kind < 6:
            return [
                draw.randrange(-(10**9), 10**9),
                draw.random() * 1e-9,
                None,
                True,
                "",
                'é"\\\n🙂]},' * draw.randrange(4),
            ][kind]
        if kind == 6:
            return [value(depth - 1) for _ in range(draw.randrange(4))]
        return {f"k{i}\t": value(depth - 1) for i in range(draw.randrange(4))}

    def items(text: str, size: int) -> list:
        pieces = iter([text[i : i + size] for i in range(0, len(text), size)])
        return [item for _, item in array_items(pieces, "x")]

    for _ in range(300):
        expected = [value(3) for _ in range(draw.randrange(6))]
        text = json.dumps(expected, indent=draw.choice([None, 0, 2]), ensure_ascii=draw.random() < 0.5)
        text = draw.choice(["", " \n"]) + text + draw.choice(["", "\r\n "])
        for size in (1, 2, 7, 1000):
            assert items(text, size) == expected
        closing = text.rindex("]")
        broken = draw.choice([text[:closing], text[:closing] + ",]", text + "]", text + " 1"])
        for size in (1, 5, 1000):
            with pytest.raises(ConfigError, match=r"x:\d+: files: not valid JSON"):
                items(broken, size)


def test_an_array_names_the_line_of_what_is_wrong(tmp_path):
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n{"text": \nnull}, 1]')
    with pytest.raises(ConfigError, match=r"a\.json:4: field = 'text': must hold text, not null"):
        read(tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"a\.json:4: files: each record must be a JSON object, not a number"):
        list(make("text", files=(str(tmp_path / "a.json"),), max_skipped_records=1).documents())
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n{"text": }]')
    with pytest.raises(ConfigError, match=r"a\.json:3: files: not valid JSON: Expecting value"):
        read(tmp_path / "a.json", max_skipped_records=9)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["two"]))
    assert list(make("text", files=(str(tmp_path / "*"),)).documents()) == ["one", "two"]


def test_globs_are_sorted_recursive_and_counted_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "deep/er/a.txt", "deep/c.txt", "odd[1].txt", "skipped.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert list(make("text", files=("**/*.txt", "b.txt")).documents()) == [
        "b.txt",
        "deep/c.txt",
        "deep/er/a.txt",
        "odd[1].txt",
    ]
    assert list(make("text", files=("odd[1].txt",)).documents()) == ["odd[1].txt"]
    assert list(make("text", files=("deep/*.txt",)).documents()) == ["deep/c.txt"]


def test_patterns_match_what_glob_does(tmp_path, monkeypatch):
    """In random trees without links, hidden names among them."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    for _ in range(60):
        folder = Path(*(draw.choice(["a", "b", ".h", "c[1]", "d d"]) for _ in range(draw.randrange(5))))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / draw.choice(["x.txt", "y.txt", ".z.txt", "[x].txt"])).write_text("x")
    patterns = [
        "**/*.txt",
        "./**/*.txt",
        "a/**/*.txt",
        "*/**/x.txt",
        "**/a/**/*.txt",
        "**/**/y.txt",
        "**/b/*.txt",
        "a/**",
    ]
    for pattern in [*patterns, f"{tmp_path}/**/*.txt", f"{tmp_path}/a/*", "[ab]/**/*.txt", "**/[[]x].txt"]:
        expected = sorted({path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)})
        assert expected and make("text", files=(pattern,)).files == expected


def test_links_that_lead_in_circles(tmp_path, monkeypatch, said):
    """glob would follow one of them 40 times, and two of them for ever."""
    monkeypatch.chdir(tmp_path)
    Path("d/z").mkdir(parents=True)
    Path("d/z/a.txt").write_text("a")
    for link, target in (("d/b", "."), ("d/c", "../d"), ("d/z/up", ".."), ("d/a", "z")):
        Path(link).symlink_to(target)
    assert make("text", files=("d/**/*.txt",)).files == ["d/z/a.txt"]
    with pytest.raises(ConfigError, match="matches no file"):
        make("text", files=("d/**/*.jsonl",))
    assert read("d/**/*.txt", "d/**") == ["a"]
    assert said == ["dataset.files: skipped links to a folder that is read already: 4, such as d/a"]


def test_each_file_is_read_once(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    Path("d/sub").mkdir(parents=True)
    Path("d/a.txt").write_text("a")
    os.link("d/a.txt", "d/b.txt")
    Path("d/c.txt").symlink_to("a.txt")
    Path("far").mkdir()
    Path("far/e.txt").write_text("e")
    Path("d/far").symlink_to("../far")
    assert read("d/*.txt", "./d/a.txt", str(tmp_path / "d/a.txt"), "d/**/*.txt", "d/*") == ["a", "e"]
    assert said == [
        "dataset.files: skipped other names of a file that is read already: 4, such as ./d/a.txt for d/a.txt",
        "dataset.files: skipped folders, which only ** enters: 2, such as d/far",
    ]
    assert make("text", files=("d/**/*.txt",)).files == ["d/a.txt", "d/far/e.txt"]  # under the link's name, as ever


def test_a_link_to_nothing_is_refused_by_name(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("d/a.txt").write_text("a")
    Path("d/b.txt").symlink_to("gone.txt")
    for pattern in ("d/*.txt", "d/**/*.txt", "d/b.txt"):
        with pytest.raises(ConfigError, match=r"d/b\.txt is a link to gone\.txt, which does not lead to a file"):
            make("text", files=(pattern,))
    Path("d/b.txt").unlink()
    Path("d/c.txt").symlink_to("c.txt")
    with pytest.raises(ConfigError, match=r"d/c\.txt is a link to c\.txt"):
        make("text", files=("d/*.txt",))
    Path("d/c.txt").unlink()
    Path("d/unmounted").symlink_to("/gone")
    assert read("d/**/*.txt") == ["a"]
    assert said == ["dataset.files: skipped links to nothing: 1, such as d/unmounted"]


def test_what_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("d/sub").mkdir(parents=True)
    Path("d/a.txt").write_text("a")
    os.mkfifo("d/pipe.txt")
    with pytest.raises(ConfigError, match=r"d/pipe\.txt is not a regular file"):
        make("text", files=("d/**/*.txt",))
    Path("d/pipe.txt").unlink()
    with pytest.raises(ConfigError, match=r"matches only folders; did you mean d/sub/\*\*/\*"):
        make("text", files=("d/s*",))
    with monkeypatch.context() as patch:  # root may read all there is
        patch.setattr(os, "access", lambda path, mode: path != "d/a.txt")
        with pytest.raises(ConfigError, match=r"d/a\.txt cannot be read: permission denied"):
            make("text", files=("d/*.txt",))
    scandir = os.scandir

    def forbidden(folder):
        if folder == "d/sub":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(ConfigError, match=r"the folder d/sub cannot be read: Permission denied"):
        make("text", files=("d/**/*.txt",))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json.gz", "a.parquet"])
def test_a_git_lfs_pointer_is_refused_by_name(tmp_path, name):
    """Before anything is read, and not trained on as a text of three lines."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ConfigError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        make("text", files=(str(tmp_path / name),))
    (tmp_path / "b.txt").write_text(pointer)
    with pytest.raises(ConfigError, match="one of 2 Git LFS pointers"):
        make("text", files=(str(tmp_path / "*"),))


def test_line_formats_are_streamed(tmp_path):
    """The first document comes although the end of the file is broken."""
    broken = {"a.jsonl": json_lines() + b"{", "a.jsonl.gz": gzip.compress(json_lines())[:-40]}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        documents = make("text", files=(str(tmp_path / name),)).documents()
        assert next(documents) == TEXTS[0]
        with pytest.raises(ConfigError, match=name):
            list(documents)


def test_text_fingerprint_follows_files_and_settings(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines())
    files = (str(path),)
    seen = {make("text", files=files).fingerprint(), make("text", files=files).fingerprint()}
    assert len(seen) == 1
    seen.add(make("text", files=files, field="url").fingerprint())
    seen.add(make("text", files=files, txt_document="line").fingerprint())
    os.utime(path, ns=(1, 1))
    seen.add(make("text", files=files).fingerprint())
    (tmp_path / "b.jsonl").write_bytes(json_lines())
    seen.add(make("text", files=(str(tmp_path / "*.jsonl"),)).fingerprint())
    assert len(seen) == 5


def test_text_fingerprint_is_that_of_caches_that_exist(tmp_path):
    """As it was before records could be skipped; where they may be, the cache is another one."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines())
    stat = path.stat()
    parts = ["text", "file", [[str(path), stat.st_size, stat.st_mtime_ns]]]
    expected = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    assert make("text", files=(str(path),)).fingerprint() == expected
    assert make("text", files=(str(path),), max_skipped_records=1).fingerprint() != expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("data/trian.jsonl", r"matches no file; did you mean data/train\.jsonl"),
        ("dota/*.jsonl", r"matches no file; did you mean data/\*\.jsonl"),
        ("data/*.parquet", "matches no file$"),
        ("data", r"is a folder; did you mean data/\*\*/\*"),
        ("data/notes.md", r"no known format \(allowed: \.txt, .*\.ndjson, .* \.zst, .*\.parquet"),
    ],
)
def test_files_that_do_not_fit(tmp_path, monkeypatch, files, message):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train.jsonl").write_bytes(json_lines())
    Path("data/notes.md").write_text("x")
    with pytest.raises(ConfigError, match=message) as error:
        make("text", files=(files,))
    assert error.value.key == "files"


@pytest.mark.parametrize(
    ("name", "content", "key", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "files", r"a\.jsonl:2: .*not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "files", r"a\.jsonl:3: .*JSON object, not a list"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 10**6, "files", r"a\.jsonl:2: .*not valid JSON"),
        ("a.json", b'[\n{"text": "a"}\n', "files", r"a\.json:3: .*not valid JSON: expecting ',' or ']'"),
        ("a.json", b'{\n"text": "a"\n}\n', "files", r"a\.json:1: .*a record must be on one line, or in an array"),
        ("a.jsonl", b'{"txet": "a", "url": "u"}\n', "field", r"a\.jsonl:1: .*allowed: txet, url\); did you mean txet"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "field", r"a\.jsonl:2: .*must hold text, not null"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "files", r"a\.jsonl:2: .*not valid UTF-8: byte 0xff"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xc3"}]\n', "files", r"a\.json:2: .*not valid UTF-8: byte 0xc3"),
        ("a.txt", b"line\n" * 300_000 + b"\xed\xa0\x80", "files", r"a\.txt:300001: .*not valid UTF-8: byte 0xed"),
        ("a.txt", "ab".encode("utf-16"), "files", r"a\.txt: .*this is UTF-16"),
        ("a.txt", "a few words".encode("utf-16-be"), "files", r"a\.txt: .*this is UTF-16"),
        ("a.jsonl.gz", gzip.compress(json_lines(["a"]).decode().encode("utf-16-le")), "files", "this is UTF-16"),
        ("a.jsonl", gzip.compress(b"a"), "files", r"a\.jsonl: .*holds gz data; rename it to end in \.gz"),
        ("a.txt", zstandard.compress(b"a"), "files", r"a\.txt: .*holds zst data"),
        ("a.txt.gz", bz2.compress(b"a"), "files", r"a\.txt\.gz: .*holds bz2 data"),
        ("a.json", lzma.compress(b"a"), "files", r"a\.json: .*holds xz data"),
        ("a.jsonl.gz", b"not compressed", "files", r"a\.jsonl\.gz, after line 0: .*[Nn]ot a gzip"),
        ("a.jsonl.gz", gzip.compress(json_lines())[:-4000], "files", r"a\.jsonl\.gz, after line [1-9]"),
        ("a.jsonl.zst", b"not compressed", "files", r"a\.jsonl\.zst, after line 0: "),
        ("a.parquet", b"not parquet", "files", r"a\.parquet: .*cannot be read as Parquet"),
    ],
    ids=lambda value: "content" if isinstance(value, bytes) else None,  # gzip puts the time into its own
)
def test_contents_that_do_not_fit(tmp_path, name, content, key, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        list(make("text", files=(str(tmp_path / name),)).documents())
    assert error.value.key == key and "\n" not in str(error.value)


def test_invalid_utf8_in_parquet_names_its_row(tmp_path):
    raw = pyarrow.array([b"one", b"two", b"b\xe9d", b"four"], pyarrow.binary())
    invalid = pyarrow.StringArray.from_buffers(4, *raw.buffers()[1:])
    path = tmp_path / "a.parquet"
    for texts in (
        invalid,
        invalid.dictionary_encode(),
        invalid.cast(pyarrow.large_binary()).view(pyarrow.large_string()),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=2)
        with pytest.raises(ConfigError, match=r"a\.parquet, row 3: files: not valid UTF-8: byte 0xe9") as error:
            read(path)
        assert "\n" not in str(error.value)
        assert read(path, max_skipped_records=1) == ["one", "two", "four"]


def test_parquet_that_was_cut_off(tmp_path):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), buffer, row_group_size=700)
    whole = buffer.getvalue()
    for share in (0.0, 0.1, 0.5, 0.99):
        (tmp_path / "a.parquet").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ConfigError, match=r"a\.parquet: .*cannot be read as Parquet"):
            read(tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_bytes(whole)
    with pytest.raises(ConfigError, match="holds parquet data"):
        read(tmp_path / "b.txt")


def test_fields_of_nested_records(tmp_path):
    records = [{"meta": {"text": text, "n": 1}} for text in ("one", "two")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "b.json").write_text(json.dumps(records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.json", "c.parquet"):
        assert read(tmp_path / name, field="meta.text") == ["one", "two"]
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*allowed: meta\.text, meta\.n\); did you mean meta\.text"):
        read(tmp_path / "a.jsonl", field="meta.txet")
    with pytest.raises(ConfigError, match=r"c\.parquet: field = 'meta\.txet': is not there"):
        read(tmp_path / "c.parquet", field="meta.txet")
    with pytest.raises(ConfigError, match=r"meta\.text is a string"):
        read(tmp_path / "a.jsonl", field="meta.text.more")
    # A key of that very name comes first.
    literal = {"meta.text": "literal", "meta": {"text": "nested"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(literal))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([literal]), tmp_path / "c.parquet")
    assert (
        read(tmp_path / "a.jsonl", field="meta.text") == read(tmp_path / "c.parquet", field="meta.text") == ["literal"]
    )


def test_records_that_cannot_be_used_are_skipped_up_to_a_limit(tmp_path, said):
    unusable = [b'{"text": null}', b'{"other": 1}', b"{", b'["list"]', b'{"text": "\xff"}', b'{"text": 3}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b'{"text": "a"}', *unusable, b'{"text": "b"}']))
    write_parquet(tmp_path / "b.parquet", ["c", None, "d"])
    files = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    assert read(*files, max_skipped_records=7) == ["a", "b", "c", "d"]
    (line,) = said
    assert line.startswith("skipped 7 of 11 records") and "a.jsonl:2: field = 'text': must hold text, not null" in line
    for limit in (1, 6):
        with pytest.raises(
            ConfigError, match=f"max_skipped_records = {limit}: another record cannot be used: .*"
        ) as error:
            read(*files, max_skipped_records=limit)
        assert ("b.parquet, row 2" if limit == 6 else "a.jsonl:3") in str(error.value)
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: .*not null \(record 2; dataset\.max_skipped_records can"):
        read(*files)
    assert len(said) == 1


def test_parquet_columns_that_do_not_fit(tmp_path):
    files = (str(tmp_path / "a.parquet"),)
    write_parquet(tmp_path / "a.parquet", ["a", None])
    with pytest.raises(ConfigError, match=r"allowed: id, text\); did you mean text"):
        list(make("text", files=files, field="texts").documents())
    with pytest.raises(ConfigError, match=r"row 2: .*not null"):
        list(make("text", files=files).documents())
    with pytest.raises(ConfigError, match=r"row 1: .*not a number"):
        list(make("text", files=files, field="id").documents())


@pytest.mark.parametrize(
    ("package", "extra", "name"), [("pyarrow", "parquet", "a.parquet"), ("zstandard", "zstd", "a.jsonl.zst")]
)
def test_missing_packages_are_named(tmp_path, monkeypatch, package, extra, name):
    WRITERS[name](tmp_path / name)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == package else find_spec(n, *rest))
    with pytest.raises(ConfigError, match=rf"pip install 'titan-prores\[{extra}\]'"):
        make("text", files=(str(tmp_path / name),))


LITERAL = [
    "$(touch x).txt",
    "`touch x`.txt",
    "~.txt",
    "$HOME.txt",
    "${PWD}.txt",
    "a;touch x.txt",
    "a|b.txt",
    "{a,b}.txt",
]


@pytest.mark.parametrize("name", LITERAL)
def test_names_of_files_are_no_shell_words(tmp_path, monkeypatch, name):
    """They stand for themselves: nothing is run, no home is filled in, and a file of that very name is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "x.txt").write_text("at home")
    for pattern in (name, f"~/{name}", "~/x.txt", "$HOME/x.txt", f"*/{name}"):
        with pytest.raises(ConfigError, match="matches no file") as error:
            make("text", files=(pattern,))
        assert error.value.value == pattern
    Path(name).write_text("found")
    assert list(make("text", files=(name,)).documents()) == ["found"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["home", name])


# --- python_stdlib --------------------------------------------------------------------------------------------------


def test_python_stdlib():
    dataset = make("python_stdlib")
    assert type(dataset).Config().validation_fraction == 0.02
    documents = list(dataset.documents())
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "json" / "decoder.py").read_bytes().decode() in documents
    assert len(documents) > 400
    places = [path.relative_to(stdlib) for path in dataset.files]
    assert [p.as_posix() for p in places] == sorted(p.as_posix() for p in places)
    assert not {"site-packages", "dist-packages", "test", "tests"} & {part for p in places for part in p.parts[:-1]}
    assert dataset.fingerprint() == make("python_stdlib").fingerprint()


# --- huggingface ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local folder in place of the hub, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.parquet"])
def test_huggingface_from_a_local_folder(hub, name):
    WRITERS["a." + name.split(".", 1)[1]](hub / name)
    assert list(make("huggingface", path=str(hub)).documents()) == TEXTS
    assert list(make("huggingface", path=str(hub), max_documents=3).documents()) == TEXTS[:3]
    before = make("huggingface", path=str(hub)).fingerprint()
    assert before == make("huggingface", path=str(hub)).fingerprint()
    os.utime(hub / name, ns=(1, 10**18))
    assert before != make("huggingface", path=str(hub)).fingerprint()


def test_huggingface_data_files_and_fingerprint(hub):
    for name in ("x.jsonl", "y.jsonl"):
        (hub / name).write_bytes(json_lines([name]))
    settings = dict(path="json", data_files=(str(hub / "y.jsonl"),))
    assert list(make("huggingface", **settings).documents()) == ["y.jsonl"]
    both = dict(path="json", data_files=(str(hub / "*.jsonl"),))
    assert list(make("huggingface", **both).documents()) == ["x.jsonl", "y.jsonl"]
    seen = {make("huggingface", **settings).fingerprint(), make("huggingface", **settings).fingerprint()}
    assert len(seen) == 1
    seen.add(make("huggingface", **both).fingerprint())
    seen.add(make("huggingface", **settings, max_documents=1).fingerprint())
    os.utime(hub / "y.jsonl", ns=(1, 10**18))
    seen.add(make("huggingface", **settings).fingerprint())
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"split": "trian"}, "split", "allowed: train.*did you mean train"),
        ({"field": "txt"}, "field", r"allowed: url, text\); did you mean text"),
        ({"path": "/nowhere/at/all"}, "path", "cannot be opened: "),
        ({"path": "nobody/nothing"}, "path", "cannot be opened: "),
        ({"subset": "en"}, "path", "cannot be opened: .*en"),
    ],
)
def test_huggingface_errors_are_one_line(hub, settings, key, message):
    (hub / "train.jsonl").write_bytes(json_lines())
    with pytest.raises(ConfigError, match=message) as error:
        list(make("huggingface", **{"path": str(hub), **settings}).documents())
    assert error.value.key == key and "\n" not in str(error.value)


def test_huggingface_fields_and_records_that_cannot_be_used(hub, said):
    records = [{"meta": {"text": text}} for text in ("a", None, "b", None, "c")] + [{"meta": None}]
    (hub / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    settings = dict(path=str(hub), field="meta.text")
    with pytest.raises(ConfigError, match=r"record 2: field = 'meta\.text': must hold text, not null"):
        list(make("huggingface", **settings).documents())
    skipping = make("huggingface", **settings, max_skipped_records=3)
    assert list(skipping.documents()) == ["a", "b", "c"]
    assert said[0].startswith("skipped 3 of 6 records") and len(said) == 1
    assert list(make("huggingface", **settings, max_skipped_records=1, max_documents=2).documents()) == ["a", "b"]
    assert skipping.fingerprint() != make("huggingface", **settings).fingerprint()


def test_huggingface_tells_how_far_it_could_read(hub):
    raw = pyarrow.array([b"one", b"two", b"b\xe9d"], pyarrow.binary())
    invalid = pyarrow.StringArray.from_buffers(3, *raw.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), hub / "train.parquet")
    with pytest.raises(ConfigError, match=r"cannot be read after record \d+: UnicodeDecodeError") as error:
        list(make("huggingface", path=str(hub)).documents())
    assert "\n" not in str(error.value)


def test_huggingface_refuses_git_lfs_pointers(hub):
    (hub / "train.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    with pytest.raises(ConfigError, match=r"train\.jsonl is a Git LFS pointer"):
        list(make("huggingface", path=str(hub)).documents())


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("card", ["../secret.jsonl", "{hub}/../secret.jsonl", "sub/../../secret.jsonl"])
def test_huggingface_card_cannot_name_files_outside_of_its_data_set(hub, card, link):
    (hub / "sub").mkdir()
    (hub / "sub" / "train.jsonl").write_bytes(json_lines(["its own"]))
    (hub.parent / "secret.jsonl").write_bytes(json_lines(["secret"]))
    path = hub
    if link:
        path = hub.parent / "link"
        path.symlink_to(hub)

    def named(files: str) -> list[str]:
        (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: '{files}'\n---\n")
        return list(make("huggingface", path=str(path)).documents())

    assert named("sub/*.jsonl") == named(f"{hub}/sub/train.jsonl") == ["its own"]
    with pytest.raises(ConfigError, match=r"names .*secret\.jsonl, which is not a file of the data set"):
        named(card.format(hub=hub))
    # The recipe's author may.
    files = (str(hub.parent / "secret.jsonl"),)
    assert list(make("huggingface", path="json", data_files=files).documents()) == ["secret"]


@pytest.mark.parametrize(
    ("file", "folder", "within"),
    [
        ("hf://datasets/a/b@1f/en/x.json", "hf://datasets/a/b@1f/", True),
        ("hf://datasets/a/b@1f/en/x.json", "hf://datasets/a/b@1f", True),
        ("hf://datasets/a/other@1f/x.json", "hf://datasets/a/b@1f/", False),
        ("hf://datasets/a/b@1f0/x.json", "hf://datasets/a/b@1f", False),
        ("hf://datasets/a/b@1f/../other@1f/x.json", "hf://datasets/a/b@1f", False),
        ("https://host/x.json", "hf://datasets/a/b@1f", False),
        ("/etc/passwd", "hf://datasets/a/b@1f", False),
        ("https://host/x.json", "/data", False),
        ("zip://x.json::/data/x.zip", "/data", False),
        ("/data/x.json", "/data", True),
        ("/data2/x.json", "/data", False),
    ],
)
def test_what_is_within_a_data_set(file, folder, within):
    from titan_prores.components.dataset.huggingface import _is_within

    assert _is_within(file, folder) is within


def test_huggingface_runs_no_code_and_reads_no_pickle(hub, monkeypatch):
    """Not even where the environment asks for it."""
    import datasets

    monkeypatch.setenv("HF_DATASETS_TRUST_REMOTE_CODE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_TRUST_REMOTE_CODE", True, raising=False)
    (hub / "train.jsonl").write_bytes(json_lines())
    (hub / "hub.py").write_text(f"open({str(hub / 'ran')!r}, 'w')")
    for path in (hub, hub / "hub.py"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            list(make("huggingface", path=str(path)).documents())
    with pytest.raises(ConfigError, match="path = 'pandas': reads pickles"):
        make("huggingface", path="pandas", data_files=(str(hub / "train.jsonl"),))
    assert not (hub / "ran").exists()
    assert "trust_remote_code" not in lookup("dataset", "huggingface").Config.model_fields


def test_huggingface_needs_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    component = lookup("dataset", "huggingface")
    with pytest.raises(ConfigError, match=r"pip install 'titan-prores\[huggingface\]'"):
        component(component.Config(path="x"))


# --- Together -------------------------------------------------------------------------------------------------------


def test_documents_to_windows(tmp_path):
    """The default dataset and tokenizer through the whole pipeline: what was written decodes to the documents."""
    component, tokenizer = lookup("dataset", "python_stdlib"), lookup("tokenizer", "bytes")
    config = component.Config(cache_folder=str(tmp_path))
    dataset, tokenizer = component(config), tokenizer(tokenizer.Config())
    cache = prepare(dataset, tokenizer, config, source_name="python_stdlib", tokenizer_name="bytes", say=print)
    texts = {text for text in dataset.documents() if text}
    held_out = tokenizer.decode(cache.validation.read(0, len(cache.validation))).split("<|endoftext|>")[:-1]
    train = tokenizer.decode(cache.train.read(0, len(cache.train))).split("<|endoftext|>")[:-1]
    assert set(held_out) | set(train) == texts and not set(held_out) & set(train)
    assert len(TokenWindows(cache.train, 256)) == (len(cache.train) - 1) // 256


@pytest.mark.parametrize(("extension", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_a_stream_that_is_damaged_after_a_whole_one_is_not_taken_for_its_end(tmp_path, extension, compress):
    halves = [compress(json_lines()[:999]), compress(json_lines()[999:])]
    file = tmp_path / f"a.jsonl{extension}"
    file.write_bytes(b"".join(halves))
    assert read(file) == TEXTS, "two streams are one file"
    if extension == ".xz":
        file.write_bytes(halves[0] + b"\0" * 8 + halves[1] + b"\0" * 4)
        assert read(file) == TEXTS, "xz allows padding"
    for damaged in (halves[0] + b"\x01" + halves[1][1:], b"".join(halves) + b"rubbish", halves[0] + halves[1][:-9]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"a\.jsonl\{extension}, after line \d+: .*cannot be read"):
            read(file)


def test_links_that_lead_to_themselves_are_no_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "x1").symlink_to("x2")
    (tmp_path / "x2").symlink_to("x1")
    assert read("**/*.txt") == ["one"]
    with pytest.raises(ConfigError, match="x1"):
        read("**/x*")
