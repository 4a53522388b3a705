"""Every sentence that names a cause, an agreement or a restoration of state, and the record that entitles a verdict to
it. A quantity that was not recorded is never a cause: then a verdict says what is equal, what was not seen, and in
which part of a step the cause acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Claim(NamedTuple):
    words: str  # a clause; a format string
    record: str  # what must have been recorded, in the run and in that with which it is compared


CLAIMS: Mapping[str, Claim] = {
    "accumulation": Claim(
        "gradient accumulation: the first step had {ours:g} backwards and {theirs:g} in the twin, as if the checkpoint "
        "was written in the middle of an accumulation, without its gradients",
        "the losses of each backward of the step",
    ),
    "torn": Claim(
        "{name} is of step {step}, and the job went on from there, but the weights that it began with are those after "
        "step {weights}{late}",
        "the state itself (state.begun, or check sums), the file's name, contents or save, and a counter or the "
        "samples of the next step",
    ),
    "loss scale": Claim(
        "the loss scale (GradScaler) was not restored: every loss of step {step} is exactly {factor:g} times the "
        "twin's",
        "all losses of the step",
    ),
    "data": Claim(
        "the data order: {who} given other samples in step {step}",
        "the samples of the rank, or of all ranks, in the step",
    ),
    "contents": Claim(
        "an RNG: rank {rank} was given the right samples with other contents in step {step}, as if the RNG of the "
        "augmentation was not restored",
        "the indices and the digests of the rank's samples in the step",
    ),
    "inputs": Claim(
        "{found} in step {step}, although the samples are the right ones: what prepares them was not restored",
        "the samples of the step, and the inputs of the model's forward (state.begun)",
    ),
    "other inputs": Claim("{found} in step {step}", "the inputs of the model's forward (state.begun)"),
    "weights": Claim(
        "the model's weights were not restored: {found}",
        "the parameters with which the step began, by name (state.begun), or their check sum on each rank",
    ),
    "frozen": Claim("frozen parameters were not restored: {found}", "the frozen parameters by name (state.begun)"),
    "buffers": Claim("buffers of the model were not restored: {found}", "the buffers by name (state.begun)"),
    "rng": Claim(
        "the RNG state was not restored, and the model draws from it: {found}",
        "the generators' states on that rank (state.begun), and that the forward changes them",
    ),
    "trained": Claim(
        "other parameters are trained than before: {found}",
        "the parameters that get gradients and belong to an optimizer (state.begun), in both",
    ),
    "moments": Claim(
        "the optimizer's moments were not restored: {found}",
        "the moments by name (state.begun), or their check sum on each rank",
    ),
    "optimizer counter": Claim(
        "the optimizer's state was not restored: its own step counter stood at {ours:g} after step {step}, and at "
        "{theirs:g} in the twin",
        "the optimizer's step counter in the step",
    ),
    "optimizer apart": Claim(
        "the optimizer's own step counter was {by}, in another step than the weights: it stood at {ours:g} after step "
        "{step}, and at {theirs:g} in the twin",
        "the optimizer's step counter in the step; it did not begin anew",
    ),
    "schedule": Claim(
        "the LR schedule was not restored: its own step counter stood at {ours:g} after step {step}, and at {theirs:g} "
        "in the twin",
        "the scheduler's step counter in the step",
    ),
    "rate": Claim(
        "the optimizer's learning rate was not restored, although the counter of the LR schedule was: {ours:g} instead "
        "of {theirs:g} in step {step}",
        "the learning rate and the scheduler's step counter in the first step of the attempt",
    ),
    "learning rate": Claim(
        "the learning rate was {ours:g} instead of {theirs:g} in step {step}: {story}",
        "the learning rates of the steps since the resume",
    ),
    "start": Claim(
        "the loss is nearer to that of the start than to the twin's, as if the model's weights were those of a fresh "
        "start",
        "the first loss of the job; the weights were not seen",
    ),
    "not recorded": Claim(
        "something that was not recorded acts in the {part}, since {why}",
        "the losses of the steps since the resume",
    ),
    "backwards": Claim(
        "nothing that was recorded explains why it had another number of backwards",
        "the losses of each backward of the step",
    ),
    "update": Claim(
        "something that was not recorded acts in the update, since the gradients' norms agree",
        "the losses and the gradients' norms of the step, and the parameters after it",
    ),
    "gradients": Claim(
        "something that was not recorded acts on the gradients, since in step {step} their norms differ and no loss "
        "does",
        "the losses and the gradients' norms of the step",
    ),
    "cause": Claim("Most likely cause, {where}: {causes}.{besides}", "nothing: it puts other claims together"),
    "unplaced": Claim(
        "The step from which that attempt continued is not known, and so the cause is not known either.",
        "nothing: no witness places the attempt",
    ),
    "fault or job": Claim(
        "The job had not been restarted by then: either the fault itself changed the numbers, or the job is not "
        "deterministic.",
        "the history: the first attempt made the step",
    ),
    "fault": Claim(
        "The job had not been restarted by then, and the {agreed} steps before agree: most likely the fault, or what "
        "the job did about it, changed the numbers.",
        "the history, and the losses and rates of the steps before",
    ),
    "equal": Claim("{found} equal", "each of these quantities, on all ranks that are named or on all ranks"),
    "unseen": Claim("{found} not seen", "nothing: these quantities were not recorded on these ranks"),
    "lost": Claim(
        "the {state} with which attempt {attempt} began are not those that attempt {saver} had after step {step}: "
        "{found}, over {over}",
        "the state before and after the resume, by name or as check sums of all ranks",
    ),
    "but rng": Claim(
        "the RNG states of attempt {attempt} are not as before, and the model draws from them: {found}",
        "the generators' states before and after the resume (state.begun), and that the forward changes them",
    ),
    "restored": Claim(
        "{found} are bit for bit as before",
        "the state before and after the resume, by name or as check sums of all ranks",
    ),
}  # fmt: skip


def said(claim: str, **values: object) -> str:
    """The words of a claim. Raises KeyError if it is not in the table."""
    return CLAIMS[claim].words.format(**values)
