"""Bisecting releases: of one package, and of two packages that are wrong only together; and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.minimize.package_bisect import Bisect, Passed, Pins, Range
from torchaos.harness.record.result import ExitCode

EVERY = ["1.0", "1.1", "1.2", "1.3", "1.4", "2.0"]
A, B = Range("a", EVERY), Range("b", EVERY)


def said(verdict: Callable[[Pins], Passed], *ranges: Range, samples: int = 0) -> tuple[list[str], ExitCode]:
    search = Bisect(ranges, verdict, samples)
    found = search()
    return [str(one) for one in found], search.exit_code(found)


def test_the_release_that_broke_it() -> None:
    """By its name, with the release before; the exit code is that of the newest."""
    assert said(lambda pins: pins["a"] < "1.3", A) == (
        ["the failure begins with a 1.3: a 1.2 passed, 1.3 failed"], ExitCode.FAILED,
    )  # fmt: skip


def test_a_window_between_two_good_releases() -> None:
    """It is found if the user names one of its releases, or by samples; the newest passes, so the exit code is 0. If
    neither was given, nothing is claimed."""
    both = ["the failure begins with a 1.2: a 1.1 passed, 1.2 failed",
            "the failure ends with a 1.4: a 1.3 failed, 1.4 passed"]  # fmt: skip

    def verdict(pins: Pins) -> Passed:
        return pins["a"] not in ("1.2", "1.3")

    assert said(verdict, replace(A, known=["1.3"])) == (both, ExitCode.PASSED)
    assert said(verdict, A, samples=2) == (both, ExitCode.PASSED)
    assert said(verdict, A) == ([], ExitCode.PASSED)


def test_two_packages_that_are_wrong_only_together() -> None:
    """Each is named with its own release, and with the other one."""
    assert said(lambda pins: pins["a"] < "1.2" or pins["b"] < "1.4", A, B) == (
        ["the failure begins with a 1.2: a 1.1 passed, 1.2 failed, together with b 2.0",
         "the failure begins with b 1.4: b 1.3 passed, 1.4 failed, together with a 2.0"], ExitCode.FAILED,
    )  # fmt: skip


def test_one_of_two_packages_alone() -> None:
    """The other stays at its first release."""
    assert said(lambda pins: pins["b"] < "1.4", A, B) == (
        ["the failure begins with b 1.4: b 1.3 passed, 1.4 failed, with a 1.0"], ExitCode.FAILED,
    )  # fmt: skip


def test_nothing_is_named_without_a_verdict() -> None:
    """Neither if the newest has none, nor if all between the two ends have none: exit code 2."""
    assert said(lambda pins: None if pins["a"] == "2.0" else pins["a"] < "1.2", A) == ([], ExitCode.INCONCLUSIVE)
    assert said(lambda pins: {"1.0": True, "2.0": False}.get(pins["a"]), A) == (
        ["the failure begins between two releases, and those tried between them gave no verdict: "
         "a 1.0 passed, 2.0 failed"], ExitCode.INCONCLUSIVE,
    )  # fmt: skip
    # neither package alone can be installed in its newest release: "only together" would be a guess
    assert said(lambda pins: {("1.0", "1.0"): True, ("2.0", "2.0"): False}.get((pins["a"], pins["b"])), A, B) == (
        [], ExitCode.INCONCLUSIVE,
    )  # fmt: skip


def test_no_set_is_tried_twice() -> None:
    """Also where the search for the packages and the search along their releases meet."""
    asked: list[Pins] = []

    def verdict(pins: Pins) -> Passed:
        asked.append(pins)
        return pins["a"] < "1.2" or pins["b"] < "1.4"

    said(verdict, A, B)
    assert len({tuple(sorted(pins.items())) for pins in asked}) == len(asked) <= 4 + 2 * 3


@pytest.mark.parametrize(
    ("text", "first", "last", "known"),
    [
        ("a", "1.1", "2.0", []),
        ("a=1.2..1.4", "1.2", "1.4", []),
        ("a=..1.4", "1.1", "1.4", []),
        ("a=1.2..", "1.2", "2.0", []),
        ("a=1.0", "1.0", "2.0", []),
        ("a=1.0..1.3..2.0", "1.0", "2.0", ["1.3"]),
    ],
)
def test_a_range(text: str, first: str, last: str, known: list[str]) -> None:
    """From the installed release to the newest, unless the user says otherwise."""
    found = Range.of(text, lambda name: EVERY, "1.1")
    assert (found.releases[0], found.releases[-1], found.known) == (first, last, known)


@pytest.mark.parametrize(
    ("text", "now", "words"),
    [
        ("a=1.0..1.33", None, "no release 1.33 of a for this Python; did you mean 1.3?"),
        ("a=1.0..9", None, "there are 1.0 to 2.0"),
        ("a=1.4..1.1", None, "write an older release, then a newer one"),
        ("a=1.2..1.2", None, "write an older release, then a newer one"),
        ("a=1.1..1.0..1.4", None, "others of them only between"),
        ("a", None, "a is not installed; write a=FIRST..LAST"),
        ("a", "2.0", "write an older release, then a newer one"),
    ],
)
def test_a_range_that_is_none(text: str, now: str | None, words: str) -> None:
    """The message says what to write instead."""
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        Range.of(text, lambda name: EVERY, now)
