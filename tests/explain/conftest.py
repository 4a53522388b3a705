"""Gives the tests the ideal trainer: a whole journal in a few lines."""

from __future__ import annotations

from ideal import trainer

__all__ = ["trainer"]
