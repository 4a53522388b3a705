"""The commands by group, each with its module and its summary. A command's module is imported when the command is used:
`torchaos --help` and shell completion import none."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from signal import SIGPIPE
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


class Listed(NamedTuple):
    module: str  # `--help` also shows the first sentence of the command's own help
    summary: str  # the first sentence of the command's own help
    examples: tuple[str, ...] = ()
    codes: str = "0 done, 3 bad usage, 5 internal error"  # unless the command's own help says them


_JUDGED = (
    "0 all passed, 1 an assertion failed, 2 inconclusive, 3 bad usage or scenario, 4 rollback incomplete, 5 internal "
    "error; of several runs the worst: 3, 4, 5, 1, 2, 0"
)
_BACK = "0 all is taken back, 3 bad usage, 4 rollback incomplete, 5 internal error"


# The first page of `torchaos --help` describes these, and names the commands that people rarely need.
FIRST = ("init", "run", "validate", "explore", "gameday", "explain", "report", "gate", "doctor", "list")
_RARE = ("exec", "node", "events", "schema", "bisect", "shrink")  # only `--help --all` has them
_ALL = "--all"

GROUPS: Mapping[str, Mapping[str, Listed]] = {
    "Inject faults": {
        "init": Listed(
            "init",
            "Write a first scenario for your job, and show what was seen of it.",
            ("torchaos init -- torchrun --nproc-per-node 2 train.py",),
            "0 the scenario is written, 2 the run without a fault did not end well, 3 bad usage, 5 internal error",
        ),
        "run": Listed(
            "run",
            "Run scenarios against live jobs and judge them.",
            (
                "torchaos run chaos/kill-rank.yaml",
                "torchaos run process/kill-rank -- torchrun --nproc-per-node 2 train.py",
                "torchaos run chaos/ --set job.timeout=2m --junit junit.xml",
            ),
            _JUDGED,
        ),
        "plan": Listed("run", "Show what a run would do, and change nothing.", ("torchaos plan chaos/kill-rank.yaml",)),
        "validate": Listed(
            "validate",
            "Check files without looking at the machine.",
            ("torchaos validate chaos/",),
            "0 all files are right, 3 one is not, 5 internal error",
        ),
        "explore": Listed(
            "explore",
            "Try every moment at which the whole job can die.",
            ("torchaos explore chaos/kill-rank.yaml --minutes 10",),
            _JUDGED,
        ),
        "gameday": Listed(
            "gameday",
            "Inject faults for hours, at the rates of a real cluster.",
            ("torchaos gameday chaos/night.yaml --plan",),
            _JUDGED,
        ),
        "shrink": Listed(
            "minimize",
            "Find the smallest set of a game day's faults that still fails.",
            ("torchaos shrink torchaos-days/night-s0-20260101-020304-5",),
            "0 the scenario is written, 2 too few tries failed, 3 bad usage, 5 internal error",
        ),
        "bisect": Listed(
            "minimize",
            "Find the release of a package that broke a recovery.",
            ("torchaos bisect chaos/kill-rank.yaml transformers=4.50..4.57",),
        ),
        "exec": Listed("node", "Record one node's part of a job that a scheduler starts."),
    },
    "Read results": {
        "report": Listed(
            "results", "Write report.html, which opens offline, for run directories.", ("torchaos report latest",)
        ),
        "explain": Listed(
            "results",
            "Tell the story of a run in plain words.",
            ("torchaos explain latest", "torchaos explain -v latest"),
        ),
        "judge": Listed(
            "inspection", "Judge run directories again, offline.", ("torchaos judge torchaos-runs/*/",), _JUDGED
        ),
        "events": Listed("inspection", "Print the journal of a run as lines of JSON.", ("torchaos events latest",)),
        "compare": Listed(
            "results",
            "Compare two runs, game days or commits: is B worse than A?",
            ("torchaos compare torchaos-runs/monday torchaos-runs/tuesday",),
        ),
        "history": Listed(
            "results",
            "Show the results of past runs and game days over time.",
            ("torchaos history kill-rank --html history.html",),
        ),
        "gate": Listed(
            "gate",
            "Decide on a release: judge runs by a gate's bounds and waivers.",
            ("torchaos gate release.yaml torchaos-runs --commit 1a2b3c4",),
        ),
        "repro": Listed("results", "Write a script that shows a finding without torchaos.", ("torchaos repro latest",)),
    },
    "Look at jobs and checkpoints": {
        "diagnose": Listed(
            "evidence",
            "Name the ranks that hold up a job that hangs, with the evidence.",
            ("torchaos diagnose /tmp/dumps",),
        ),
        "verify": Listed("evidence", "Check a checkpoint for damage.", ("torchaos verify checkpoints/",)),
    },
    "This machine": {
        "doctor": Listed(
            "inspection", "Show what this machine can do, what is missing, and how to get it.", ("torchaos doctor",)
        ),
        "list": Listed(
            "inspection", "List ready scenarios, faults, assertions and other parts.", ("torchaos list process.kill",)
        ),
        "schema": Listed(
            "inspection",
            "Print the JSON Schema of scenario files, for editors.",
            ("torchaos schema > scenario.schema.json",),
        ),
        "status": Listed(
            "manage", "Show your runs that are alive or that left something behind.", ("torchaos status",)
        ),
        "halt": Listed("manage", "End runs in order, with rollback.", ("torchaos halt kill-rank",), _BACK),
        "recover": Listed(
            "manage", "Undo what killed runs left behind, also after a reboot.", ("torchaos recover",), _BACK
        ),
        "node": Listed("node", "Reach the agent of this node; launchers start this command."),
        "prune": Listed(
            "manage", "Remove finished run directories by age and size.", ("torchaos prune --older-than 30d --dry-run",)
        ),
    },
}
ALL: Mapping[str, Listed] = {name: listed for group in GROUPS.values() for name, listed in group.items()}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ALL)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ALL:
            import_module(f"{__package__}.{ALL[cmd_name].module}")  # the import adds its commands to this group
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UsageError for an unknown command, and names the command that was probably meant."""
        if args and args[0] not in ALL and not args[0].startswith("-"):
            from difflib import get_close_matches  # imported here, because only a mistake needs it

            near = get_close_matches(args[0], ALL, 1)
            ctx.fail(f"there is no command '{args[0]}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Raises SystemExit with 141 if the reader of the output is gone. click and rich would exit with 1."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, SystemExit) as error:
            if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
                sys.stdout = None  # at its exit, Python would try again to write
                raise SystemExit(128 + SIGPIPE) from None
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes `--all` before any command: then the help describes all commands."""
        own = [*takewhile(lambda word: word.startswith("-"), args)]
        if _ALL in own:
            ctx.meta[_ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = _ALL in ctx.meta
        for title, group in GROUPS.items():
            shown = {name: listed for name, listed in group.items() if whole or name in FIRST}
            if shown:
                with formatter.section(title):
                    formatter.write_dl([(name, listed.summary) for name, listed in shown.items()], col_spacing=2)
        if not whole:
            with formatter.section("More"):
                others = ", ".join(name for name in ALL if name not in (*FIRST, *_RARE))
                formatter.write_text(f"{others}; `torchaos --help --all` describes all {len(ALL)} commands")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [*self._completed(incomplete), *click.Command.shell_complete(self, ctx, incomplete)]

    def _completed(self, incomplete: str) -> Iterator[CompletionItem]:
        for name, listed in ALL.items():
            if name.startswith(incomplete):
                yield CompletionItem(name, help=listed.summary)
