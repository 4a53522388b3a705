"""The option --json of commands that run or judge. As in all other commands, `--json` prints JSON in place of the text,
which then goes to standard error. `--json FILE` writes the JSON to a file, beside the text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click

from torchaos.harness.contracts import UsageError

_PRINTED = Path("-")
Function = TypeVar("Function", bound=Callable[..., Any])


def _checked(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """The file. Raises UsageError if it is one of the command's own files: the word after --json was not meant."""
    if path and path != _PRINTED and (path.suffix in (".yaml", ".yml") or path.is_dir()):
        raise UsageError(f"--json {path}: it would be written over; to print the JSON, write --json as the last word")
    return path


def json_option(command: Function) -> Function:
    """Adds the option to a command, which gets `json_file`: the file to write, or None."""

    @wraps(command)
    def with_json(*words: Any, json_file: Path | None = None, **options: Any) -> Any:
        with _file_for(json_file) as file:
            return command(*words, json_file=file, **options)

    option = click.option(
        "--json", "json_file", type=click.Path(path_type=Path), is_flag=False, flag_value=str(_PRINTED),
        metavar="[FILE]", callback=_checked, help="Print all results as JSON, or write them to FILE.",
    )  # fmt: skip
    found: Function = option(with_json)  # type: ignore[assignment]
    return found


@contextmanager
def _file_for(path: Path | None) -> Iterator[Path | None]:
    """The file that the command writes. Its contents are printed in the end, also after an error."""
    if path != _PRINTED:
        yield path
        return
    with TemporaryDirectory(prefix="torchaos-") as folder:
        file = Path(folder, "results.json")
        try:
            with redirect_stdout(sys.stderr):
                yield file
        finally:
            if file.exists():
                click.echo(file.read_text(), nl=False)
