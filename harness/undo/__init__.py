"""Undo before do: before a fault is applied, it is on disk how the fault is undone, and a process that outlives the
harness undoes it.

Handles come in: plain data that says what to restore. A machine in its earlier state comes out, verified. `handles`
lists all kinds of handles, `log` stores them, `healer` is the only code that restores them, `reaper` is the process
that runs it, `client` is what the harness uses, and `recovery` finds what earlier deaths left. This room knows no
fault.
"""
