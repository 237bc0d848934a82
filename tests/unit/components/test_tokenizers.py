"""Tokenizers against the libraries they stand on, and what they say about files that are wrong."""

from __future__ import annotations

import base64
import json
import random
import sys

import numpy as np
import pytest
import tiktoken
import tokenizers
from tiktoken.load import load_tiktoken_bpe

from titan_prores.config.errors import ConfigError
from titan_prores.config.registry import lookup, names

TEXT = "It's 2048 naïve\r\n\n\ttokens — 漢字 🙂 <|endoftext|>  end\n" + "def f(x):\n    return x + 1\n" * 50


@pytest.fixture(scope="module")
def hf_file(tmp_path_factory):
    """A byte-level BPE tokenizer.json trained here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


MERGES = [b"in", b"re", b"to", b"ke", b"toke", b"  ", b"    ", b"\n\n", b" x", b"aa", b"aaaa", b"aaaaaaaa", b"return"]


def rank_lines() -> list[bytes]:
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def ranks_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.model"
    path.write_bytes(b"\n".join(rank_lines()) + b"\n")
    return path


@pytest.fixture
def make(ranks_file, hf_file):
    def make(name: str, **settings):
        if name != "bytes":
            settings = {"path": str({"tiktoken_file": ranks_file, "hf_file": hf_file}[name]), **settings}
        component = lookup("tokenizer", name)
        return component(component.Config(**settings))

    return make


ALL = ["bytes", "tiktoken_file", "hf_file"]


def test_all_are_registered():
    assert set(ALL) <= set(names("tokenizer"))


@pytest.mark.parametrize("name", ALL)
def test_round_trip_and_protocol(make, name):
    tokenizer = make(name)
    ids = tokenizer.encode(TEXT)
    assert isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu"
    assert tokenizer.decode(ids) == TEXT and tokenizer.decode(ids.tolist()) == TEXT
    assert tokenizer.eot_id not in ids  # the special token written in the text is plain text
    assert ids.min() >= 0 and max(ids.max(), tokenizer.eot_id) < tokenizer.n_vocab
    assert len(tokenizer.encode("")) == 0
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("é")[:1]) or len(tokenizer.encode("é")) == 1
    assert tokenizer.fingerprint() == make(name).fingerprint()


def test_bytes_are_utf8(make):
    tokenizer = make("bytes")
    assert tokenizer.encode(TEXT).tolist() == list(TEXT.encode())
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (257, 256)
    assert tokenizer.decode([72, 105, 256]) == "Hi<|endoftext|>"


@pytest.mark.parametrize("pattern", ["llama3", "gpt2"])
def test_ranks_file_equals_tiktoken(make, ranks_file, pattern):
    tokenizer = make("tiktoken_file", pattern=pattern)
    ranks = load_tiktoken_bpe(str(ranks_file))
    special_tokens = {"<|endoftext|>": len(ranks)}
    theirs = tiktoken.Encoding(
        "theirs", pat_str=tokenizer.encoding._pat_str, mergeable_ranks=ranks, special_tokens=special_tokens
    )
    assert tokenizer.encode(TEXT).tolist() == theirs.encode_ordinary(TEXT)
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (theirs.n_vocab, theirs.eot_token)
    long = TEXT * 300  # several pieces
    assert len(long) > 400_000
    assert tokenizer.encode(long).tolist() == theirs.encode_ordinary(long)


@pytest.mark.parametrize("name", names("tokenizer"))
def test_a_text_in_chunks_has_the_tokens_of_the_whole(make, name):
    """Wherever the chunks end, and for more than is encoded at once."""
    tokenizer = make(name)
    draw = random.Random(0)
    long = TEXT * 800  # 1.2 million characters
    for text in ("", "a", TEXT, long):
        whole = tokenizer.encode(text).tolist()
        start, chunks = 0, []
        while start < len(text):
            end = start + draw.randint(1, 1 + len(text) // 3)
            chunks.append(text[start:end])
            start = end
        assert [token for part in tokenizer.encode_long(chunks) for token in part.tolist()] == whole


def test_presets_split_as_the_published_encodings_do(make):
    """The sizes of the pieces: a token a piece when every merge exists is a matter of the pattern alone."""
    split = {
        "llama3": ["It", "'s", " ", "204", "8", " x", "\r\n\n", "\t", "\t漢", " !?\n", "  ", " y"],
        "gpt2": ["It", "'s", " 2048", " x", "\r\n\n\t", "\t", "漢", " !?", "\n  ", " y"],
    }
    for pattern, pieces in split.items():
        ranks = {bytes([byte]): byte for byte in range(256)}
        for piece in pieces:  # every prefix too, so that merges lead up to it
            raw = piece.encode()
            for end in range(2, len(raw) + 1):
                ranks.setdefault(raw[:end], len(ranks))
        encoding = tiktoken.Encoding(
            "x",
            pat_str=make("tiktoken_file", pattern=pattern).encoding._pat_str,
            mergeable_ranks=ranks,
            special_tokens={},
        )
        text = "".join(pieces)
        assert [encoding.decode([i]) for i in encoding.encode_ordinary(text)] == pieces


def test_special_tokens_as_list_and_table(make):
    listed = make("tiktoken_file", special_tokens=("<|bos|>", "<|eos|>"), eot_token="<|eos|>")
    n = 256 + len(MERGES)
    assert (listed.eot_id, listed.n_vocab) == (n + 1, n + 2)
    table = make("tiktoken_file", special_tokens={"<|endoftext|>": 500})
    assert (table.eot_id, table.n_vocab) == (500, 501)
    assert len({listed.fingerprint(), table.fingerprint(), make("tiktoken_file").fingerprint()}) == 3


def test_hf_file_equals_tokenizers(make, hf_file):
    theirs = tokenizers.Tokenizer.from_file(str(hf_file))
    tokenizer = make("hf_file")
    plain = TEXT.replace("<|endoftext|>", "")
    assert tokenizer.encode(plain).tolist() == theirs.encode(plain, add_special_tokens=False).ids
    assert tokenizer.n_vocab == theirs.get_vocab_size() and tokenizer.eot_id == theirs.token_to_id("<|endoftext|>")
    assert make("hf_file", path=str(hf_file.parent)).fingerprint() == tokenizer.fingerprint()
    assert make("hf_file", eot_token="<|pad|>").fingerprint() != tokenizer.fingerprint()


def test_fingerprint_follows_the_content_of_the_file(make, tmp_path):
    before = make("tiktoken_file").fingerprint()
    path = tmp_path / "other.name"
    path.write_bytes(b"\n".join(rank_lines()))
    assert make("tiktoken_file", path=str(path)).fingerprint() != before  # no newline at the end: other bytes
    path.write_bytes(b"\n".join(rank_lines()) + b"\n")
    assert make("tiktoken_file", path=str(path)).fingerprint() == before


@pytest.mark.timeout(120)  # quadratic time would be hours
@pytest.mark.parametrize("name", ["bytes", "tiktoken_file"])
@pytest.mark.parametrize("text", ["a" * 3_000_000, " " * 1_000_000, "漢" * 300_000], ids=["letters", "blanks", "wide"])
def test_monotonous_documents_take_linear_time(make, name, text):
    tokenizer = make(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def _edit(lines, number, line):
    return [*lines[: number - 1], line, *lines[number:]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda lines: _edit(lines, 7, b"no rank here"), "model:7: .*each line must be"),
        (lambda lines: _edit(lines, 8, b"!!! 7"), "model:8: .*each line must be"),
        (lambda lines: _edit(lines, 9, b"QQ== -1"), "model:9: .*negative"),
        (lambda lines: _edit(lines, 9, b"QQ== 2147483648"), "model:9: .*too large"),
        (lambda lines: _edit(lines, 9, b"QQ== " + b"9" * 10_000), "model:9: .*each line must be"),
        (lambda lines: _edit(lines, 9, b"QQ=="), "model:9: .*each line must be"),
        (lambda lines: _edit(lines, 9, b"QQ 9"), "model:9: .*each line must be"),
        (lambda lines: _edit(lines, 9, b" 9"), "model:9: .*each line must be"),
        (lambda lines: [*lines, b"@include /etc/passwd"], "model:270: .*each line must be"),
        (lambda lines: _edit(lines, 260, lines[4]), "model:260: .*token or rank 4 came before, in line 5"),
        (lambda lines: lines[1:], "1 of the 256 single bytes"),
        (lambda lines: [b"\x80\x02\x00binary"], "model:1: .*each line must be"),
        (lambda lines: [], "256 of the 256"),
    ],
)
def test_ranks_files_that_are_none(make, tmp_path, content, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(content(rank_lines())))
    with pytest.raises(ConfigError, match=message) as error:
        make("tiktoken_file", path=str(path))
    assert error.value.key == "path"


@pytest.mark.parametrize(
    ("name", "settings", "key", "message"),
    [
        ("tiktoken_file", {"path": "https://host/cl100k_base.tiktoken"}, "path", "is a URL"),
        ("tiktoken_file", {"path": "/nowhere/tokenizer.model"}, "path", "no such file"),
        ("tiktoken_file", {"pattern": "llama_3"}, "pattern", "did you mean llama3"),
        ("tiktoken_file", {"pattern": "(unclosed"}, "pattern", "not a regex"),
        ("tiktoken_file", {"pattern": r"\p{L}+"}, "pattern", "loses a part"),
        ("tiktoken_file", {"eot_token": "<|endoftxt|>"}, "eot_token", r"did you mean <\|endoftext\|>"),
        ("tiktoken_file", {"special_tokens": {"<|endoftext|>": 7}}, "special_tokens.<|endoftext|>", "another token"),
        ("tiktoken_file", {"special_tokens": {"<|endoftext|>": 2**40}}, "special_tokens.<|endoftext|>", "too large"),
        ("tiktoken_file", {"special_tokens": {"<|endoftext|>": 2**80}}, "special_tokens.<|endoftext|>", "too large"),
        ("tiktoken_file", {"path": "~/tokenizer.model"}, "path", "no such file"),
        ("tiktoken_file", {"path": "$HOME/tokenizer.model"}, "path", "no such file"),
        ("tiktoken_file", {"path": "x\0.model"}, "path", "no such file"),
        ("hf_file", {"path": "$(touch x)/tokenizer.json"}, "path", "no such file"),
        ("tiktoken_file", {"special_tokens": ("a", "a"), "eot_token": "a"}, "special_tokens", "twice"),
        ("hf_file", {"path": "/nowhere/tokenizer.json"}, "path", "no such file"),
        ("hf_file", {"path": __file__}, "path", "not a tokenizer.json"),
        ("hf_file", {"eot_token": "<|endoftxt|>"}, "eot_token", r"did you mean <\|endoftext\|>"),
    ],
)
def test_errors(make, name, settings, key, message):
    with pytest.raises(ConfigError, match=message) as error:
        make(name, **settings)
    assert error.value.key == key and "\n" not in str(error.value)


CRAFTED = {
    "pickle": b"\x80\x04cposix\nsystem\n(S'touch x'\ntR.",
    "deep list": b"[" * 10**6,
    "deep tables": b'{"model":' * 10**5,
    "names of files for a vocabulary": {"model": {"type": "BPE", "vocab": "/etc/passwd", "merges": "/etc/passwd"}},
    "names of files in a list": {"model": {"type": "BPE", "vocab": ["/etc/passwd"], "merges": []}},
    "negative id": {"model": {"type": "BPE", "vocab": {"<|endoftext|>": -1}, "merges": []}},
    "id beyond 32 bits": {"model": {"type": "BPE", "vocab": {"<|endoftext|>": 2**32}, "merges": []}},
    "merge of nothing": {"model": {"type": "BPE", "vocab": {"<|endoftext|>": 0}, "merges": ["x y"]}},
    "normalizer that panics": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 4).decode()}
    },
    "code for a part": {"pre_tokenizer": {"type": "Custom", "code": "import os"}},
}


@pytest.mark.parametrize("content", CRAFTED.values(), ids=CRAFTED)
def test_crafted_hf_files_are_refused_in_one_line(make, hf_file, tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, dict):
        content = json.dumps(json.loads(hf_file.read_text()) | content).encode()
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json that the tokenizers library accepts") as error:
        make("hf_file", path=str(tmp_path))
    assert error.value.key == "path" and "\n" not in str(error.value) and "root:" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_files_that_an_hf_file_names_have_no_effect(make, hf_file, tmp_path):
    """Nor has what lies beside it, code in particular."""
    content = json.loads(hf_file.read_text())
    content["model"] |= {"files": ["/etc/passwd", "/etc/group"], "vocab_file": "vocab.json", "auto_map": "x.py"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "x.py").write_text("raise SystemExit(3)")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.X", null]}}')
    tokenizer = make("hf_file", path=str(tmp_path))
    for path in tmp_path.iterdir():
        path.unlink()
    assert tokenizer.encode(TEXT).tolist() == make("hf_file").encode(TEXT).tolist()


def test_a_panic_while_encoding_is_an_error(make):
    tokenizer = make("hf_file")
    panic = type("PanicException", (BaseException,), {})

    class Panics:
        def encode(self, *args, **kwargs):
            raise panic("index out of bounds")

    tokenizer.tokenizer = Panics()
    with pytest.raises(RuntimeError, match="index out of bounds"):
        tokenizer.encode("x")
    Panics.encode = lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


def test_nearest_file_is_named(make, ranks_file):
    with pytest.raises(ConfigError, match=r"did you mean tokenizer\.model"):
        make("tiktoken_file", path=str(ranks_file.with_name("tokeniser.model")))


def test_missing_package(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'titan-prores\[huggingface\]'"):
        make("hf_file")
