"""Where the results of a command go.

The options --json and --quiet mean the same in all commands (docs/reference.md has the rule). `--json` prints one JSON
document, which is all of the standard output. `--json FILE.json` writes it to a file, beside the text. The next word
is a file only if it ends in `.json`; `--json=FILE` takes any name.

The folders into which the runs of a working directory went by `--out` are remembered, so that `latest` finds them. The
file STATE/outs/DIGEST of a working directory has a folder in each line."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click

from torchaos.harness.cli.commands import ALL
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import UsageError
from torchaos.harness.rollback import undo_log

_PRINTED = Path("-")
Function = TypeVar("Function", bound=Callable[..., Any])


class Command(click.Command):
    """A command of torchaos. Each accepts -q, so that scripts need not know which of them show progress."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {word for one in self.params for word in one.opts}
        if "--json" in known:
            args = [f"--json={_PRINTED}" if _is_alone(args, at) else word for at, word in enumerate(args)]
        if "--quiet" not in known and not ctx.ignore_unknown_options:
            end = args.index("--") if "--" in args else len(args)
            args = [word for at, word in enumerate(args) if word not in ("-q", "--quiet") or at > end]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the exit codes, unless the help has them, and examples."""
        listed = ALL.get(self.name or "")
        if listed is None or not listed.examples:
            return
        if "Exit code" not in (self.help or ""):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"Exit codes: {listed.codes}.")
        with formatter.section("Examples" if len(listed.examples) > 1 else "Example"):
            for example in listed.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def _is_alone(args: Sequence[str], at: int) -> bool:
    return args[at] == "--json" and not "".join(args[at + 1 : at + 2]).endswith(".json")


def _checked(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """The file. Raises UsageError if it is one of the user's own files: the word after --json was not meant."""
    if path and path.exists() and path != _PRINTED:
        from torchaos.harness.scenario.loader import kind_of  # imported here, because most calls have no file

        if path.is_dir() or (path.is_file() and kind_of(path)):
            raise UsageError(
                f"--json {path}: it would be written over; to print the JSON, write --json as the last word"
            )
    return path


_OPTION = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), is_flag=False, flag_value=str(_PRINTED),
    metavar="[FILE.json]", callback=_checked, help="Print JSON in place of the text, or write it to FILE.json.",
)  # fmt: skip


def json_option(command: Function) -> Function:
    """For commands whose work takes time: they get `json_file`, the file to write, or None. If the JSON is printed,
    the text goes to standard error."""

    @wraps(command)
    def with_json(*words: Any, json_file: Path | None = None, **options: Any) -> Any:
        with _file_for(json_file) as file:
            return command(*words, json_file=file, **options)

    return _OPTION(with_json)  # type: ignore[return-value]


def json_only(command: Function) -> Function:
    """For commands that only look: they get `json_file` for `is_told`."""
    return _OPTION(command)


def is_told(json_file: Path | None, found: Any) -> bool:
    """Writes the JSON where the user wants it. Returns whether it was printed; then no text is printed."""
    if json_file == _PRINTED:
        click.echo(json.dumps(found, indent=1))
    elif json_file:
        try:
            json_file.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"--json {json_file}: it can't be written: {error.strerror}") from error
    return json_file == _PRINTED


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


RUNS = Path("torchaos-runs")  # where run directories go, unless --out names another folder
_MOST = 20  # folders of a working directory


def remember(out: Path) -> None:
    """Notes the folder of a run that begins in the current working directory. Without a note, only `latest` suffers."""
    with suppress(OSError):
        path, known = _file(Path.cwd()), [str(one) for one in outs_of(Path.cwd())[1:]]
        text = str(out.absolute())
        if out.absolute() != RUNS.absolute() and text not in known[:1]:
            others = [one for one in known if one != text]
            write_atomically(path, "\n".join([text, *others][:_MOST]) + "\n", private=True)


def outs_of(cwd: Path) -> list[Path]:
    """The folders into which the runs of this working directory went: the usual one, then the others that are there,
    newest first."""
    lines: list[str] = []
    with suppress(OSError):
        lines = _file(cwd).read_text(errors="surrogateescape").splitlines()
    return [RUNS, *(Path(line) for line in lines if os.path.isdir(line))]


def _file(cwd: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(cwd), digest_size=12).hexdigest()
    return undo_log.private(undo_log.state_home() / "outs") / digest
