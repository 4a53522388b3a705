"""Runs kubectl. The user's own kubeconfig, credentials and proxies are used."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_ASK_S = 30.0
_MOST_WORDS = 600  # characters


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl. `context` and `namespace`: if empty, those of the user's kubeconfig."""

    context: str = ""
    namespace: str = ""

    def argv(self, *words: str) -> list[str]:
        where = {"--context": self.context, "--namespace": self.namespace}
        return ["kubectl", *(f"{option}={value}" for option, value in where.items() if value), *words]

    def ask(self, *words: str, given: bytes = b"", timeout_s: float = _ASK_S) -> str:
        """The output of kubectl. `given`: its standard input. Raises OSError with its last words if it fails, and
        TimeoutError if it does not answer in time."""
        return self.said(self.argv(*words), given, timeout_s)

    def may(self, verb: str, resource: str) -> bool:
        """Whether the user has the right to `verb` this resource. Raises OSError if the cluster does not answer."""
        try:
            return self.ask("auth", "can-i", verb, resource).split()[:1] == ["yes"]
        except _Refused as error:
            if error.printed.split()[:1] == ["no"]:
                return False
            raise

    @staticmethod
    def said(argv: Sequence[str], given: bytes, timeout_s: float) -> str:
        """Like `ask`, for a complete command line."""
        done = _run(argv, given, timeout_s)
        printed = done.stdout.decode(errors="replace")
        if done.returncode:
            words = _last_words(done.stderr.decode(errors="replace"))
            raise _Refused(f"kubectl: {words or f'exit code {done.returncode}'}", printed)
        return printed

    @staticmethod
    def outcome(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """The exit code of a complete command line, and all its output. Raises TimeoutError."""
        done = _run(argv, b"", timeout_s)
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace").strip()


def _last_words(said: str) -> str:
    """The last whole lines that kubectl says to its user, without those of its own log, such as `E0131 13:52 ...`."""
    lines = [line.strip() for line in said.splitlines() if not re.match(r"[EIWF]\d{4} |Warning: ", line)]
    while len(lines) > 1 and len(" ".join(lines)) > _MOST_WORDS:
        lines.pop(0)
    return " ".join(lines).strip()[:_MOST_WORDS]


def _run(argv: Sequence[str], given: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(argv, input=given, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"kubectl has not answered for {timeout_s:g} s: {' '.join(argv[1:6])}") from error


class _Refused(OSError):
    """kubectl ended with an error. `printed`: its standard output."""

    def __init__(self, text: str, printed: str) -> None:
        super().__init__(text)
        self.printed = printed
