"""What the commands share: the run directories that a user names, options, the group of all commands, and where the
results of a command go.

`latest` is the newest run directory. The folders into which the runs of a working directory went by `--out` are
remembered, so that it finds them. The file STATE/outs/DIGEST of a working directory has a folder in each line.

The options --json and --quiet mean the same in all commands (docs/reference.md has the rule). `--json` prints one JSON
document, which is all of the standard output. `--json FILE.json` writes it to a file, beside the text. The next word
is a file only if it ends in `.json`; `--json=FILE` takes any name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from torchaos.harness.cli.commands import ALL, Commands
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.collective_stamps import ranks_in
from torchaos.harness.rollback import undo_log

if TYPE_CHECKING:
    _PathType = click.ParamType[Path]
    _RanksType = click.ParamType[tuple[int, ...]]
else:
    _PathType = _RanksType = click.ParamType  # older versions of click have no type argument

LATEST = "latest"
RUNS = Path("torchaos-runs")  # where run directories go, unless --out names another folder
_MOST_FOLDERS = 20  # folders of a working directory


def remember(out: Path) -> None:
    """Notes the folder of a run that begins in the current working directory. Without a note, only `latest` suffers."""
    with suppress(OSError):
        path, known = _file(Path.cwd()), [str(one) for one in outs_of(Path.cwd())[1:]]
        text = str(out.absolute())
        if out.absolute() != RUNS.absolute() and text not in known[:1]:
            others = [one for one in known if one != text]
            write_atomically(path, "\n".join([text, *others][:_MOST_FOLDERS]) + "\n", private=True)


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


class RunFolder(_PathType):
    """A run directory; `latest`: the newest run of all folders into which runs of this working directory went;
    `OUT/latest`: the newest run in OUT."""

    name = "run directory"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(value))
        if path.name != LATEST or path.exists():
            return path
        found = latest(outs_of(Path.cwd()) if str(path) == LATEST else (path.parent,))
        click.echo(f"{path}: {_described(found)}", err=True)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        named = [CompletionItem(LATEST)] if LATEST.startswith(incomplete) else []
        return [*named, CompletionItem(incomplete, type="dir")]


def _described(run: Path) -> str:
    """The run directory, with the scenario and the folder of its job, if these can be read: runs of several jobs may
    have the same scenario's name."""
    try:
        plan = json.loads((run / "plan.json").read_bytes())
        return f"{run.absolute()} ({plan['scenario']}, job in {plan['job']['cwd']})"
    except (OSError, ValueError, KeyError, TypeError):
        return str(run.absolute())


def latest(outs: Sequence[Path] = (RUNS,)) -> Path:
    """The newest run directory in these folders. Raises UsageError if there is none."""
    plans = (path for out in outs for path in out.glob("*/plan.json"))
    runs = [path for path in plans if (path.parent / "events").is_dir()]  # an exploration has none
    if not runs:
        raise UsageError(f"{LATEST}: there is no run in {outs[0].absolute()}; name a run directory, or OUT/{LATEST}")
    return max(runs, key=lambda path: path.stat().st_mtime_ns).parent


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
    """For commands that only look: they get `json_file`, to pass to `is_told`."""
    return _OPTION(command)


def is_told(json_file: Path | None, found: Any) -> bool:
    """Writes the JSON where the user wants it. Returns whether that was standard output; then the command prints no
    text."""
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


PATH = click.Path(path_type=Path)


def _begin_anew(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Removes the file that an earlier call wrote, so that no reader mistakes it for the result of this call."""
    with suppress(OSError):
        if path and path.is_file() and b"<testsuites" in path.read_bytes()[:200]:
            path.unlink()
    return path


def _scenarios_in(context: click.Context, parameter: click.Parameter, paths: Sequence[Path]) -> list[Path]:
    from torchaos.harness.scenario.loader import KINDS, files_in

    return files_in(paths, KINDS if context.info_name == "validate" else ("scenario",))


class ScenarioFile(_PathType):
    """A scenario file, a folder of them, or the name of a ready scenario."""

    name = "scenario"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from torchaos.harness import registry  # imported here, because `torchaos --help` does not need it

        if value == "":  # as from an empty variable; it would be the current folder
            self.fail("a name is empty; give a file, a folder, or the name of a ready scenario", param, ctx)
        return value if isinstance(value, Path) else registry.find_scenario(str(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from torchaos.harness import registry

        named = [CompletionItem(name) for name in registry.scenario_names() if name.startswith(incomplete)]
        return [*named, CompletionItem(incomplete, type="file")]


class Ranks(_RanksType):
    """Ranks, as `0-3,7`."""

    name = "ranks"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", str(value)):
            self.fail(f"'{value}' names no ranks; write them as 0-3,7", param, ctx)
        if not all(ranks_in(part) for part in str(value).split(",")):
            self.fail(f"'{value}' has a range without ranks; write the smaller rank first, as 0-3", param, ctx)
        return ranks_in(str(value))


class WithCommand(Command):
    """A command that takes the user's own command line after `--`, as `given`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.params["given"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


RUN_DIRS = click.argument("folders", nargs=-1, required=True, type=RunFolder(), metavar="RUN_DIR...")
RUN_DIR = click.argument("folder", type=RunFolder(), metavar="RUN_DIR")
FILES = click.argument("files", nargs=-1, required=True, type=ScenarioFile(), callback=_scenarios_in)
JOB = click.option(
    "--job", "job_file", type=PATH, metavar="FILE", help="Take the job from this file; COMMAND does the same."
)
SEED = click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Use this seed instead of the scenario's."
)
ATTACH = click.option("--attach", type=int, metavar="PID", help="Use the torchrun that runs as PID, not job.command.")
JUNIT = click.option("--junit", "junit_file", type=PATH, callback=_begin_anew, help="Write JUnit XML here.")
JSON = json_option
AS_JSON = json_only
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print everything, not only what matters most.")
QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress, only results.")
SUMMARY = click.option("--summary", type=PATH, help="Write short Markdown here, for a pull request or a CI step.")
OTEL = click.option(
    "--otel", is_flag=True, envvar="TORCHAOS_OTEL", show_envvar=True, help="Send each run as an OpenTelemetry trace."
)
WEBHOOK = click.option(
    "--webhook", metavar="URL", envvar="TORCHAOS_WEBHOOK", show_envvar=True,
    help="Send the verdict to this address at the end, as JSON.",
)  # fmt: skip
CONSENT = click.option(
    "--consent",
    multiple=True,
    metavar="WHAT",
    help="Allow faults that may hurt the host; the scenario must allow them too.",
)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value, such as job.timeout=2m."
)
REPEAT = click.option(
    "--repeat",
    type=click.IntRange(1),
    metavar="N",
    help="Run each scenario N times, with increasing seeds; all must pass.",
)
AT_LEAST = click.option("--at-least", type=click.IntRange(1), metavar="K", help="K of the repetitions must pass.")
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
RATE = click.option("--rate", type=_SHARE, metavar="SHARE", help="The runs must show that at least this share passes.")
CONFIDENCE = click.option(
    "--confidence", type=_SHARE, metavar="SHARE", help="Confidence of the bounds of that share.  [default: 0.95]"
)


@click.group(
    cls=Commands, epilog="RUN_DIR may be `latest`: the newest run that was started in this folder.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.version_option(package_name="torchaos")
def cli() -> None:
    """Chaos engineering for distributed PyTorch training."""


Commands.command_class = Command
