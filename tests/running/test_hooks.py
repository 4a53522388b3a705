"""The agent's hooks that a plan switches on."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchaos.harness.running import planner
from torchaos.harness.scenario.loader import load

SCENARIO = """
scenario: wrong-numbers
job: {{command: torchrun --nproc-per-node 2 train.py}}
faults:
  - inject: {inject}
    target: {{rank: 1}}
    when: {{step: 20, phase: {phase}}}
    {with_}
assert: [completed]
"""


@pytest.mark.parametrize("phase", ["backward", "collective", "data"])
@pytest.mark.parametrize(
    ("inject", "with_"),
    [
        ("numeric.gradient", "with: {change: nan}"),
        ("numeric.scaled_gradient", "for: 2s"),
        ("numeric.stale_gradient", "for: 2s"),
        ("collective.delay", "with: {time: 10ms}\n    for: 2s"),
    ],
)
def test_what_an_injector_looks_at_is_on_whatever_the_phase(
    inject: str, with_: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that waits for the next collective is told of collectives, also if it lands in another phase: it had
    been applied, and nothing had come of it."""
    monkeypatch.setattr(planner, "_check_machine", lambda needs, file: None)
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.format(inject=inject, with_=with_, phase=phase))
    assert "collectives" in planner.make_plan(load(file), file, 0).hooks
