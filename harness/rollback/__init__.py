"""Undo before do: before a fault is applied, the description of its undo is on disk, and a process that outlives the
harness carries it out.

Input: handles, which are plain data and say what to restore. Output: the machine in its earlier state, verified.
`handles` lists all kinds of handles, `undo_log` stores them, `healer` is the only code that restores them, `reaper` is
the process that runs the healer, `reaper_client` is the harness's connection to it, and `recovery` finds what dead
runs left behind. No code here knows any fault."""
