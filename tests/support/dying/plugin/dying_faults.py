"""An injector as another package would bring it. It changes files in the checkpoint folder, so that File handles are
tested by deaths too."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from torchaos.harness.base_classes import Fault

if TYPE_CHECKING:
    from torchaos.harness.interfaces import Handle

MADE = b"put there by the fault"


@dataclass(frozen=True)
class Damage(Fault):
    """In `folder`: flips a byte of `flipped`, removes `removed`, replaces `replaced`, and adds `added`."""

    folder: str

    name: ClassVar[str] = "dying.damage"
    where: ClassVar[Any] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset()

    def changes(self, site: Any) -> Sequence[Handle]:
        from torchaos.harness.rollback.file_handles import File

        root, made = Path(self.folder), hashlib.sha256(MADE).hexdigest()
        copies = site.undo_copies
        plain = [File.of(root / name, root, copies) for name in ("flipped", "removed")]
        return plain + [File.of(root / name, root, copies, made) for name in ("replaced", "added")]

    def apply(self, site: Any) -> None:
        root = Path(self.folder)
        with open(root / "flipped", "r+b") as file:
            file.write(b"F")
        (root / "removed").unlink()
        new = root.parent / "new"
        new.write_bytes(MADE)
        new.rename(root / "replaced")
        (root / "added").write_bytes(MADE)

    def felt(self, record: Any, fault: str) -> Any:
        return None
