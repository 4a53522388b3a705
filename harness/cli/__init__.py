"""The command line. Each command is a thin layer: it reads the user's input, calls the engine, and prints. Exit codes:
0 passed, 1 an assertion failed, 2 inconclusive, 3 bad usage or scenario, 4 rollback incomplete, 5 internal error. For
several scenarios the worst code is returned; from the worst on, the order is 3, 4, 5, 1, 2, 0. A command ends with 141,
as by SIGPIPE, if the reader of its output is gone, as in `torchaos list | head -1`."""

from __future__ import annotations

import atexit
import gc
import re
import sys
import traceback

import click

from torchaos.harness.cli.options import cli
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import ExitCode

__all__ = ["cli", "main"]


def main() -> None:
    """The entry point. An expected error is printed as one message without a traceback, and gives an exit code."""
    # Events have no cycles, and the search for cycles took half of the time of a long run.
    gc.set_threshold(50_000, 20, 50)
    # Else the end of the interpreter searches all objects for cycles, a sixth of the time of a short command.
    atexit.register(gc.freeze)
    try:
        cli.main(prog_name="torchaos", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        text = _in_words(error.format_message()).rstrip(".")
        hint = f"{'' if text.endswith('?') else ';'} see `{context.command_path} --help`" if context else ""
        _fail(text + hint, ExitCode.USAGE)
    except click.Abort:
        sys.exit(ExitCode.INCONCLUSIVE)
    except ChaosError as error:
        _fail(str(error), error.exit_code)
    except Exception:  # a bug of torchaos: only then is the traceback useful
        traceback.print_exc()
        _fail("internal error: please report it with the lines above", ExitCode.INTERNAL)


def _in_words(text: str) -> str:
    """click's messages in the words of the others: a guess after a semicolon, numbers without notation for ranges."""
    if found := re.search(r"\.? \(?Did you mean (?:one of: )?([^?]+)\?\)?$", text):
        text = f"{text[: found.start()]}; did you mean {found[1].replace(', ', ' or ')}?"
    text = re.sub(r"^No such option[: ]*", "there is no option ", text)
    text = re.sub(r"is not a valid (?:integer|float)(?: range)?", "is not a number", text)
    text = re.sub(r" is not in the range (\d+)<=x<=\d{19}", r" must be at least \1, and smaller than 2**63", text)
    for sign, words in (("x>=", "at least "), ("x>", "more than ")):
        text = re.sub(rf" is not in the range {re.escape(sign)}(\S+?)\.?$", rf" must be {words}\1", text)
    return re.sub(r" is not in the range (\S+?)<=?x<=?(\S+?)\.?$", r" must be between \1 and \2", text)


def _fail(text: str, code: int) -> None:
    for line in mask(text).splitlines():
        click.echo(f"error: {line}", err=True)
    sys.exit(code)
