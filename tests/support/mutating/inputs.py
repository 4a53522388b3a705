"""The valid inputs that are damaged: the repository's scenarios, and a recorded run with its twin."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from malformed import CASES
from malformed import GOOD as GOOD

REPOSITORY = Path(__file__).parents[3]
CORPUS = REPOSITORY / "tests" / "fuzz" / "corpus"
RUN = CORPUS / "run"


@cache
def scenarios() -> tuple[bytes, ...]:
    ours = [path.read_bytes() for path in sorted((REPOSITORY / "scenarios").rglob("*.yaml"))]
    wrong = [(GOOD.replace(case.old, case.new, 1) if case.old else case.new).encode() for case in CASES]
    return (*regressions("scenario"), *ours, GOOD.encode(), *wrong)


def regressions(target: str) -> tuple[bytes, ...]:
    """Inputs that did harm once."""
    return tuple(path.read_bytes() for path in sorted((CORPUS / target).glob("*")))
