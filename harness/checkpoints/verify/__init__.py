"""Checks whether a checkpoint is whole: its structure, the CRCs of its format, NaN, and the digests of a manifest.

It streams, so its memory does not grow with the checkpoint. It also reports what these checks can't see.
"""

from .checks import ALL, Verified, verify
from .manifests import Manifests

__all__ = ["ALL", "Manifests", "Verified", "verify"]
