"""Secrets are kept out of plans, journals and reports, but the job gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record import redaction
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan, PlannedJob

TOKEN = "q7-Zr4kTn2Lw9"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CLUSTER_TOKEN", TOKEN)
    redaction.forget()
    yield
    redaction.forget()


@pytest.mark.parametrize(
    "text",
    [
        f"the server said no to {TOKEN}",
        "git clone https://me:hunter2-x@host/repo hunter2-x"[:41],
        "AWS AKIAIOSFODNN7EXAMPLE",
        "Authorization: Bearer abcdefgh.ijklmnop",
        "curl --token s3cr3tvalue", "curl --api-key=s3cr3tvalue", "train --db-password 's3cr3t value'",
        "HF_TOKEN=s3cr3tvalue torchrun", "--set job.env.WANDB_API_KEY=s3cr3tvalue",
        "hf_abcdefghijklmnopqrstuvwxyz012345", "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "  env:\n    WANDB_API_KEY: s3cr3tvalue\n    LR: 1", 'DB_PASSWORD: "s3cr3t, value"',
        "AWS_SECRET : s3cr3t value  # x",
        "{API_KEY: s3cr3tvalue}", "{API_KEY: 's3cr3t', LR: '1'}", "'HF_TOKEN': 's3cr3t'", "db_password: 12s3cr3t",
        "  - TLS_KEY: |\n      s3cr3t\n\n      s3cr3t\n    LR: 1\n", '{\\"password\\": \\"s3cr3t\\"}',
        "AWS_SECRET: /s3cr3t",
        '{"password": "s3cr3t \\" s3cr3t", "lr": 1}', '{"api-key":"s3cr3t"}', 'password: "s3cr3t without an end',
    ],
)  # fmt: skip
def test_masks(text: str) -> None:
    """By the name before it, by its look, or because it is a value of our own environment."""
    shown = redaction.mask(text)
    assert redaction.MASK in shown
    for secret in (TOKEN, "hunter2-x", "AKIAIOSFODNN7EXAMPLE", "abcdefgh", "s3cr3t", "MIIE"):
        assert secret not in shown


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc-per-node 2 train.py --tokenizer bert --max-tokens 512 --num-key-value-heads 8",
        "http://host:29500/path", "TOKENIZERS_PARALLELISM=false", "--lr 1e-3 --seed 7", "step 25, loss 2.31",
        "KeyError: 'loss'", "tokens: 512", "token: 512, loss: 2.31", "model.token.weight: differs", "tokenizer: bert",
        "(token): Embedding(512, 64)", "key: loss", "WANDB_API_KEY:\n", "NCCL_SECRET::get()", "secret://bucket/path",
        "--set job.timeout: write KEY=VALUE, such as job.timeout=2m", "--set KEY=VALUE  Change a value.",
    ],
)  # fmt: skip
def test_leaves_the_rest(text: str) -> None:
    """What a trainer's command line is full of stays readable."""
    assert redaction.mask(text) == text


def test_the_word_after_a_secret_option() -> None:
    """A command is words: the value may be the next one."""
    assert redaction.mask_words(["train.py", "--auth-token", "s3cr3tvalue", "--lr", "0.1"]) == (
        "train.py", "--auth-token", "***", "--lr", "0.1",
    )  # fmt: skip


@given(st.text(max_size=200))
def test_bears_any_text(text: str) -> None:
    """Nothing makes it raise, and what is masked stays masked."""
    once = redaction.mask(text)
    assert redaction.mask(once) == once


def test_a_plan_on_disk_has_no_secret(tmp_path: Path) -> None:
    """The plan that is run has the secret, the file has not, and is read back as a plan."""
    command = ("torchrun", "train.py", "--token", "s3cr3tvalue")
    job = PlannedJob(command, "/", {"API_KEY": "s3cr3tvalue", "LR": "1"}, 2, 1, 60.0)
    plan = Plan("secret", "", 0, job, (), ())
    plan.write(tmp_path / "plan.json")
    assert "s3cr3tvalue" not in (tmp_path / "plan.json").read_text()
    assert plan.job.command == command
    assert Plan.read(tmp_path / "plan.json").job.env == {"API_KEY": "***", "LR": "1"}


def test_the_journal_has_no_secret(tmp_path: Path) -> None:
    """A line of the job's log that names a secret goes into the journal without it."""
    journal = Journal(tmp_path)
    journal.emit(Kind.LOG_CAUSE, {"cause": "nccl", "line": f"login with {TOKEN} failed"})
    journal.close()
    (event,) = (json.loads(line) for line in (tmp_path / "harness.jsonl").read_text().splitlines())
    assert event["data"]["line"] == "login with *** failed"
