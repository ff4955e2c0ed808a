"""A deterministic simulation: the whole product in one process, on a machine that does not exist.

    python -m tests.simulation --minutes 1 [--seed S]          make simulate MINUTES=1 SEED=S

The code under test is the unchanged product: `bridge.service.Service` with its broker, streams, export
supervisor, and the worker with its scheduler and exporters. What is simulated is everything below it:

    kernel     time, processes, threads and their locks. One thing runs at a time; who is next is drawn
    loop       the event loop, transports, listeners, socket pairs, child processes
    disk       what of the files is on the disk for sure, what a power cut leaves of the rest, syncs that
               fail or lie, a disk that is full
    boundary   puts these below `os`, `time`, `threading`, `socket`, `select`

A *world* is one gateway with its clients and its cloud. Its `plan` is drawn from the seed: what the clients
do, and what fails when. Most steps (`steps`) are drawn one by one; some come as scenes, a feature in use with
a failure in the middle of it (`scenes`, `scenes_of_exports`), which are dealt from a `deck`, or as
`lake_scenes` and `shared_scenes`. `world` and `features` carry them out, with `settings` as the gateway's
configuration. Everything else is drawn from the seed too, so a seed always gives the same run, to the same
line of its story. What was promised is compared with what is there:

    checks     streams: what was acknowledged, order, numbers, limits, ages
    sessions   what subscribers got, sessions, wills, retained messages
    exports    positions, what arrived, what starts over, gateway reports
    lake       the table, verdicts, upkeep, the end of a gateway (with `cloud`, `bucket`, and `table` or
               `iceberg`), a streaming query (`query`)

`large` uses the same machine for hundreds of exports, and for a year of them.

A world that fails is made smaller: steps are left out of its plan as long as it still fails in the same
way. What remains is printed as a story.
"""
