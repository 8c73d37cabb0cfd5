"""All drawing on the terminal. stdout carries data, stderr carries talk; nothing here computes."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

__all__ = [
    "format_bytes",
    "format_count",
    "format_figure",
    "print_data",
    "print_error",
    "print_json",
    "print_notice",
    "print_properties",
    "print_table",
    "print_warning",
    "progress_bars",
    "readable",
    "stdout_console",
]

_PLAIN_WIDTH = 120  # tables in a log or a pipe, where there is no terminal to ask

# Text of a corpus or a name in a manifest must not steer the terminal that shows it.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

# soft_wrap keeps a path or a command on one line, so that it can be copied.
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """Return a console for data; no colour and a fixed width when stdout is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def readable(text: str) -> str:
    """Write control characters as escapes, but line ends and tabs."""
    return text.translate(_CONTROLS)


def print_error(message: str) -> None:
    """Print an error to stderr."""
    _stderr.print(Text.assemble(("error: ", "bold red"), readable(message)))


def print_warning(message: str) -> None:
    """Print a warning to stderr."""
    _stderr.print(Text.assemble(("warning: ", "bold yellow"), readable(message)))


def print_notice(message: str) -> None:
    """Print a line of talk to stderr."""
    _stderr.print(Text(readable(message)))


def print_data(text: str | Text) -> None:
    """Print text to stdout, control characters of a plain one escaped."""
    shown = readable(text) if isinstance(text, str) else text
    stdout_console().print(shown, soft_wrap=True, markup=False)


def print_json(document: Any) -> None:
    """Print data classes, pydantic models and plain values to stdout as JSON."""
    json.dump(document, sys.stdout, default=_plain, indent=1)
    sys.stdout.write("\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout; columns after the first are right-aligned."""
    table = _table(title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    _print_rows(table, rows)


def print_properties(title: str, rows: Sequence[tuple[str, object]]) -> None:
    """Print names and their values to stdout."""
    table = _table(title)
    table.show_header = False
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    _print_rows(table, rows)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)


def _print_rows(table: Table, rows: Sequence[Sequence[object]]) -> None:
    for row in rows:
        table.add_row(*(Text(readable(str(cell))) for cell in row))  # Text: a cell with brackets is no markup
    console = stdout_console()
    console.print(table)
    console.print()


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def format_count(count: float) -> str:
    """Write a count with thousands separators."""
    return f"{count:,.0f}"


def format_figure(value: float | None, spec: str) -> str:
    """Write a figure by a format specification; a dash where there is none."""
    return "-" if value is None else format(value, spec)


@contextmanager
def progress_bars(*columns: str) -> Iterator[Progress]:
    """Show progress bars on stderr while the block runs; nothing when stderr is not a terminal.

    Args:
      columns: Rich format strings of extra columns, such as ``"{task.fields[rate]}"``.
    """
    shown: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        *(TextColumn(column) for column in columns),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*shown, console=_stderr, disable=not _stderr.is_terminal, expand=True) as progress:
        yield progress


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
