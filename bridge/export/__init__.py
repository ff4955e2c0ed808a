"""Exports: batches of a stream go to a destination through a plugin, in order, for ever retried.

Processes and threads
---------------------
The front-end process holds an `ExportSupervisor`. It starts one worker process, tells it over a
socketpair which streams and exports there are and how far each stream is committed, and starts it
again when it dies. The worker reads segment files, calls plugins, and keeps cursors; it writes
nothing else. What plugins append to streams (status messages, dead letters) goes back to the
supervisor, whose process is the only writer of streams.

In the worker the main thread talks to the supervisor and watches over the pool; `threads` pool
threads pick the most urgent export that is due and do one step of it: plan a batch, send it, settle
what came of it.

One export's life
-----------------
    idle --messages wait, batch due--> planned (boundaries durable) --export()--> settled --> idle
                                          ^                              |
                                          +----- backoff <--- Retry -----+

Invariants
----------
1. A cursor never leads: a position is written only after every record before it was accepted,
   rejected or found to be dropped. It may lag: after a crash the planned batch is sent again.
2. The boundaries of a batch are durable before its first attempt, so every attempt has the same. Where the
   link cuts attempts, the batch goes in parts (`sizing`). Where a batch is one object, it gets a lower end
   and another name instead: only after the exporter has looked and found nothing under the old name
   (`landed`), and the new boundaries are durable before the attempt, too.
3. One batch is in flight per export. A thread that hangs keeps its export, but not its place in
   the pool.
4. The worker may die at any instant, with SIGKILL too. Nothing but time is lost.

Who is to blame when a worker dies
----------------------------------
`Began` and `Ended` tell the supervisor whose plugin runs in which thread; `faulthandler` tells the
thread of a crash. What leaves no report (`_exit`, the OOM killer) makes suspects of all in flight:
they run one at a time until the next death names one. The culprit waits, longer each time, up to
five minutes; the worker itself is back at once, for the others.

Modules, each knowing only those before it (`make lint` checks it):

    settings     the [export] table
    wire         messages between the two processes
    cursor       byte layout of positions; planning: which messages make a batch; sizing: how large an
                 attempt may be; backoff: when the next one is; bandwidth: the ceiling of all exports
    host         what exports have of the process: clients, streams, hooks, whose plugin runs
    position     one export's cursor with its files
    batches      one export's planned batch; context: what its exporter may ask
    task         one export: its state and its steps
    scheduler    the pool: picks tasks and runs them
    worker       the process; supervisor: the parent's side

Shared by exporters: `heads` (the head object in S3), `keys` (partition keys), `firehose`, `uploads`.
"""
