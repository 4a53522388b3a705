"""The step counter on scripted calls: `b` is a backward, `A` a step of optimizer A, `.` the end of an iteration."""

from __future__ import annotations

from typing import Any, Callable

import pytest


@pytest.fixture
def play(agent_module: Callable[[str], Any]) -> Callable[..., str]:
    """Plays a script and puts `.` where an iteration is over; `made` lists the optimizers that exist beforehand.
    `(` and `)` enclose a backward with steps in it; `[A` and `A]` a step with calls in it; `!` a failing backward."""

    def run(script: str, made: str = "A", uneven: bool = False) -> str:
        counter = agent_module("agent.training.step_counter").StepCounter()
        counter.uneven = uneven
        for key in made:
            counter.made(key)
        said = ""
        for token in script.split():
            closed = agent_module("agent.training.step_counter").NOTHING
            if token in ("b", "!"):
                counter.backward_begin()
                closed = counter.backward_end(ok=token == "b")
            elif token == "(":
                counter.backward_begin()
            elif token == ")":
                closed = counter.backward_end()
            elif token.startswith("["):
                counter.step_begin(token[1:])
            elif token.endswith("]"):
                closed = counter.step_end(token[:-1])
            elif token == "gone":
                counter.gone("B")
            elif token == "0":
                said += "x" if counter.dropped("A") else ""
            else:
                counter.step_begin(token)
                closed = counter.step_end(token)
            said += "." if closed.before else ""
            said += token.strip("[]") if closed.segment else token.lower() if token == "b" else ""
            said += "." if closed.after else ""
        return said + ("," if counter.finish().after else "")

    return run


def test_one_optimizer(play: Callable[..., str]) -> None:
    """With one optimizer each step that had a backward is an iteration, at once; several backwards may lead to it."""
    assert play("b A b A") == "bA.bA."
    assert play("b b b A b b b A") == "bbbA.bbbA."


def test_gan(play: Callable[..., str]) -> None:
    """Two optimizers with a backward each: an iteration is over when both have stepped, the first one too."""
    assert play("b A b B b A b B b A b B", "AB") == "bAbB.bAbB.bAbB."


def test_two_optimizers_one_backward(play: Callable[..., str]) -> None:
    """A further optimizer without a backward of its own belongs to the same iteration."""
    assert play("b A B b A B b A B", "AB") == "bAB.bAB.bAB."


def test_unequally_often(play: Callable[..., str]) -> None:
    """Three steps of a critic for each of a generator: each is an iteration, and so wherever one begins."""
    assert play("b A b A b A b B b A b A b A b B", "AB") == "bAb.A.bA.bB.bA.bA.bA.bB."
    assert play("b A b B b A b A b A b B b A", "AB") == "bAbB.bAb.A.bA.bB.bA."
    assert play("b A b B b A b A b A b B b A", "AB", uneven=True) == "bA.bB.bA.bA.bA.bB.bA."
    assert play("b B b A b A b A b B b A", "AB", uneven=True) == "bB.bA.bA.bA.bB.bA."


def test_unequally_often_with_two_optimizers_each(play: Callable[..., str]) -> None:
    """What follows without a backward of its own is part of the iteration, also where they step unequally often."""
    assert play("b A C b A C b B b A C b A C b B", "ABC") == "bACb.AC.bB.bAC.bAC.bB."


def test_outer_optimizer(play: Callable[..., str]) -> None:
    """One that steps now and then after several iterations, without a backward (DiLoCo's), is waited for by none."""
    assert play("b A b A B b A b A B b A b A B", "AB") == "bAb.A.bA.bA.bA.bA."


def test_last_iteration_that_waits(play: Callable[..., str]) -> None:
    """An iteration that waited for another optimizer, and was followed by nothing, is over when the job is."""
    assert play("b A", "AB") == "bA,"


def test_idle_optimizer(play: Callable[..., str]) -> None:
    """An optimizer that exists and never steps costs one late iteration, no more."""
    assert play("b A b A b A", "AB") == "bAb.A.bA."


def test_optimizer_that_went_away(play: Callable[..., str]) -> None:
    """An optimizer that is gone is waited for no more."""
    assert play("b A b B b A b B gone b A b A", "AB") == "bAbB.bAbB.bA.bA."


def test_backward_that_failed(play: Callable[..., str]) -> None:
    """A backward that raised gave no gradient: the step after it is of no iteration of its own."""
    assert play("b A ! A b A", "A") == "bA.bA."


def test_step_that_raised(play: Callable[..., str]) -> None:
    """A step that never ended (it raised, and the job went on) does not swallow the later ones."""
    assert play("b A b [A b A b A", "A") == "bA.bbA.bA."


def test_wrapped_optimizer(play: Callable[..., str]) -> None:
    """Of an optimizer inside another (ZeRO) the outer one counts."""
    assert play("b [A B A] b [A B A] b [A B A]", "AB") == "bA.bA.bA."


def test_optimizer_in_backward(play: Callable[..., str]) -> None:
    """Optimizers that step inside the backward, one per parameter, make one iteration at its end."""
    assert play("( A B C ) ( A B C )", "ABC") == ").)."


def test_lbfgs(play: Callable[..., str]) -> None:
    """Backwards inside the step (LBFGS' closure) belong to it."""
    assert play("[A b b b A] [A b b A]", "A") == "bbbA.bbA."


def test_no_backward_at_all(play: Callable[..., str]) -> None:
    """Where no backward can be seen, steps of the first optimizer are iterations."""
    assert play("A B A B", "AB") == "A.A."


def test_same_optimizer_in_pieces(play: Callable[..., str]) -> None:
    """One optimizer called several times after a backward (DeepSpeed, by group) makes one iteration."""
    assert play("b A A A b A A A", "A") == "bA.bA."


def test_gradients_that_were_thrown_away(play: Callable[..., str]) -> None:
    """`0` sets A's gradients to zero: a backward before it came to nothing (`x`), unless a step followed it, it is part
    of a step, or another optimizer may have wanted it."""
    assert play("0 b 0 b A 0 b A") == "bxbA.bA."
    assert play("[A 0 b A] 0 [A 0 b A]") == "bA.bA."
    assert play("b 0 b A B b A b B", "AB") == "bbAB.bAbB."
