"""Scenarios with one mistake each, and what the one error must say.

`GOOD` is a valid scenario. A case replaces `old` by `new` in it. `at` is the place of the error (line:column) in the
result, and `says` are words in the message. Cases with `old=""` are complete files.
"""

from __future__ import annotations

from typing import NamedTuple

GOOD = """\
scenario: kill-rank
description: One rank dies.
seed: 7
job:
  command: torchrun --nproc-per-node 2 {jobs}/gpt_ddp.py --checkpoint-dir {run}/checkpoints
  checkpoints: {path: "{run}/checkpoints"}
  timeout: 5m
faults:
  - inject: process.kill
    target: {rank: 1}
    when: {step: 25, phase: backward}
assert:
  - recovery_time: {catch_up: 60s}
  - loss_continuity
"""


class Case(NamedTuple):
    name: str
    old: str
    new: str
    at: str
    says: tuple[str, ...]


CASES = (
    # the file
    Case("empty file", "", "", "1:1", ("empty",)),
    Case("only a comment", "", "# nothing\n", "1:1", ("empty",)),
    Case("a list", "", "- scenario: x\n", "1:1", ("mapping",)),
    Case("a word", "", "hello\n", "1:1", ("mapping",)),
    Case("two documents", "", GOOD + "---\nscenario: second\n", "15:1", ("one file holds one scenario",)),
    Case("an empty document", "", "---\n", "1:1", ("empty",)),
    Case("nothing but null", "", "null\n", "1:1", ("empty",)),
    Case("a tab", "seed: 7", "seed:\n\t7", "4:1", ("spaces",)),
    Case("not closed", '{path: "{run}/checkpoints"}', '{path: "{run}/checkpoints"', "7:3", ("','",)),
    Case("a colon in plain text", "One rank dies.", "One rank: dies.", "2:22", ("colon", "quote")),
    Case("a NUL byte", "One rank dies.", "One\0rank", "2:17", ("U+0000", "remove")),
    Case("a Python object", "seed: 7", "seed: !!python/object/apply:os.getcwd []", "3:7", ("tag", "plain data")),
    Case("a merge key", "seed: 7", "<<: {seed: 7}", "3:1", ("merge",)),
    Case("a key that is a list", "seed: 7", "? [a, b]\n: 7", "3:3", ("single word",)),
    Case("an unknown anchor", "seed: 7", "seed: *there", "3:7", ("there",)),
    Case("nested too deep", "seed: 7", "seed: " + "[" * 60 + "]" * 60, "3:47", ("40 levels",)),
    Case("endless", "seed: 7", "seed: " + "[" * 5000 + "]" * 5000, "3:47", ("levels",)),
    # keys
    Case("a key twice", "seed: 7", "seed: 7\nseed: 8", "4:1", ("'seed'", "second time", "line 3")),
    Case("a key twice inside", "  timeout: 5m", "  timeout: 5m\n  timeout: 6m", "8:3", ("'timeout'", "second time")),
    Case("unknown key", "seed: 7", "sed: 7", "3:1", ("'sed'", "'seed'")),
    Case("unknown key inside", "  timeout: 5m", "  timout: 5m", "7:3", ("'timout'", "'timeout'")),
    Case("unknown key in a fault", "    when:", "    wenn: {}\n    when:", "11:5", ("'wenn'", "'when'")),
    Case("unknown key in when", "step: 25, phase", "stepp: 25, phase", "11:12", ("'stepp'", "'step'")),
    Case("on is a key, not true", "seed: 7", "on: 7", "3:1", ("'on'",)),
    Case("no scenario", "scenario: kill-rank\n", "", "1:1", ("'scenario'", "missing")),
    Case("no job", GOOD[GOOD.index("job:") : GOOD.index("faults:")], "", "1:1", ("'job'", "missing")),
    Case("no command", "  command: torchrun --nproc-per-node 2 {jobs}/gpt_ddp.py --checkpoint-dir {run}/checkpoints\n", "",
         "5:3", ("'command'", "missing")),
    Case("no assert", GOOD[GOOD.index("assert:") :], "", "1:1", ("'assert'", "missing")),
    Case("no target", "    target: {rank: 1}\n", "", "9:5", ("'target'", "missing")),
    Case("no when", "    when: {step: 25, phase: backward}\n", "", "9:5", ("'when'", "missing")),
    # types
    Case("a name with blanks", "kill-rank", "Kill Rank", "1:11", ("small letters",)),
    Case("a seed that is text", "seed: 7", 'seed: "7"', "3:7", ("seed", "whole number", "'7'")),
    Case("a seed that is a float", "seed: 7", "seed: 7.5", "3:7", ("seed", "whole number")),
    Case("a negative seed", "seed: 7", "seed: -1", "3:7", ("at least 0", "-1")),
    Case("a seed over 64 bits", "seed: 7", f"seed: {2**64}", "3:7", ("too large",)),
    Case("an octal seed", "seed: 7", "seed: 017", "3:7", ("whole number", "'017'")),
    Case("base 60", "timeout: 5m", "timeout: 10:30", "7:12", ("'10:30'", "duration", "30s")),
    Case("no unit", "timeout: 5m", "timeout: 300", "7:12", ("300", "unit")),
    Case("a wrong unit", "timeout: 5m", "timeout: 5 minutes", "7:12", ("5 minutes", "unit")),
    Case("a negative time", "timeout: 5m", "timeout: -5m", "7:12", ("-5m", "duration")),
    Case("yes is text", "rank: 1}", "all: yes}", "10:19", ("all", "True", "'yes'")),
    Case("nothing in env", "  timeout: 5m", "  env: {OMP_NUM_THREADS: }", "7:25", ("OMP_NUM_THREADS", "empty", "quotes")),
    Case("a list in env", "  timeout: 5m", "  env: {OMP_NUM_THREADS: [1]}", "7:26", ("OMP_NUM_THREADS", "text", "a list")),
    Case("a description that is a date list", "One rank dies.", "[one, rank]", "2:14", ("description", "text", "a list")),
    Case("faults is a mapping", "  - inject: process.kill\n    target", "    inject: process.kill\n    target", "9:5",
         ("faults", "a list", "a mapping")),
    Case("empty job", GOOD[GOOD.index("job:") : GOOD.index("faults:")], "job:\n", "4:5", ("job", "mapping", "empty")),
    Case("an assertion that is a number", "  - loss_continuity", "  - 3", "14:5", ("write a name",)),
    Case("two assertions in one", "  - loss_continuity", "  - {loss_continuity: {}, completed: {}}", "14:5", ("a name with",)),
    Case("an empty assert", GOOD[GOOD.index("assert:") :], "assert: []\n", "12:9", ("assert is empty", "write at least one")),
    # names
    Case("unknown injector", "process.kill", "process.kil", "9:13", ("'process.kil'", "'process.kill'")),
    Case("unknown injector, nothing near", "process.kill", "zzz", "9:13", ("'zzz'", "list injectors")),
    Case("unknown assertion", "loss_continuity", "loss_continuty", "14:5", ("'loss_continuty'", "'loss_continuity'")),
    Case("unknown bound", "catch_up", "catchup", "13:21", ("'catchup'", "'catch_up'")),
    Case("a bound of the wrong type", "catch_up: 60s", "catch_up: soon", "13:31", ("'soon'", "duration")),
    Case("an assertion twice", "  - loss_continuity", "  - loss_continuity\n  - loss_continuity", "15:5", ("second time",)),
    Case("values that a fault refuses", "inject: process.kill", "inject: straggle.sleep\n    with: {factor: 0.5}", "10:11", ("straggle.sleep", "more than 1")),
    Case("values that an assertion refuses", "  - loss_continuity", "  - straggler_tolerated: {ratio: 0.5}", "14:26", ("straggler_tolerated", "more than 1")),
    Case("unknown parameter", "    when:", "    with: {signal: 9}\n    when:", "11:12", ("'signal'", "none")),
    Case("unknown launcher", "seed: 7", "launcher: locl", "3:11", ("'locl'", "'local'")),
    Case("unknown condition", "seed: 7", "stop: [{no_progres: {}}]", "3:8", ("'no_progres'", "'no_progress'")),
    Case("a condition without its parameter", "seed: 7", "stop: [no_progress]", "3:8", ("'longer_than'", "add it")),
    Case("unknown placeholder", "{jobs}/gpt", "{job}/gpt", "5:12", ("{job}", "{jobs}")),
    Case("a lone brace", "{jobs}/gpt", "{jobs/gpt", "5:12", ("placeholder",)),
    # sense
    Case("unknown phase", "phase: backward", "phase: backwards", "11:29", ("'backwards'", "'backward'")),
    Case("two targets", "{rank: 1}", "{rank: 1, node: 0}", "10:13", ("exactly one", "node, rank")),
    Case("no target named", "{rank: 1}", "{}", "10:13", ("exactly one", "none")),
    Case("negative rank", "{rank: 1}", "{rank: -1}", "10:20", ("-1",)),
    Case("percent over 100", "{rank: 1}", "{percent: 120}", "10:23", ("100", "120")),
    Case("step zero", "step: 25", "step: 0", "11:18", ("at least 1",)),
    Case("step and time", "step: 25, phase: backward", "step: 25, time: 30s", "11:11", ("step", "time", "combined")),
    Case("an empty trigger", "{step: 25, phase: backward}", "{}", "11:11", ("needs a time",)),
    Case("a phase alone", "step: 25, phase: backward", "phase: backward", "11:11", ("every step",)),
    Case("the start of a step", "step: 25, phase: backward", "step: 25, phase: start", "11:11", ("start", "attempt")),
    Case("a target for what hits files", "process.kill", "checkpoint.truncate", "10:5", ("hits files", "remove target")),
    Case("nth of nothing", "step: 25, phase: backward", "step: 25, nth: 2", "11:11", ("nth", "phase")),
    Case("between the wrong way round", "step: 25", "step: {between: [30, 10]}", "11:18", ("smaller number first",)),
    Case("after nobody", "step: 25, phase: backward", "after: first", "11:19", ("'first'", "none")),
    Case("after itself", "step: 25, phase: backward", "after: process.kill", "11:19", ("no earlier fault",)),
    Case("taking back a kill", "    when:", "    for: 5s\n    when:", "11:10", ("can't be undone",)),
    Case("the same id twice", "assert:", "  - inject: process.kill\n    target: {rank: 0}\n    when: {step: 30}\nassert:", "12:13",
         ("already", "id")),
)  # fmt: skip
