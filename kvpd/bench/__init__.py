"""`kvpd bench`: how fast kvpd is on this machine, measured beside what bounds it.

A subcommand is a module here with a `Subcommand` in it; `command.py` lists them. Its `run` gets a `Bench` and its own
arguments, and returns a `Result`: an attrs class of plain values, which becomes the JSON as it is, and which knows the
tables and plots that show it. What it shares with the others:

    suite.py       Bench, Subcommand, Result
    arguments.py   options that are lists: counts, sizes, words
    rounds.py      alternate (the things compared take turns), Measured (median and spread), percentile
    tables.py      Table
    plots.py       Plot, Series
    progress.py    Progress: plan(steps), then step(what) as each begins
    fleet.py       Fleet: real daemons and workers as processes, which all end with it
    workers.py     what runs in a worker, and how it is called
    processes.py   start, CPU time and end of a process
    loopwatch.py   how long a watched daemon's loop goes without looking for what has arrived
    failure.py     BenchmarkFailed
    memcpy.py      what one core copies
    record.py      what the machine is, and what runs on it

Nothing here asserts a time. A benchmark fails where bytes or counts are wrong, never for being slow.
"""

from __future__ import annotations
