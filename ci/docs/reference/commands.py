"""Pages about the commands, read from click, and about the exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from torchaos.harness.cli import cli
from torchaos.harness.record import result

from . import comments
from .markdown import code, default, table

ABOUT = """# The command line

This page lists every command and its options. It is for engineers who run torchaos from a shell or a script;
`torchaos COMMAND --help` prints the same, and the [exit codes](exit-codes.md) have a page of their own.
"""

CODES = """# Exit codes

This page lists the exit codes of torchaos. It is for engineers whose scripts read them.

| exit code | |
|---|---|
{rows}

For several scenarios, torchaos returns the worst exit code, in the order {order}.
"""


def commands() -> str:
    named = list(all_commands())
    rows = [(f"[{code(name)}](#{name})", command.get_short_help_str(200)) for name, command in named]
    return "\n".join([ABOUT, table(["command", ""], rows), *(_section(name, command) for name, command in named)])


def all_commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        found = cli.get_command(context, name)
        assert found is not None
        yield name, found


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"torchaos {name}")
    usage = context.get_usage().removeprefix("Usage: ")
    parts = [f"## {name}", f"```text\n{' '.join(usage.split())}\n```", inspect.cleandoc(command.help or "")]
    options = [each for each in command.get_params(context) if isinstance(each, click.Option) and not each.hidden]
    parts.append(table(["option", "", "default"], [_row(option, context) for option in options]))
    return "\n\n".join(parts)


def _row(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    names = ", ".join(map(code, [*option.opts, *option.secondary_opts]))
    taken = "" if option.is_flag else f" {option.make_metavar(context)}"
    said = option.default if isinstance(option.default, (str, int, float)) and not option.is_flag else None
    shown = default(said if said is not None else getattr(option.default, "as_posix", lambda: None)())
    return names + taken, (option.help or "") + (" Repeatable." if option.multiple else ""), shown


def exit_codes() -> str:
    said = comments.of_entries(result, "ExitCode")
    rows = [f"| {exit_code.value} | {said[exit_code.name]} |" for exit_code in result.ExitCode]
    return CODES.format(rows="\n".join(rows), order=", ".join(str(exit_code.value) for exit_code in _worst_first()))


def _worst_first() -> Iterator[result.ExitCode]:
    left = list(result.ExitCode)
    while left:
        yield (exit_code := result.worst(left))
        left.remove(exit_code)
