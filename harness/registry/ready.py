"""The scenarios that come with torchaos, by name: `process/kill-rank` is scenarios/process/kill-rank.yaml."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from torchaos.harness.interfaces import UsageError

_GAME_DAYS = "gamedays"
# The scenarios to start with: they need nothing but torchrun, and find the most frequent defects.
FIRST = (
    "process/kill-rank", "process/kill-during-save", "process/freeze-rank", "checkpoint/truncated-checkpoint",
    "checkpoint/flipped-bits",
)  # fmt: skip


def folder() -> Path:
    return Path(str(files("torchaos.scenarios")))


def names() -> list[str]:
    """The names of all ready scenarios, without game days."""
    found = (path.relative_to(folder()) for path in folder().glob("*/*.yaml"))
    return sorted(str(path.with_suffix("")) for path in found if path.parts[0] != _GAME_DAYS)


def found(text: str) -> Path:
    """The scenario file: `text` as a path if that file exists, or else the ready scenario of that name. Raises
    UsageError if there is neither."""
    path = Path(text)
    if path.exists() or path.suffix or text in ("", ".", ".."):
        return path
    ready = folder() / f"{text}.yaml"
    if ready.is_file() and ready.resolve().is_relative_to(folder().resolve()):
        return ready
    alike = [name for name in names() if name.endswith(f"/{text}")] or get_close_matches(text, names(), 2)
    hint = f"did you mean {' or '.join(alike)}?" if alike else "`torchaos list scenarios` shows the ready ones"
    raise UsageError(f"{text}: there is no such file, and no ready scenario of this name; {hint}")


def shown(path: Path) -> str:
    """How a scenario is called in messages: the name of a ready scenario, or the path of another file."""
    try:
        return str(path.relative_to(folder()).with_suffix(""))
    except ValueError:
        return str(path)
