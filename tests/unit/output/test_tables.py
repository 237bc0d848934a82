"""Tables, and the part of a Markdown page that a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_prores.config.errors import ConfigError
from titan_prores.output import tables

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"


def test_markdown_keeps_a_row_a_row() -> None:
    text = tables.markdown(["a", "b"], [["x|y", "1\n2"]])
    assert text == "| a | b |\n| --- | --- |\n| x/y | 1<br>2 |\n"


def test_shown_tables_fit_a_hundred_columns(capsys: pytest.CaptureFixture) -> None:
    tables.show("title", ["a", "b"], [["word " * 40, "[bold] 1.0 [0.9, 1.1]"]])
    out = capsys.readouterr().out
    assert out.startswith("title") and "[bold] 1.0 [0.9, 1.1]" in out
    assert max(map(len, out.splitlines())) <= 100


def test_text_between_marks_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for new in ("new\n", "newer\n"):
        tables.replace_between(file, "speed", new)
        assert file.read_text() == f"before\n{BEGIN}\n{new}{END}\nafter\n"


@pytest.mark.parametrize(
    "text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", f"{BEGIN}\n{END}\n{END}\n"]
)
def test_marks_that_do_not_fit_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"needs the lines <!-- speed:begin -->"):
        tables.replace_between(file, "speed", "new\n")
    assert file.read_text() == text


def test_a_page_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    for name, problem in (("missing.md", "No such file or directory"), ("binary.md", "not a text file")):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read: {problem}"):
            tables.around(tmp_path / name, "speed")
