"""Statements of README and docs about commands, files and versions are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchaos.harness.record.result import ExitCode

from .conftest import PAGES, REPOSITORY, Torchaos

README = (REPOSITORY / "README.md").read_text()


def heading(line: str) -> str:
    """The anchor that a forge gives to a heading."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("# ").strip().lower()).replace(" ", "-")


LINKED = [*PAGES, *sorted((REPOSITORY / "lab" / "results").glob("*.md"))]


@pytest.mark.parametrize("page", LINKED, ids=[str(page.relative_to(REPOSITORY)) for page in LINKED])
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is to a file that is there, and to a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            lines = [line for line in file.read_text().splitlines() if line.startswith("#")]
            assert anchor in map(heading, lines), target


@pytest.mark.parametrize("command", ["list", "doctor", "schema", "--version"])
def test_harmless_commands_run(torchaos: Torchaos, command: str) -> None:
    """Those that only tell something can be tried at once, and leave nothing behind."""
    done = torchaos(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def test_the_exit_codes_are_all_there() -> None:
    """The README names each exit code."""
    told = README.partition("Exit codes: ")[2].partition("\n\n")[0]
    assert [int(code) for code in re.findall(r"\b(\d) ", told)] == sorted(ExitCode)


def test_the_readme_is_read_to_its_end() -> None:
    """It has no more lines than a reader scrolls through."""
    assert len(README.splitlines()) <= 110


def test_the_promised_versions_are_those_that_ci_runs() -> None:
    """The oldest and the newest Python and torch in the README are the pairs in ci/agent-versions."""
    pairs = [path.stem.split("-") for path in sorted((REPOSITORY / "ci" / "agent-versions").glob("*.txt"))]
    assert len(pairs) == 2
    promised = " to ".join(f"Python {python} with torch {torch}" for python, torch in pairs)
    assert promised in README


def test_the_picture_is_small_and_needs_no_network() -> None:
    """The report's picture weighs less than 150 KB and loads nothing from elsewhere."""
    picture = REPOSITORY / "docs" / "img" / "report.svg"
    text = picture.read_text()
    assert len(text) < 150_000
    assert "FAILED" in text
    assert "url(http" not in text
    assert "@import" not in text


def test_what_shows_a_promise_exists() -> None:
    """Each test, file and command that docs/promises.md names is there."""
    named = re.findall(r"`((?:tests|ci)/[\w/]+\.py)(?:::(\w+))?`", (REPOSITORY / "docs" / "promises.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / file).read_text() if test else (REPOSITORY / file).is_file(), (
            file,
            test,
        )


def test_what_a_measured_page_names_exists() -> None:
    """Each raw table, script and reproduction that a page of measurements names is there."""
    named = {
        (page.name, found)
        for page in sorted((REPOSITORY / "docs" / "measured").glob("*.md"))
        for found in re.findall(r"(?<![\w/])(?:lab|tests)/[\w/.-]+\w", page.read_text())
    }
    lost = (REPOSITORY / "docs" / "measured" / "what-trainers-lose.md").read_text()
    named |= {("what-trainers-lose.md", f"lab/reproductions/{name}") for name in re.findall(r"\| `(\w+\.py)` \|", lost)}
    assert len(named) > 60
    assert [one for one in sorted(named) if not (REPOSITORY / one[1]).exists()] == []
