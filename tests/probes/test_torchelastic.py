"""The facts in torchrun's output, from logs of real runs (torch 2.13)."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchaos.harness.monitoring.probes.job_log import ElasticReader, LogFact, parse
from torchaos.harness.protocol.wire import FIELDS, Kind

LOGS = Path(__file__).parent.parent / "data" / "logs"


def read(name: str) -> list[LogFact]:
    reader = ElasticReader()
    return [said for line in (LOGS / name).read_text().splitlines() for said in reader.read(line)]


def test_a_restart_is_read_in_order() -> None:
    """A run with one killed rank and one restart gives each fact once, with its rank, pid and restart count."""
    told = [(said.kind, said.rank, said.restarts) for said in read("torchrun-restart.log")]
    assert told == [
        (Kind.ELASTIC_RENDEZVOUS, None, 0),
        (Kind.ELASTIC_RENDEZVOUS, None, 0),
        (Kind.ELASTIC_WORKER, 0, 0),
        (Kind.ELASTIC_WORKER, 1, 0),
        (Kind.ELASTIC_TEARDOWN, 0, 0),
        (Kind.ELASTIC_FAILURE, 1, 0),
        (Kind.ELASTIC_RESTART, None, 0),
        (Kind.ELASTIC_RENDEZVOUS, None, 0),
        (Kind.ELASTIC_RENDEZVOUS, None, 1),
        (Kind.ELASTIC_WORKER, 0, 1),
        (Kind.ELASTIC_WORKER, 1, 1),
        (Kind.ELASTIC_WORKER, 0, 1),
        (Kind.ELASTIC_WORKER, 1, 1),
    ]


def test_values_of_a_restart() -> None:
    """Pids, exit codes, signals and attempts left come out as numbers."""
    by_kind = {said.kind: said.data for said in read("torchrun-restart.log")}
    assert by_kind[Kind.ELASTIC_FAILURE] == {"exit_code": -9, "local_rank": 1, "pid": 9067}
    assert by_kind[Kind.ELASTIC_TEARDOWN] == {"pid": 9066, "signal": "SIGTERM"}
    assert by_kind[Kind.ELASTIC_RESTART]["attempts_left"] == 2
    assert by_kind[Kind.ELASTIC_WORKER] == {"state": "SUCCEEDED", "pid": 9070, "local_rank": 1}


def test_the_last_failure_has_exit_codes_of_all_workers() -> None:
    """Without a restart the event log has a FAILED event per worker, with its exit code."""
    failed = {said.rank: said.data for said in read("torchrun-fail.log") if said.data.get("state") == "FAILED"}
    assert {rank: data["exit_code"] for rank, data in failed.items()} == {0: -15, 1: -9}


def test_the_agents_own_success_is_not_believed() -> None:
    """torchrun's agent says SUCCEEDED of a job that failed; nothing of it gets through."""
    assert '"source": "AGENT"' in (LOGS / "torchrun-fail.log").read_text()
    assert not [said for said in read("torchrun-fail.log") if said.data.get("state") == "SUCCEEDED"]


def test_on_several_nodes_a_worker_belongs_to_the_round_that_was_written_before_it() -> None:
    """The output may be read before the file that has the round: the file is read first, and later lines on an older
    worker keep that worker's round."""
    lines = (LOGS / "torchrun-restart.log").read_text().splitlines()
    rounds = iter((4, 4, 7, 7))

    def read_rounds() -> None:
        reader.restarts = next(rounds)

    reader = ElasticReader(read_rounds)
    found = [fact for line in lines for fact in reader.read(line) if "pid" in fact.data]
    starts = [(fact.data["pid"], fact.restarts) for fact in found if fact.data.get("state") == "START"]
    assert [number for _, number in starts] == [4, 4, 7, 7]
    assert all(fact.restarts == dict(starts)[fact.data["pid"]] for fact in found)
    (failure,) = (line for line in lines if "failed (exitcode: -9)" in line)
    assert [(fact.rank, fact.restarts) for fact in reader.read(failure)] == [(1, 4)]


def test_without_the_event_log_the_log_lines_tell() -> None:
    """A torchrun with no event log still gives rendezvous, restart count and failures."""
    reader = ElasticReader()
    lines = [line for line in (LOGS / "torchrun-restart.log").read_text().splitlines() if '"torchelastic.' not in line]
    told = [said for line in lines for said in reader.read(line)]
    done = [said.restarts for said in told if said.kind is Kind.ELASTIC_RENDEZVOUS and said.data["done"]]
    assert done == [0, 1]
    assert Kind.ELASTIC_FAILURE in {said.kind for said in told}


def test_an_event_that_is_glued_to_other_output_is_found() -> None:
    """Ranks print into the same pipe: text before and after an event, or two events on one line, do no harm."""
    starts = [line for line in (LOGS / "torchrun-restart.log").read_text().splitlines() if ".START" in line]
    line = f"step 3 loss 0.5{starts[0]}rank 1 step 4{starts[1]} tail"
    assert [said.data["pid"] for said in parse(line)] == [9066, 9067]


def test_every_payload_is_whole() -> None:
    """Whatever is said has the keys that the journal demands of its kind."""
    for name in ("torchrun-restart.log", "torchrun-fail.log", "torchrun-gloo.log"):
        assert all(FIELDS[said.kind] <= said.data.keys() for said in read(name))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 1 loss 2.0",
        '{"name": "torchelastic.worker.status.START", "source": "WORKER", "metadata": {"state": "ST',
        '{"name": "torchelastic.worker.status.START", "source": "WORKER", "metadata": null}',
        '{"name": "torchelastic.worker.status.START", "source": "WORKER", "metadata": {"state": "START", '
        '"metadata": "[]", "agent_restarts": 0, "worker_id": "7", "global_rank": 0}}',
        "failed (exitcode: none)",
    ],
)
def test_lines_that_say_nothing(line: str) -> None:
    """Other output, torn events and events of another shape give nothing and raise nothing."""
    assert list(parse(line)) == []


def test_a_change_of_members_is_a_restart_of_another_kind() -> None:
    """New nodes restart the workers without using up a restart."""
    line = "I 1 torch/x.py:970] [default] Detected 1 new nodes from group_rank=0; will restart worker group"
    assert [said.data["why"] for said in parse(line)] == ["membership"]
