"""Checks whether a checkpoint is complete and undamaged: its structure, the CRCs of its format, NaN, and the digests of
a manifest.

Data is streamed, so the memory does not grow with the checkpoint. Parts that these checks can't cover are reported."""

from .all_checks import ALL, Verified, verify
from .manifests import Manifests

__all__ = ["ALL", "Manifests", "Verified", "verify"]
