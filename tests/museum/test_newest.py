"""lab/museum/newest.py: the bugs of the museum in the newest releases. Nothing is installed here."""

from __future__ import annotations

from collections.abc import Sequence

import environments
import museum
import newest
import pytest
import sides
from sides import Told

BUG = next(bug for bug in museum.rows() if bug.name == "litdata-217")
PACKAGE = next(iter(BUG.fixed))


class Pip:
    """A package index with two releases; nothing is installed."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def releases(self, name: str) -> list[str]:
        return ["1.0", "2.0"]

    def path_with(self, pins: dict[str, str]) -> str:
        return f"{self.path}+{pins[PACKAGE]}"


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(lists: Sequence[Sequence[str]]) -> str:
        return "beside" if any(lists) else ""

    newest.newest.cache_clear()
    monkeypatch.setattr(newest, "Packages", Pip)
    monkeypatch.setattr(environments, "made", made)


def test_a_release_with_the_bug_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest release is run beside the row's packages, and the cell says what differed."""
    asked = []

    def shown(bug: museum.Bug, side: museum.Side, packages: str) -> Told:
        asked.append(packages)
        return Told(bug.name, side, True, "entry 3 of 9")

    monkeypatch.setattr(sides, "shown", shown)
    assert newest.cells(BUG) == (f"{PACKAGE} 2.0", "**differs**: entry 3 of 9")
    assert asked == ["beside+2.0"]


def test_old_packages_that_the_release_can_not_use_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it can't be run beside the row's packages, it is run with what pip finds; the cell says what came of that."""

    def shown(bug: museum.Bug, side: museum.Side, packages: str) -> Told:
        if packages.startswith("beside"):
            raise RuntimeError("too old")
        return Told(bug.name, side, False, "")

    monkeypatch.setattr(sides, "shown", shown)
    assert newest.cells(BUG) == (f"{PACKAGE} 2.0", "right")


def test_what_can_not_be_run_says_nothing_about_the_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell has the last line of the error, and neither `right` nor `differs`."""

    def shown(bug: museum.Bug, side: museum.Side, packages: str) -> Told:
        raise RuntimeError("a long story\nno module called x")

    monkeypatch.setattr(sides, "shown", shown)
    assert newest.cells(BUG) == (f"{PACKAGE} 2.0", "could not be run: no module called x")
