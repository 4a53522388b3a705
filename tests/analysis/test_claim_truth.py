"""Whether what a verdict says is true, of simulated trainers whose truth is known (tests/support/worlds.py)."""

from __future__ import annotations

import claim_truth
import pytest
import worlds


@pytest.mark.slow
def test_no_cause_is_a_part_that_was_restored() -> None:
    """With one or two defects, of what is recorded and of what is not, and whatever a step does beside it: no sentence
    names a part that was restored, and none calls a part equal that was not (lab/campaigns/worlds.py draws others)."""
    false, failed = list[str](), 0
    for number in range(7_300_010, 7_300_036):
        world = worlds.composed(number)
        text = worlds.failures(world)
        failed += bool(text)
        false += [f"{number}: {claim}" for claim in claim_truth.false_claims(text, *worlds.truth(world))]
    assert false == []
    assert failed > 15


@pytest.mark.parametrize(("text", "false"), [
    ("Most likely cause: the model's weights were not restored: x", []),
    ("Besides, the optimizer's moments were not restored: x", ["moments"]),
    ("In the attempt, samples, weights at the start and buffers are equal; x", ["equal"]),
    ("parameters and buffers are bit for bit as before", ["equal"]),
    ("something that was not recorded acts in the forward or in the loss, since x", ["not recorded"]),
    ("the data was rewound", ["data rewound"]),
])  # fmt: skip
def test_a_false_claim_is_seen(text: str, false: list[str]) -> None:
    """Of a resume that lost the weights, all of which was recorded."""
    told = claim_truth.false_claims(text, "named", {"weights"})
    assert [each.partition(":")[0] for each in told] == false


@pytest.mark.parametrize(("number", "told"), [
    (7_100_140, "moments"),  # samples that the job makes from its weights follow from them
    (7_200_102, "weights"),  # where the attempt went on shows only beside the twin
    (7_100_093, "something that was not recorded"),  # the job changes its weights after each step
])  # fmt: skip
def test_causes_that_were_false(number: int, told: str) -> None:
    """Each of these verdicts once named another cause."""
    world = worlds.composed(number)
    text = worlds.failures(world)
    assert told in text
    assert [*claim_truth.false_claims(text, *worlds.truth(world))] == []
