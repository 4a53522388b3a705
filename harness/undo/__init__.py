"""Undo before do: how a fault is taken back lies on disk, as data, before the fault is applied; and one healer, which
outlives the harness, carries it out. `handles` says what can be taken back, `log` how it is written down, `healer` takes
back, `reaper` is the process that does, `client` is what the harness uses.
"""
