"""Faults that end by themselves when every process that could undo them is dead, and nobody runs `recover`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from torchaos.harness.agent.injection.rank_site import Lease
from torchaos.harness.protocol.control_pages import ControlPage


@pytest.fixture
def page(tmp_path: Path) -> ControlPage:
    """Of a fault that has fired once, and that nobody takes back."""
    made = ControlPage(tmp_path / "fault.page", create=True)
    made.write(ControlPage.FIRED, 1)
    return made


def test_a_stall_ends_with_its_lease(page: ControlPage, tmp_path: Path) -> None:
    """A rank that waits for nobody goes on after so many seconds, and is not kept again."""
    lease, begun = Lease(page, str(tmp_path / "fault.page"), 0.2), time.monotonic()
    lease.sleep()
    assert 0.2 <= time.monotonic() - begun < 10
    assert not lease.on


def test_a_stall_ends_when_it_is_taken_back(page: ControlPage, tmp_path: Path) -> None:
    """One word in the page is enough, whoever writes it, and however long the lease is."""
    lease = Lease(page, str(tmp_path / "fault.page"), 3600.0)
    assert lease.on
    page.write(ControlPage.GO, 1)
    begun = time.monotonic()
    lease.sleep()
    assert time.monotonic() - begun < 10
    assert not lease.on
