"""Undo before do: how a fault is taken back lies on disk, as data, before the fault is applied; and one healer, which
outlives the harness, carries it out.

Handles come in: plain data that says what to restore. A verified state of the machine comes out. `handles` says what
can be taken back, `log` how that is kept, `healer` is the only code that takes anything back, `reaper` the process that
runs it, `client` what the harness uses, `recovery` what finds the leftovers of earlier deaths. It knows no fault."""
