"""Undo before do: before a fault is applied, a description of its undo is on disk, and a process that outlives the
harness carries it out.

Input: handles, which are plain data and say what to undo. Output: the machine in its earlier state, verified. `handles`
lists all kinds of handles; `undo_log` stores them; `reaper` has the only code that undoes them, and is the process that
runs it; `reaper_client` is the harness's connection to that process; and `orphaned_runs` finds what dead runs left
behind. No code here knows any fault."""
