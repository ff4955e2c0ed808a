"""Exports: plugins deliver a stream to a destination in batches, in order, and retry without limit.

Processes and threads
---------------------
The service process has an `ExportSupervisor`. It starts one worker process, and restarts it when it dies.
Over a socketpair it tells the worker the streams, their exports and how far each stream is committed. The
worker reads segment files, calls plugins and writes cursors, and writes nothing else. Messages that plugins
append to streams (status messages, dead letters) go back to the supervisor, because only the service process
writes streams.

In the worker, the main thread talks to the supervisor and watches the pool. Each of the `threads` pool
threads picks the most urgent export that is due and performs one step of it: it plans a batch, sends it, and
settles the outcome.

One export's life
-----------------
    idle --a batch is due----------> planned (boundaries written) --export()--> settled --> idle
                                        ^                              |
                                        +----- backoff <--- Retry -----+

Invariants
----------
1. A cursor never leads: a position, and the ranges ahead of it, are written only after every record in them
   was accepted, rejected or found to be dropped. It may lag: after a crash the planned batch is sent again.
2. The boundaries of a batch are durable before its first attempt, so every attempt has the same. If the
   destination knows no batches (`BatchLimits.by_record`), they survive a crash, but not always a power cut.
   If the link cuts attempts, the batch is sent in parts (`sizing`). A batch that is one object instead gets a
   lower end, and so another name, but only after the exporter has found nothing under the old name
   (`landed`). The new boundaries, too, are durable before the attempt.
3. Each export has at most one batch in flight. A thread that hangs keeps its export, but the pool gets
   another thread in its place.
4. The worker may die at any instant, even by SIGKILL. Only time is lost.

Which plugin killed the worker
------------------------------
`Began` and `Ended` report whose plugin runs in which thread; `faulthandler` reports the thread that
crashed. A death without a report (`_exit`, the OOM killer) makes all exports in flight suspects: they
run one at a time until the next death identifies one. The culprit backs off for up to five minutes; for the
others, the worker restarts at once.

Modules, each importing only those above it (`make lint` checks it):

    settings     the [export] table
    wire         messages between the two processes
    cursor       the file of a position; planning: which messages make a batch; sizing: how large an
                 attempt may be; backoff: when the next one is
    host         what the worker offers all exports: clients, appends, hooks; which plugin runs
    position     one export's cursor with its files; order: where the next batch begins
    batches      one export's planned batch
    task         one export: its state, its steps, and the context of its exporter
    scheduler    the pool: picks tasks and runs them
    worker       the process; supervisor: the parent's side
"""
