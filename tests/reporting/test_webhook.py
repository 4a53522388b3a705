"""A server is informed how a game day or a gate ended. No answer of the server changes a verdict."""

from __future__ import annotations

from webhooks import listening

from torchaos.harness.record.result import Verdict
from torchaos.harness.reporting.notifications import post


def test_the_server_gets_text_and_fields() -> None:
    """`text` is for a chat; the other keys are for programs. Secrets in a reason are masked, and lines are short."""
    with listening() as server:
        why = ["HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz", "x" * 900, *map(str, range(9))]
        assert post(server.url, "game day", "night\nshift", Verdict.FAILED, why, "/days/night") == ""
    (body,) = server.bodies
    lines = body["text"].splitlines()
    assert lines[0] == "❌ torchaos game day night shift: failed"
    assert len(lines) == 6
    assert max(map(len, lines)) <= 502
    assert "hf_abcdef" not in str(body)
    assert {key: body[key] for key in ("kind", "verdict", "folder")} == {
        "kind": "game day", "verdict": "failed", "folder": "/days/night",
    }  # fmt: skip


def test_what_goes_wrong_is_told_without_the_address() -> None:
    """A server that refuses, one that is not there, and an address of another kind."""
    with listening() as server:
        server.answer = 403
        assert post(server.url, "gate", "release", Verdict.PASSED, []) == "the server answered 403"
    gone = post(server.url, "gate", "release", Verdict.PASSED, [])
    assert "Error" in gone
    assert "secret-path" not in gone
    assert "http" in post("file:///etc/passwd", "gate", "release", Verdict.PASSED, [])
