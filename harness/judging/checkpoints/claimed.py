"""Finds checkpoints that the job itself declared complete although they are not."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from torchaos.harness.agent.wire import Kind
from torchaos.harness.judging.checkpoints.contents import Checkpoint, root_of
from torchaos.harness.judging.checkpoints.pairing import family
from torchaos.harness.record.record import Record


def claimed_whole(run: Record, ours: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints that are damaged, whose save failed, and that the job then renamed to the usual name of a complete
    checkpoint. A checkpoint that had its final name from the start is not reported, because the job may write a further
    file last to show that it is complete. A checkpoint whose save succeeded is not reported either, because it may have
    been damaged later."""
    named = {posixpath.normpath(str(event.data["to"])) for event in run.of_kind(Kind.RENAMED)}
    failed, went_well = ({save.path for save in run.history.saves if save.ok is ok} for ok in (False, True))
    suspects, whole = (named & failed) - went_well, {family(checkpoint.path) for checkpoint in ours if checkpoint.good}
    return [
        checkpoint
        for checkpoint in ours
        if not checkpoint.good and family(checkpoint.path) in whole
        if posixpath.join(root_of(run), checkpoint.path) in suspects
    ]
