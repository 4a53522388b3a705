"""The table of all sentences that name a cause, an agreement or a restoration."""

from __future__ import annotations

import re
from pathlib import Path

from torchaos.harness.judging.claims import CLAIMS

ROOT = Path(__file__).parents[2]


def test_each_claim_is_used_and_each_use_is_in_the_table() -> None:
    """A sentence that nobody says has no place in it."""
    sources = [ROOT / "harness/judging/twins/causes.py", ROOT / "assertions/state_restored.py"]
    text = "\n".join(source.read_text() for source in sources)
    assert {claim for claim in CLAIMS if f'"{claim}"' in text} == set(CLAIMS)
    assert set(re.findall(r"\bsaid\(\s*\"([a-z ]+)\"", text)) <= set(CLAIMS)
    assert all(claim.record for claim in CLAIMS.values())


def test_no_cause_is_named_outside_of_the_table() -> None:
    """What was not restored, and what is most likely, is said by the table alone."""
    text = (ROOT / "harness/judging/twins/causes.py").read_text()
    body = text.partition("class _Resumed")[2]
    assert "not restored" not in body
    assert "RNG state was" not in body
