"""Slurm, asked through its own programs with the rights of the user."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

ASK_S = 20.0
_UNKNOWN = "Invalid job id"  # its answer for a job that ended some time ago


def ask(argv: Sequence[str], timeout_s: float = ASK_S, given: str = "") -> str:
    """The output of one of Slurm's programs. Empty if it does not know the job any more. Raises OSError if the program
    fails, TimeoutError if it does not answer."""
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{argv[0]} has not answered for {timeout_s:g} s") from error
    if done.returncode and _UNKNOWN not in done.stderr:
        raise OSError(f"{argv[0]}: {done.stderr.strip()[-300:] or f'exit code {done.returncode}'}")
    return "" if done.returncode else done.stdout


def about_job(job: str) -> Mapping[str, str]:
    """What Slurm says of a job, such as JobState, Restarts and NodeList. Empty if it has forgotten the job. Raises
    OSError."""
    return dict(re.findall(r"(\w+)=(\S*)", ask(["scontrol", "--oneliner", "show", "job", job])))


def hosts_of(names: str) -> list[str]:
    """The hosts of a list such as n[1-4], sorted by name as text, because torchelastic numbers the nodes in that order
    too. Raises OSError."""
    return sorted(ask(["scontrol", "show", "hostnames", names]).split()) if names else []


def about_node(host: str) -> tuple[str, str]:
    """The state of a node, such as idle, down* or draining, and the reason that was given for it, or an empty text.
    Raises OSError."""
    lines = ask(["sinfo", "--noheader", f"--nodes={host}", "--format=%T|%E"]).splitlines()
    if not lines:
        raise OSError(f"Slurm knows no node {host}")
    state, _, reason = lines[0].partition("|")
    return state, "" if reason == "none" else reason
