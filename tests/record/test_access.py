"""Access to run directories: who may read them, what is refused in them, and that the agent opens no connection."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from torchaos.harness import agent, protocol
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run").create()
    made.plan.write_text("{}")
    return made


def test_a_run_directory_is_its_owners_alone(folder: RunDir) -> None:
    """Whatever the umask, nobody else may look into any folder of it."""
    before = os.umask(0)
    try:
        made = RunDir(folder.root.with_name("other")).create()
    finally:
        os.umask(before)
    found = {path.relative_to(made.root).as_posix(): path.stat().st_mode & 0o777 for path in made.root.rglob("*")}
    assert found
    assert set(found.values()) == {0o700}


@pytest.mark.parametrize("place", ["events/rank0.jsonl", "artifacts/inventory.json", "agent/pages/x.page", "twins/0"])
def test_a_link_in_it_is_refused(folder: RunDir, place: str) -> None:
    """A link anywhere but among the job's own files: it is not followed, and the text names it."""
    (folder.job / "latest").symlink_to("/etc")
    assert folder.check() == folder
    (folder.root / place).symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match=f"{place}: it is a link"):
        folder.check()


@pytest.mark.needs("root")
def test_another_users_file_in_it_is_refused(folder: RunDir) -> None:
    """So is a file of another user."""
    os.chown(folder.plan, 65534, 65534)
    with pytest.raises(UsageError, match=r"plan.json: it is another user's"):
        folder.check()


def test_it_is_never_made_over_something(folder: RunDir, tmp_path: Path) -> None:
    """A folder that is there, or a link to one, is not taken for a new run directory."""
    (tmp_path / "link").symlink_to(tmp_path)
    for root in (folder.root, tmp_path / "link"):
        with pytest.raises(UsageError, match="can't be made"):
            RunDir(root).create()


def test_the_agent_opens_no_socket() -> None:
    """No module of the agent imports anything that talks over a network, or starts a process."""
    forbidden = {"socket", "socketserver", "http", "urllib", "asyncio", "subprocess", "multiprocessing", "ssl"}
    paths = [path for room in (agent, protocol) for path in Path(room.__path__[0]).rglob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not forbidden & {name.partition(".")[0] for name in names}, path
