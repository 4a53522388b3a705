"""Generates the reference of the documentation from the code. In: classes, docstrings and comments. Out: pages in
Markdown, one function for each. The pages are not kept in the repository, so they are never out of date."""

from __future__ import annotations

from collections.abc import Callable

from . import commands, events, grammar, known_failures, nvml, plugins

PAGES: dict[str, Callable[[], str]] = {
    "reference/scenario.md": grammar.scenario,
    "reference/gameday.md": grammar.gameday,
    "reference/injectors.md": plugins.injectors,
    "reference/assertions.md": plugins.assertions,
    "reference/conditions.md": plugins.conditions,
    "reference/events.md": events.events,
    "reference/cli.md": commands.commands,
    "reference/exit-codes.md": commands.exit_codes,
    "reference/nvml.md": nvml.functions,
    "reference/known-failures.md": known_failures.known_failures,
}
