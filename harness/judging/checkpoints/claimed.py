"""Checkpoints that the job itself called whole and that are not. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from torchaos.harness.agent.wire import Kind
from torchaos.harness.judging.checkpoints.contents import Checkpoint, root_of
from torchaos.harness.judging.checkpoints.pairing import family
from torchaos.harness.record.record import Record


def claimed_whole(run: Record, ours: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Torn ones whose save failed, and to which the job gave a name of whole ones afterwards. One that was written
    under its name from the start may be known to be whole by a file that is written last, and one whose save went well
    may have been taken apart since."""
    named = {posixpath.normpath(str(event.data["to"])) for event in run.of_kind(Kind.RENAMED)}
    failed, went_well = ({save.path for save in run.history.saves if save.ok is ok} for ok in (False, True))
    suspects, whole = (named & failed) - went_well, {family(one.path) for one in ours if one.good}
    return [
        one for one in ours
        if not one.good and family(one.path) in whole and posixpath.join(root_of(run), one.path) in suspects
    ]  # fmt: skip
