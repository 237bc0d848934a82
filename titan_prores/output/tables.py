"""Tables for a terminal and for a Markdown page, and the part of a page that a command writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan_prores.config.errors import ConfigError
from titan_prores.output.files import write_atomically

WIDTH = 100  # width of a table where the width of the terminal is unknown


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout, wrapping long cells."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_lines=False)
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if Console().is_terminal else WIDTH
    console = Console(width=width, highlight=False, markup=False)
    console.print(title)
    console.print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table. A cell of several lines stays one cell."""
    lines = [header, ["---"] * len(header), *rows]
    cleaned = [[cell.replace("|", "/").replace("\n", "<br>") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cleaned) + "\n"


def around(file: Path, mark: str) -> tuple[str, str]:
    """What a file has up to its line <!-- mark:begin -->, and from its line <!-- mark:end --> on, both included.

    Raises:
        ConfigError: the file does not have each of the two lines once, in this order.
    """
    begin, end = (f"<!-- {mark}:{which} -->" for which in ("begin", "end"))
    try:
        found = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{file} cannot be read: {getattr(error, 'strerror', 'not a text file')}") from error
    before, first, rest = found.partition(f"{begin}\n")
    _, second, after = rest.partition(end)
    if not (first and second) or begin in rest or end in before + after:
        raise ConfigError("", f"{file} needs the lines {begin} and {end}, once each and in this order")
    return before + first, second + after


def replace_between(file: Path, mark: str, text: str) -> None:
    """Put `text` between the lines <!-- mark:begin --> and <!-- mark:end --> of a file, in place of what is there.

    Raises:
        ConfigError: as `around`.
    """
    before, after = around(file, mark)
    write_atomically(file, f"{before}{text}{after}".encode())
