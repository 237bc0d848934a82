"""Datasets: every format gives the same documents, and faults name file, line and the nearest right name."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from titan_prores.data import TokenWindows, prepare
from titan_prores.errors import ConfigError
from titan_prores.registry import lookup, names

TEXTS = ["one", "two\nlines", "naïve 漢字 🙂", "\tlast — with \u2028 inside", "x" * 5000] + [
    f"more {i}" for i in range(2500)
]


def make(name: str, **settings):
    component = lookup("dataset", name)
    return component(component.Config(**settings))


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
    "a.parquet": write_parquet,
}


def test_all_are_registered():
    assert {"python_stdlib", "text", "huggingface"} <= set(names("dataset"))


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_yields_the_same_documents(tmp_path, name):
    WRITERS[name](tmp_path / name)
    dataset = make("text", files=(str(tmp_path / name),))
    assert list(dataset.documents()) == TEXTS
    assert list(dataset.documents()) == TEXTS  # each time


@pytest.mark.parametrize("compress", [None, gzip.compress, zstandard.compress])
def test_txt(tmp_path, monkeypatch, compress):
    monkeypatch.chdir(tmp_path)
    suffix = {None: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[compress]
    content = b"a b\nc\r\n\n \n\nd\n\n"
    Path("x.txt" + suffix).write_bytes(compress(content) if compress else content)
    expected = {"file": ["a b\nc\n\n \n\nd\n\n"], "line": ["a b", "c", "d"], "paragraph": ["a b\nc", "d"]}
    for txt_document, documents in expected.items():
        dataset = make("text", files=("*.txt*",), txt_document=txt_document)
        assert list(dataset.documents()) == documents


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path, compress, share):
    """Not taken for a shorter one."""
    whole = compress(json_lines([os.urandom(5000).hex() for _ in range(50)]))
    path = tmp_path / ("a.jsonl" + {gzip.compress: ".gz", zstandard.compress: ".zst"}[compress])
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(make("text", files=(str(path),)).documents())


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
        "b.txt", "deep/c.txt", "deep/er/a.txt", "odd[1].txt"
    ]  # fmt: skip
    assert list(make("text", files=("odd[1].txt",)).documents()) == ["odd[1].txt"]
    assert list(make("text", files=("deep/*.txt",)).documents()) == ["deep/c.txt"]


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


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("data/trian.jsonl", r"matches no file; did you mean data/train\.jsonl"),
        ("dota/*.jsonl", r"matches no file; did you mean data/\*\.jsonl"),
        ("data/*.parquet", "matches no file$"),
        ("data", r"is a folder; did you mean data/\*\*/\*"),
        ("data/notes.md", r"no known format \(allowed: \.txt, .*\.jsonl\.zst, .*\.parquet"),
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
        ("a.json", b'[\n{"text": "a"}\n]', "files", r"a\.json:1: .*not valid JSON"),
        ("a.jsonl", b'{"txet": "a", "url": "u"}\n', "field", r"a\.jsonl:1: .*allowed: txet, url\); did you mean txet"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "field", r"a\.jsonl:2: .*must hold text, not null"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "files", r"a\.jsonl, after line .*utf-8"),
        ("a.jsonl.gz", b"not compressed", "files", r"a\.jsonl\.gz, after line 0: .*[Nn]ot a gzip"),
        ("a.jsonl.gz", gzip.compress(json_lines())[:-4000], "files", r"a\.jsonl\.gz, after line [1-9]"),
        ("a.jsonl.zst", b"not compressed", "files", r"a\.jsonl\.zst, after line 0: "),
        ("a.parquet", b"not parquet", "files", r"a\.parquet: .*cannot be read as Parquet"),
    ],
)
def test_contents_that_do_not_fit(tmp_path, name, content, key, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        list(make("text", files=(str(tmp_path / name),)).documents())
    assert error.value.key == key and "\n" not in str(error.value)


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
    with pytest.raises(ConfigError, match=r"names .*secret\.jsonl, which is no file of the data set"):
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
    from components.dataset.huggingface import _is_within

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
