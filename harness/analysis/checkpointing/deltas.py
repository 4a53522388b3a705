"""Which checkpoints build upon which, as far as the inventory shows it: one that holds only what has changed is of no
use without those before it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.record.record import Record

_ASIDE = re.compile(r"\.(damaged|corrupt|bad|broken|old)$")


@dataclass(frozen=True)
class Deltas:
    """`links`: by the name of a checkpoint, and the attempt that saved it (None: not known), the names of all on which
    it builds."""

    links: Mapping[str, Mapping[int | None, frozenset[str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Record) -> Deltas:
        links: dict[str, dict[int | None, frozenset[str]]] = {}
        for one in checkpoints_of(run) or ():
            name = posixpath.basename(one.path)
            saved = None if _ASIDE.search(name) else one.attempt
            links.setdefault(_ASIDE.sub("", name), {})[saved] = frozenset(one.builds_on)
        return cls(links if any(named for each in links.values() for named in each.values()) else {})

    def builds(self, path: str, attempt: int, upon: str) -> bool | None:
        """Whether the checkpoint to which this path belongs, which was saved in this attempt, builds upon the one at
        `upon`. If another attempt saved it again, it was built as that one if it builds upon it. None if that is not
        known: others build upon each other."""
        if not self.links:
            return False
        name = posixpath.basename(upon)
        names = {name, posixpath.splitext(name)[0]}
        for part in (part for part in final_path(path).split("/") if part in self.links):
            known = self.links[part]
            own = [known[saved] for saved in (attempt, None) if saved in known]
            if any(names & links for links in own or known.values()):
                return True
            if own:
                return False
        return None
