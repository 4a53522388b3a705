"""Manifests are read as kubectl reads them, and sent to it so that it reads the same."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchaos.harness.host.cluster_tools import Kubectl
from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.launchers.kubernetes import _check_rights
from torchaos.harness.running.launchers.pod_manifest import Manifest, PodChange, documents

HEAD = "apiVersion: example.com/v1\nkind: Foo\nmetadata: {name: x}\n"
TRAPS = re.findall(
    r"[^ ]+",
    "1e3 3e-4 +1e3 1e5 08 0o17 017 0b11 -0b11 0x1F 1_000 1__0 _1 .5 1. .e3 y n Y N yes off on ~ null = << 10:30 "
    "2020-01-01 100000000000000000000000 1e21 1e-7 0x1.8p1 !!str 5 '5' True tRUE 1.2.3 - 12e03 -.5 +.5e1 0o8 00 0",
)


def kubectl(text: str) -> Any:
    """How kubectl itself reads a text. `label --local` needs no cluster."""
    words = ["kubectl", "label", "--local", "--filename=-", "a=b", "--output=json"]
    done = subprocess.run(words, input=text.encode(), capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.needs("kubectl")
def test_every_trap_is_read_as_by_kubectl() -> None:
    """Words that YAML 1.1, YAML 1.2 and Go read as different types, as values and as keys."""
    words = [word for word in TRAPS if word not in ("-", "!!str")]
    text = HEAD + "spec:\n" + "".join(f"- {word}\n" for word in words)
    read = documents(text)[0]["spec"]
    theirs = kubectl(text)["spec"]
    assert [(word, type(one), one) for word, one in zip(words, read, strict=True)] == [
        (word, type(one), one) for word, one in zip(words, theirs, strict=True)
    ]
    keys = HEAD + "spec: {y: 1, 3: 2, 08: 3, 1e3: 5, !!str 7: 6}\n"
    assert documents(keys)[0]["spec"] == kubectl(keys)["spec"]


@pytest.mark.needs("kubectl")
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text("01789.eE+-_xXoObynfaF:~<=i", min_size=1, max_size=6), min_size=30, max_size=60))
def test_any_word_is_read_as_by_kubectl(words: list[str]) -> None:
    """Plain words of the characters of which numbers and booleans are made."""
    words = [word for word in words if word not in ("-", "=") and not word.startswith(":") and word[-1] != ":"]
    text = HEAD + "spec: [0]\nspecs:\n- x\n" + "".join(f"- {word}\n" for word in words)
    read, theirs = documents(text)[0]["specs"], kubectl(text)["specs"]
    assert [(type(one), one) for one in read] == [(type(one), one) for one in theirs]


@pytest.mark.needs("kubectl")
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(words=st.lists(st.one_of(st.sampled_from(TRAPS), st.text(max_size=6)), min_size=1, max_size=40))
def test_the_words_of_the_job_arrive_as_text(tmp_path: Path, words: list[str]) -> None:
    """Whatever the command and the environment of the job are, kubectl reads back the same texts."""
    words = [word for word in words if word.isprintable()]
    file = tmp_path / "job.yaml"
    file.write_text("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a, image: b}]}\n")
    env = {f"V{number}": word for number, word in enumerate(words)}
    change = PodChange(("torchaos.run", "r"), ["python3", *words], env, PurePosixPath("/runs"), 60)
    found = kubectl(Manifest.read(file).changed(change))
    (container,) = found.get("items", [found])[0]["spec"]["containers"]
    assert container["command"] == ["python3", *words]
    assert {one["name"]: one["value"] for one in container["env"]} == env


def test_json_and_templates() -> None:
    """JSON with tabs is read, which no reader of YAML takes."""
    assert documents('{\n\t"a": 1\n}') == [{"a": 1}]
    assert documents("---\n---\na: 1\n---\nb: !!str 2\n") == [{"a": 1}, {"b": "2"}]


@pytest.mark.needs("kubectl")
def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the user's configuration that is wrong, said in a whole sentence without the log of kubectl."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageError) as raised:
        _check_rights(Kubectl(), [("create", "job.batch")])
    said = str(raised.value)
    assert said.startswith("the cluster does not answer (kubectl: The connection to the server ")
    assert said.endswith("correct job.pods.context or the kubeconfig")
