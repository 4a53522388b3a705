"""The words between the controller, which is the process of `torchaos run`, and the agent of a node: JSON objects, one
on each line.

The controller says              and the agent answers
    hello {version, collect}         {hello: {version, node, host, boot, pids, missing, lapsed, mono_s}}, or {error}
    beat {sent_s}                    {beat, mono_s}; it must come every few seconds, see LEASE_S
    clock {offset_s, error_s}        nothing; the agent records it as the offset of its clock
    follow {since}                   {event, n} for each event of the node from number `since` on
    start {fault, ranks}             nothing; the fault is carried out, with its trigger in a rank or (without) now
    page {fault, rank, word, value}  nothing; the words of control pages that come from elsewhere
    signal {number}                  nothing; the node's command gets the signal
    end {id}                         {re, ok: faults that have not ended}; no fault begins any more
    heal {id, fault}                 {re, ok: []}; the fault is taken back (null: all are), and the journal says how
    leave                            {bye: {}}; the agent takes everything back and does not wait for the lease

{file, bytes} comes after the job's end for each piece of a file that the node wrote, if the controller said `collect`.
{lapsed: why} comes at the end of the lease, and {bye: {}} as the last line of an agent whose command has ended.
Whoever may write to the agent is decided by the agent's socket: it has mode 0700 in a folder of its user, and the
kernel names the user at the other end."""

from __future__ import annotations

VERSION = 1
LEASE_S = 10.0  # seconds without a message of the controller, after which the agent undoes everything
BEAT_S = 1.0


def mark_of(run_id: str, node: int, submission: int) -> str:
    """The name of a node's part of a run. It marks the processes there, and is the name of the folder on the node."""
    return f"{run_id}.node{node}" + (f".{submission}" if submission else "")
