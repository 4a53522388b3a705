"""Exceptions that the job's signal handlers raise while the agent's code runs."""

from __future__ import annotations

from typing import Any

import pytest

# Python runs a handler in the middle of any code. Here the signal comes when the agent reads the inputs of the model.
JOB = """
import os, signal, torch
class Preempted(Exception): pass
class Job:
    def leave(self, *given): raise Preempted(given[0])
    def also(self, number, frame):
        signal.signal(number, signal.SIG_IGN)
        raise Preempted(number)
signal.signal(signal.SIGUSR1, HANDLER)
class Batch(dict):
    def keys(self):
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().keys()
class Model(torch.nn.Linear):
    def forward(self, batch): return super().forward(batch["x"])
model = Model(2, 1)
try:
    model(Batch(x=torch.ones(3, 2))).sum().backward()
    print("went on")
except Preempted as error:
    print("left", error.args)
"""


@pytest.mark.parametrize("handler", ["Job().leave", "Job().also", "lambda number, frame: Job().also(number, frame)"])
def test_the_exception_of_a_handler_reaches_the_job(rank: Any, handler: str) -> None:
    """It is no error of the hook, which goes on to work."""
    ran = rank.run(JOB.replace("HANDLER", handler))
    assert ran.code == 0, ran.output
    assert "left (10,)" in ran.output
    assert ran.failures == []


def test_an_error_of_a_hook_stays_with_the_agent(rank: Any) -> None:
    """What the job's own objects raise when a hook asks them switches the hook off, and the job goes on."""
    ran = rank.run(
        JOB.replace("HANDLER", "signal.SIG_IGN").replace("return super().keys()", "raise RuntimeError('no')")
    )
    assert ran.code == 0, ran.output
    assert "went on" in ran.output
    assert [failure["hook"] for failure in ran.failures] == ["samples"]
