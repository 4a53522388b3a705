from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.record.redaction import mask, mask_env
from torchaos.harness.reporting.terminal import text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"), ("a\r\nb", "a\nb"), ("\x1b[31m", "\\x1b[31m"), ("\ud800", "\\ud800"),
        ("\u202eevil", "\\u202eevil"),
    ],
)  # fmt: skip
def test_harmful_characters_are_escaped(raw: str, shown: str) -> None:
    """Controls, lone surrogates and marks that turn the writing are shown as escapes; tabs and line ends stay."""
    assert text.printable(raw) == shown


@given(st.text(), st.integers(0, 200))
def test_shortened_keeps_to_its_limit(raw: str, limit: int) -> None:
    """A text is never longer than its limit, and left alone where it fits."""
    found = text.shortened(raw, limit)
    assert len(found) <= limit
    assert len(raw) > limit or found == raw


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "wandb_api_key", "PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS"]
)
def test_secrets_are_masked(name: str) -> None:
    """Values of variables whose names look like secrets are never shown."""
    assert mask_env({name: "abc", "OMP_NUM_THREADS": "1"}) == {name: "***", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("HF_TOKEN=abc torchrun train.py", "HF_TOKEN=*** torchrun train.py"),
        ("torchaos run a.yaml --set job.env.HF_TOKEN='a b'", "torchaos run a.yaml --set job.env.HF_TOKEN=***"),
        (
            "TOKENIZERS_PARALLELISM=false train.py --max-tokens=5",
            "TOKENIZERS_PARALLELISM=false train.py --max-tokens=5",
        ),
    ],
)
def test_secrets_in_commands_are_masked(command: str, shown: str) -> None:
    """An assignment to a secret is masked wherever it stands in a command; other words stay."""
    assert mask(command) == shown


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gap_s", 3.14159, "3.14 s"), ("gap_s", 60.0, "60 s"), ("gap_s", 0.01234, "0.01234 s"),
        ("x", None, "not seen"), ("x", True, "yes"), ("x", float("nan"), "nan"),
        ("x", 1e-7, "1.000e-07"), ("x", [1, 2], "1, 2"), ("x", list(range(9)), "0, 1, 2, 3, 4, 5 and 3 more"),
        ("x", {"a_b": 1}, "{a b 1}"),
    ],
)  # fmt: skip
def test_values_are_short(name: str, value: object, words: str) -> None:
    """Measured values of every shape become short words on one line."""
    assert text.value_in_words(name, value) == words
