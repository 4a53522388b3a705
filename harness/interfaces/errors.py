"""The errors whose text is shown to the user."""

from __future__ import annotations


class ChaosError(Exception):
    """An error whose text is meant for the user: it says where the problem is, what is wrong, and what to do. It is
    shown without a traceback."""

    exit_code = 5


class UsageError(ChaosError):
    """The command line, the scenario or the machine can't do what is asked."""

    exit_code = 3
