"""Says whether a checkpoint is whole: its structure, the CRCs that its format keeps, NaN, a manifest's digests.

It streams: what it holds at once does not grow with the checkpoint. What the checks can't see is said, too.
"""

from .checks import ALL, Verified, verify
from .manifests import Manifests

__all__ = ["ALL", "Manifests", "Verified", "verify"]
