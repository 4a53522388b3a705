"""The tiers of tests: `make test`, `make test-all` and `make test-long`, each chosen by an expression of markers in the
Makefile."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from _pytest.mark.expression import Expression

from ..conftest import dealt
from .conftest import REPOSITORY

MAKEFILE = (REPOSITORY / "Makefile").read_text()
MARKS = ("job", "smoke", "system", "slow", "long")
SETS = [
    {name for name, here in zip(MARKS, chosen, strict=True) if here}
    for chosen in product((False, True), repeat=len(MARKS))
]


def expressions() -> dict[str, list[str]]:
    """What each target that runs tests gives to pytest with -m, one for each call."""
    values = dict(re.findall(r"^(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
    rules = re.findall(r"^(test[a-z-]*):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    told = {name: re.findall(r"\$\(PYTEST\) -m \"(.*?)\"", recipe) for name, recipe in rules}
    return {name: [re.sub(r"\$\((\w+)\)", lambda one: values[one[1]], text) for text in told[name]] for name in told}


def chosen(name: str, marks: set[str]) -> int:
    """How many calls of a target run a test with these marks."""

    def matches(one: str, /, **_: str | int | bool | None) -> bool:
        return one in marks

    return sum(Expression.compile(text).evaluate(matches) for text in expressions()[name])


@pytest.mark.parametrize("marks", SETS, ids=lambda marks: "+".join(sorted(marks)) or "none")
def test_each_test_is_in_one_tier(marks: set[str]) -> None:
    """Whatever its marks, one call of one of the three runs it. The fast ones are of `make test`, too."""
    assert chosen("test", marks) + chosen("test-all", marks) + chosen("test-long", marks) == 1
    assert chosen("test-fast", marks) <= chosen("test", marks)


def test_no_target_leaves_out_a_folder() -> None:
    """Only `make test-fast` names folders; the others collect all of tests/."""
    calls = re.findall(r'^\t@\$\(PYTEST\) -m "[^"]*"(.*)$', MAKEFILE, re.MULTILINE)
    assert len(calls) == 4
    assert [more for more in calls if re.search(r"tests/|FAST|--ignore|--deselect|-k ", more)] == [
        " --numprocesses 2 --dist worksteal $(FAST)"
    ]


def test_what_needs_the_system_is_not_of_make_test(request: pytest.FixtureRequest) -> None:
    """A fixture or a need decides that, so that nobody has to remember it; a part that is missing is named."""
    with_fixture = SimpleNamespace(fixturenames=["tmp_path", "links"], get_closest_marker=lambda _: None)
    assert needs.of_the_system(with_fixture)  # type: ignore[arg-type]
    assert not needs.of_the_system(request.node)
    request.node.add_marker(pytest.mark.needs("no-such-program"))
    assert needs.of_the_system(request.node)
    assert needs.lacking("proc", "no-such-program") == "needs the program no-such-program"


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_each_worker_begins_with_its_share_of_the_jobs(workers: int) -> None:
    """With --dist worksteal, xdist cuts the tests into as many parts as there are workers, in order: the first gets a
    part of all, the second a part of the rest, and so on. No test is lost, each part begins with its jobs, and those of
    one file are in one part."""
    items: list[Any] = [
        SimpleNamespace(number=number, path=Path(str(number // 2)), get_closest_marker=lambda _, job=number < 14: job)
        for number in range(50)
    ]
    order: list[Any] = [*dealt(items, workers)]
    assert sorted(item.number for item in order) == list(range(50))
    rest, parts = order, []
    for left in range(workers, 0, -1):
        part, rest = rest[: len(rest) // left], rest[len(rest) // left :]
        parts.append([item.path for item in part if item.number < 14])
        assert [item.path for item in part[: len(parts[-1])]] == parts[-1]
    assert sum(len(set(part)) for part in parts) == 7
    assert max(map(len, parts)) - min(map(len, parts)) <= 2
