"""Samples beyond the bound of the plan: only their sums are kept, except near faults, loads and saves."""

from __future__ import annotations

from typing import Any, Callable

NEAR, AFTER_SAVE = 64, 8  # steps, as in the agent's allowance.py
STEPS = NEAR * 3
JOB = f"""
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.arange({STEPS * 32}.0).reshape(-1, 4), torch.zeros({STEPS * 8}))
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.0)
for number, (x, y) in enumerate(DataLoader(data, batch_size=8)):
    opt.zero_grad(); (model(x).squeeze() - y).pow(2).mean().backward(); opt.step()
    if number == {NEAR + 9}:
        torch.save(model.state_dict(), "model.pt")
"""
HOOKS = ("steps", "samples", "checkpoints")


def _summed(steps: list[Any]) -> list[int]:
    return [event.step for event in steps if "sums" in event.data]


def test_sums_beyond_the_bound(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """The first steps, those after a save and those near a fault keep each sample; the sums of the others are those of
    their samples, and the record says it."""
    allowance = agent_module("agent.training.step_events")
    sums_of = allowance.sums_of
    assert (allowance.NEAR, allowance.AFTER_SAVE) == (NEAR, AFTER_SAVE)
    full = {event.step: event.data for event in rank.run(JOB, hooks=HOOKS).of("step")}
    assert len(full) == STEPS
    for path in (rank.folder / "events").iterdir():
        path.unlink()
    rank.sample_bytes = 200
    fault = NEAR * 3 + 40
    ran = rank.run(JOB, hooks=HOOKS, triggers=(rank.trigger(step=fault, pacer=7),))
    assert ran.failures == []
    after_save = range(NEAR + 11, NEAR + 11 + AFTER_SAVE)
    due = [step for step in range(NEAR + 1, fault - NEAR) if step not in after_save]
    assert _summed(ran.of("step")) == due
    for event in ran.of("step"):
        samples = bytes.fromhex("".join(full[event.step]["samples"]))
        if event.step in due:
            assert event.data["sums"] == list(sums_of(samples, full[event.step]["indices"]))
            assert event.data["samples"] is event.data["indices"] is None
        else:
            assert event.data["samples"] == full[event.step]["samples"]
    assert [f"from step {NEAR + 1} of attempt 0 on" in event.data["text"] for event in ran.of("run.note")] == [True]


def test_a_restarted_rank_goes_on_counting(rank: Any) -> None:
    """What earlier attempts wrote counts, so that a job that restarts often stays within the bound."""
    rank.sample_bytes = STEPS * 8 * 10  # exactly what one attempt writes
    first = rank.run(JOB, hooks=HOOKS)
    assert _summed(first.of("step")) == []
    second = rank.run(JOB, hooks=HOOKS, attempt=1)
    assert min(_summed(second.of("step"))) == NEAR + 1
    assert len({event.attempt for event in second.of("step") if "sums" in event.data}) == 1
