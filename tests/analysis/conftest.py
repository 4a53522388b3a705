"""Gives the tests the ideal trainer of the assertions' tests."""

from ideal import trainer

__all__ = ["trainer"]
