"""Undo before do: how a fault is taken back lies on disk, as data, before the fault is applied; and one healer, which
outlives the harness, carries it out. `handles` says what can be taken back, `log` how that is written down, `healer`
does it, `reaper` is the process that it runs in, `client` is what the harness uses.
"""
