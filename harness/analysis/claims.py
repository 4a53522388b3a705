"""The table of all sentences that name a cause, an agreement or a restored state. For each, it says what must have been
recorded before a verdict may use it. A quantity that was not recorded is never named as a cause. Instead, the verdict
says which quantities are equal, which were not seen, and in which part of a step the cause acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Claim(NamedTuple):
    words: str  # a clause; a format string
    record: str  # what must have been recorded, in the run and in the run with which it is compared


_NAMED = "the state with which steps and saves began, by name (state.begun, checkpoint.parameters)"
_RATES = "the learning rates of the steps since the resume, and the twin's"
_SAMPLES = "the samples of the step, and of the earlier step"

CLAIMS: Mapping[str, Claim] = {
    "same end": Claim(
        "the job's last save has the twin's state, bit for bit ({found})",
        "the states of the last saves by name (checkpoint.parameters), and the check sums of the parameters after the "
        "last steps, on all ranks, in both",
    ),
    "apart": Claim(
        "the ranks held different parameters after step {step} of attempt {attempt}, and the same parameters before",
        "the check sums of the parameters on each rank, after that step and before",
    ),
    "accumulation": Claim(
        "gradient accumulation: the first step had {ours} and {theirs:g} in the twin, as if the checkpoint "
        "was written in the middle of an accumulation, without its gradients",
        "the losses of each backward of the step",
    ),
    "turn": Claim(
        "the optimizers take turns, and another one stepped than in the twin: the counter of the one that made step "
        "{step} stood at {ours:g} after it, and at {theirs:g} in the twin",
        "the optimizer's counters in this step and in all steps before",
    ),
    "turn by schedule": Claim(
        "the optimizers take turns, and another one stepped than in the twin: the LR schedule of the one that made "
        "step {step} stood at {ours:g} after it, and at {theirs:g} in the twin",
        "the counters of the LR schedules in this step and in all steps before, and its samples",
    ),
    "skips": Claim(
        "other iterations were skipped (made no optimizer step) than in the twin: in step {step} the LR schedule's "
        "counter went on by {ours:g}, and by {theirs:g} in the twin",
        "the counters of the scheduler and of the optimizer, and the samples, of this step and the one before",
    ),
    "dropped": Claim(
        "other iterations were skipped (made no optimizer step) than in the twin: {ours} before step {step}, and "
        "{theirs} in the twin",
        "how often gradients were cleared without an optimizer step before that step (dropped), and its samples",
    ),
    "skipped here": Claim(
        "the update of step {step} was skipped, as a loss scaler skips it, and not in the twin",
        "whether the loss scaler called the optimizer in that step (skipped), in both",
    ),
    "no update": Claim(
        "step {step} changed none of the parameters that the optimizer holds, and changed them in the twin",
        "the check sums of the parameters before and after the step, on all ranks, in both",
    ),
    "skipped there": Claim(
        "the update of step {step} was skipped in the twin, as a loss scaler skips it, and not in this run",
        "whether the loss scaler called the optimizer in that step (skipped), in both",
    ),
    "torn": Claim(
        "{name} is of step {step}, and the job went on from there, but the weights that it began with are those after "
        "step {weights}{late}",
        "the state itself (state.begun, or check sums), the file's name, contents or save, and a counter or the "
        "samples of the next step",
    ),
    "mixed": Claim(
        "the weights that it began with are those after step {weights}, and the optimizer's counter and the samples go "
        "on after step {step}: it loaded {names}",
        "the state itself (state.begun, or check sums), the counter, the samples of the next step, and the loads",
    ),
    "position": Claim(
        "the weights that it began with are those after step {weights}, and its samples and learning rates go on after "
        "step {step}: weights and position are {apart} apart{lost}",
        "the weights with which the attempt began, and the samples and learning rates of the next steps in both runs",
    ),
    "steps apart": Claim(
        "rank {ranks} loaded the checkpoint of step {step}, and the others that of step {base}, as their optimizers' "
        "counters confirm",
        "the loads of each rank, and the optimizer's counters, which agree",
    ),
    "files apart": Claim(
        "rank {ranks} loaded a checkpoint of step {step}, and the job went on from step {base}",
        "the loads of each rank, and the saves of these files",
    ),
    "loaded here": Claim(
        "the job loaded {name} after step {step}, and the twin did not", "the loads of both runs, and their steps"
    ),
    "loaded there": Claim(
        "the twin loaded {name} after step {step}, and the job did not", "the loads of both runs, and their steps"
    ),
    "files of others": Claim(
        " ({found})",
        "the saves and the loads of each rank, by path; no other part of the state that was recorded is another",
    ),
    "loss scale": Claim(
        "the loss scale (GradScaler) was not restored: every loss of step {step}, times its scale, is exactly "
        "{factor:g} times the twin's",
        "all losses of the step",
    ),
    "data": Claim(
        "the data: {who} given other samples in step {step}",
        "the samples of these ranks in the step",
    ),
    "data made": Claim(
        "the data, or what the job makes it from: {who} given samples in step {step} that the twin never consumed",
        "the samples of these ranks in the step, without an index or a data loader, and all samples of the twin",
    ),
    "contents": Claim(
        "the contents of the samples: {who} given the right samples with other contents in step {step}: what prepares "
        "them, such as augmentation, was not restored",
        "the indices and the digests of the samples of these ranks in the step",
    ),
    "inputs": Claim(
        "{found} in step {step}, although the samples are the right ones: what prepares them was not restored",
        "the samples of the step, and the inputs of the model's forward (state.begun)",
    ),
    "some inputs": Claim(
        "{found} in step {step}, and its other inputs are the right ones: what the job carries from step to step was "
        "not restored",
        "the inputs of the model's forward (state.begun), of all arguments",
    ),
    "other inputs": Claim("{found} in step {step}", "the inputs of the model's forward (state.begun)"),
    "weights": Claim(
        "the model's weights were not restored: {found}",
        "the parameters with which the step began, by name (state.begun), or their check sum on each rank",
    ),
    "weights of the save": Claim(
        "the model's weights after the resume: {found}",
        "the parameters with which the step and the save before the resume began, by name (state.begun, "
        "checkpoint.parameters)",
    ),
    "frozen": Claim("frozen parameters were not restored: {found}", "the frozen parameters by name (state.begun)"),
    "buffers": Claim("buffers of the model were not restored: {found}", "the buffers by name (state.begun)"),
    "buffers in forward": Claim(
        "buffers of the model were not restored, or the first forward wrote other values into them: {found}",
        "the buffers by name, read after the forward of that step (state.begun)",
    ),
    "rng": Claim(
        "the RNG state was not restored{draws}: {found}",
        "the generators' states on that rank (state.begun): those of a fresh start, or of another rank",
    ),
    "rng exchanged": Claim(
        "ranks began with the RNG state of another rank{draws}: {found}",
        "the generators' states on all of these ranks, before and after the resume (state.begun)",
    ),
    "rng other": Claim(
        "the RNG state differs{draws}: {who} began step {step} with another state of the RNG {names} than {before} "
        "(not restored, restored from another moment, or drawn from since)",
        "the generators' states on these ranks (state.begun)",
    ),
    "draws": Claim(", and the model draws from it", "that the forward changes the generators (state.begun)"),
    "trained": Claim(
        "other parameters are trained than before: {found}",
        "the parameters that get gradients and belong to an optimizer (state.begun), in both",
    ),
    "modes": Claim(
        "modules are in another mode than before: {found}",
        "the modes of the modules in the first step of the attempt (state.begun), and in the same step before",
    ),
    "moments": Claim(
        "the optimizer's {what} were not restored: {found}",
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
    "schedule apart": Claim(
        "the LR schedule's own step counter was {by}: it stood at {ours:g} after step {step}, and at {theirs:g} in the "
        "twin",
        "the scheduler's step counter in the step; it did not begin anew",
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
    "not recorded": Claim(
        "something that was not recorded{such} acts in the {part}, since {why}",
        "the losses of the steps since the resume",
    ),
    "samples first": Claim(", such as the samples{saved},", "the samples were not recorded"),
    "saved apart": Claim(
        " (in {checkpoint}, {name} is {ours} instead of {theirs})",
        "the contents of the checkpoints of both runs after the resume",
    ),
    "backwards": Claim(
        "nothing that was recorded explains why it had another number of backwards",
        "the losses of each backward of the step",
    ),
    "batch divided": Claim(
        "the samples are the twin's, and the losses of the backwards add up to the twin's within 1 %, as if the batch "
        "was divided anew: give a tolerance if the job may do that",
        "the samples of the step on all ranks, and the losses of each backward",
    ),
    "update": Claim(
        "something that was not recorded acts on the gradients after the backward, or in the update, since the norms "
        "after the backward agree and the parameters after the step do not",
        "the losses and the gradients' norms of the step, and the parameters after it",
    ),
    "acts later": Claim(
        "after step {step} an optimizer keeps other moments than in the twin, and neither the losses of that step nor "
        "the parameters after it differ: these moments act later, such as those of an outer optimizer",
        "the losses of the step, and the check sums of parameters and moments after it",
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
    "other replicas": Claim(
        "A replica had gone or come back by then; why the numbers are others is not known.",
        "the steps of each replica",
    ),
    "fault or job": Claim(
        "The job had not been restarted by then: either the fault itself changed the numbers, or the job is not "
        "deterministic.",
        "the history: the first attempt made the step",
    ),
    "fault": Claim(
        "The job had not been restarted by then, and the {what} of the {agreed} steps before agree: most likely the "
        "fault, or what the job did about it, changed the numbers.",
        "the history, and the losses and rates of the steps before",
    ),
    "equal": Claim("{found} equal", "each of these quantities, on all ranks that are named or on all ranks"),
    "unseen": Claim("{found} not seen", "nothing: these quantities were not recorded on these ranks"),
    "noisy samples": Claim(
        "the samples differ between the twins too", "the samples of these steps of two twins, on all ranks"
    ),
    "lost": Claim(
        "the {state} with which attempt {attempt} began are not those that attempt {saver} had after step {step}"
        "{sizes}: {found}",
        "the state before and after the resume, by name or as check sums of all ranks",
    ),
    "lost in the process": Claim(
        "the {state} with which the job went on after it had gone back to step {step} are not those that it had after "
        "that step{sizes}: {found}",
        "the state before and after the job went back, by name or as check sums of all ranks",
    ),
    "lost in forward": Claim(
        "after the first forward of attempt {attempt}, which went on from step {step}, the {state} are not those of "
        "attempt {saver}{sizes}: {found}. They were not restored, or that forward wrote other values into them",
        "the buffers by name, read after the forward of the same step in both attempts",
    ),
    "restored": Claim(
        "{found} are bit for bit as before",
        "the state before and after the resume, by name or as check sums of all ranks",
    ),
    "restored elsewhere": Claim(
        "{ranks} made no step, so it is not known what was restored there", "which ranks made steps"
    ),
    # What a part of the state is instead of what it should be (restored_state.py).
    "missing": Claim("are missing", _NAMED),
    "others": Claim("are others", _NAMED),
    "form": Claim("have the form {ours} instead of {due}", _NAMED),
    "fresh": Claim("are those of a fresh start", _NAMED + ", and the first state of the job"),
    "of a rank": Claim("are those of rank {rank}", _NAMED + " on both ranks"),
    "of the saver": Claim(
        "are those of rank {rank}, and were other ones on this rank before", _NAMED + " on both ranks"
    ),
    "during the save": Claim(
        "are those that were in the model during the save, and not those with which the job went on", _NAMED
    ),
    "after": Claim("are those after step {step}", _NAMED + ", or the check sums on all ranks, before it began"),
    "after later": Claim(
        "are those after step {step}, as if they were written while the training went on",
        "as above; the attempt went on from an earlier step",
    ),
    "after of trained": Claim("are the trained parameters after step {step}", _NAMED + ", before the attempt began"),
    "copy of trained": Claim("have the values of trained parameters", _NAMED + ", frozen ones and trained ones"),
    "exchanged": Claim("hold those of", _NAMED),
    "kept": Claim("{whose} were restored", _NAMED + " on these ranks, too"),
    "sums other": Claim("their check sums are others", "the check sums of all ranks before and after the resume"),
    "trained now": Claim("are trained, and were not", _NAMED),
    "trained no longer": Claim("are no longer trained", _NAMED),
    "in eval": Claim("are in eval mode, and were not", _NAMED),
    "in train": Claim("are in train mode, and were not", _NAMED),
    "trained here": Claim("are trained, and are not in the twin", _NAMED + " in both runs"),
    "trained there": Claim("are not trained, and are in the twin", _NAMED + " in both runs"),
        # Learning rates (agreement.py).
    "rate kept": Claim(
        "In that step the twin's rate changed, and the job's did not, {resumed}: most likely the schedule, or what it "
        "follows, was not restored.",
        _RATES,
    ),
    "rate constant": Claim(
        "It stays at {rate:g} {resumed}: the job no longer follows the schedule, or did not restore it.", _RATES
    ),
    "rates apart": Claim(
        "No shift of the twin's rates explains the rates {resumed}, and the counter of the LR schedule is the twin's: "
        "most likely, the optimizer's learning rate was not restored.",
        _RATES + ", and the scheduler's step counter in the first of them",
    ),
    "rates other": Claim(
        "No shift of the twin's rates explains the rates {resumed}: most likely the schedule was not restored.", _RATES
    ),
    "rates anew": Claim(
        "The rates are the twin's from step {step} on, {resumed}: the schedule was started again.", _RATES
    ),
    "rates ahead": Claim(
        "The schedule is {steps} ahead, as if it made steps while it was restored, {resumed}.", _RATES
    ),
    "rates later": Claim("The rates are those of the twin {steps} later, {resumed}.", _RATES),
    "rates behind": Claim("The schedule is {steps} behind, {resumed}.", _RATES),
    "rates one behind": Claim("The schedule is {steps} behind, as if saved before its own step, {resumed}.", _RATES),
        # Samples (sample_reasons.py).
    "samples altered": Claim(
        "{samples} in step {step} have the right indices and other contents than in {other}, {resumed}: what prepares "
        "them, such as augmentation, was not restored.",
        "the indices and the digests of the samples of the step, in both",
    ),
    "rest": Claim(
        "step {step} consumed the last {ours:g} of its {theirs:g} samples in {other}, as if the checkpoint was written "
        "in the middle of an accumulation, without its gradients.",
        _SAMPLES,
    ),
    "another part": Claim(
        "the samples that were seen in step {step} are not those of the twin, and its losses are, bit for bit: "
        "most likely, they are the inputs of another part of the model",
        "the samples of the step, of which no data loader gave any, and all its losses, in both",
    ),
    "data rewound": Claim("the data was rewound", _SAMPLES),
    "data anew": Claim("the data starts over", _SAMPLES),
    "sampler anew": Claim(
        "the data starts over: most likely the sampler restarted, or the RNG that draws the batches",
        _SAMPLES + ", with the indices that the sampler drew",
    ),
        # Parameters (parameters.py).
    "bits restored": Claim(
        "each resume restored exactly the bits that were saved", "the sketches of each rank before and after a resume"
    ),
    "inexact": Claim(
        "the parameters that rank {rank} began attempt {attempt} with are {off:.1g} of their norm from those that it "
        "had after step {step}{why}",
        "the sketches of the rank before and after the resume",
    ),
    "not exact": Claim(
        ", which the checkpoint should hold to the last bit: they were not restored exactly",
        "as above; the rank is not known to have resumed from another step",
    ),
    "fault alone": Claim(
        "The losses agree, and the job had not been restarted by then: most likely the fault itself changed them.",
        "the losses of the steps, and the history",
    ),
    "fault unseen": Claim(
        "The losses were not seen, and the job had not been restarted by then: most likely the fault itself changed "
        "them.",
        "the history",
    ),
    "fault changed": Claim("the fault itself changed the parameters", "as above"),
    "fault on a rank": Claim(
        "The job had not been restarted by then: most likely the fault itself changed the parameters of a rank.",
        "the history",
    ),
    "apart by state": Claim("The state was not restored: {found}.", _NAMED),
    "apart by gradients": Claim(
        "The norms of their gradients differ too, although DDP makes them equal: the gradients are no longer averaged.",
        "the gradients' norms on all ranks",
    ),
    "apart by loads": Claim(
        "They began step {step} with different parameters: not all ranks loaded the same.",
        "the parameters with which all ranks began the step",
    ),
    "apart in the update": Claim(
        "Their gradients' norms after the backward are equal: what differs after it was not recorded.",
        "the gradients' norms on all ranks",
    ),
    "apart unseen": Claim(
        "They began with the parameters and moments that were saved: what else differs was not recorded.",
        "the parameters and moments before and after the resume",
    ),
    "apart unknown": Claim("Their gradients were not seen, and so the cause is not known.", "nothing"),
    # Checkpoints and ends.
    "losses agree": Claim("The losses agree", "the losses of both runs"),
    "losses near": Claim("The losses differ no more than noise or rounding explains", "the losses of both runs"),
    "decides saves": Claim(
        "{agree}: most likely, state that was not restored decides what is saved.", "the checkpoints of both runs"
    ),
    "saved and removed": Claim(
        "attempt {saved} had saved it, and attempt {attempt} removed it",
        "the save, and the removal of its file or folder (checkpoint.removed)",
    ),
    "decides end": Claim(
        "state that was not restored decides when the job stops, such as a count of steps, or of bad validations",
        "the losses of both runs, exit code 0 of both, and that no fault hit the job after it had resumed",
    ),
    "agree until": Claim("{agree} in the {steps} that both made: most likely, {why}.", "as above"),
    "no loss shows": Claim(
        "{agree}: it is state that no loss shows, or it was damaged on disk.{hint}", "the checkpoints of both runs"
    ),
    "wrong checkpoint": Claim(
        "It loaded {name}: most likely it chose the wrong checkpoint as the newest.{other}", "the load, and the saves"
    ),
    "work lost": Claim(
        "attempt {attempt} went on from step {step}, but with the weights after step {weights}: what {lost} had "
        "changed in them was lost",
        "the state itself (state.begun, or check sums), and the witnesses of the step",
    ),
    "no load": Claim(
        "It is there at the end, and no load of a checkpoint was seen: most likely the job did not find it, or could "
        "not load it.",
        "that the attempt began from the start, that loads can be seen, and the inventory of the checkpoints",
    ),
    "waits for ever": Claim(
        "Most likely a thread that is no daemon, or a child process, waits for ever.",
        "that all steps were done and the processes are still there",
    ),
}  # fmt: skip


def said(claim: str, **values: object) -> str:
    """The words of a claim. Raises KeyError if it is not in the table."""
    return CLAIMS[claim].words.format(**values)
