"""Persistent streams: the storage core. It knows nothing of MQTT, JSON or AWS.

What it promises
----------------
* A message is *committed* when the file system has its whole commit group; with `flush_on_write`
  when fdatasync has returned. `Stream.after_commit` tells the caller, in the order of the calls.
* Sequence numbers of a stream are contiguous from 0, never reused, never reset.
* Bytes that fail their check are never returned: a torn tail is cut at the last good frame, a
  damaged segment is set aside in `quarantine/`, its good frames are kept, and it is reported.
* Only one process writes (it holds a lock on the data directory); any number may read.

Layout on disk
--------------
    <data_dir>/lock                           held (flock) by the writing process
    <data_dir>/streams/<directory>/           one per stream; the escaped name, see `layout.py`
        meta.0, meta.1                        two copies of the definition, see `meta.py`
        <first sequence number>.seg           segments, see `segment.py`
        <first sequence number>.idx           index of a sealed segment; a hint, rebuilt if missing
        quarantine/                           damaged files, kept for inspection

Modules, each knowing only those before it: `layout` (names, the file seam), `sums` (checks of many long
parts of a file), `segment` and `meta` (byte layouts of segments and definitions), `drops` (which numbers
are gone, and why), `reader` (read only, for any process), `recovery` (opening what a stop has left),
`group` and `log` (one stream's files as their writer sees them), `stream` with its parts `walk` (reading
its own files), `dedup` (ids seen lately), `whole` (limits by segment) and `retention` (exact limits),
`workers`, `pace` and `committer` (group commit: threads that wait for the disk, and when a group begins),
`store` (all streams of a data directory), `verify` (checks and mends a stopped one).
"""
