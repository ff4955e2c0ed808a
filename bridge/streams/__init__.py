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

Modules, from the bottom up (`make lint` holds the order):

* `layout` (names, the file seam), `sums` (checks of many long parts of a file), `segment` and `meta` (byte
  layouts of segments and definitions), `headers` (of a message), `drops` (which numbers are gone, and why)
* `reader` (read only, for any process), `recovery` (opening what a stop has left)
* the policies, which see a stream through a `view`: `segment_limits`, `message_limits`, and `dedup` (ids
  seen lately)
* `queue` (what is not committed yet), `staging` (where a group goes), `log` (brings it there), `directory`
  (the files as threads use them), `obsolete` (files that are done with, until they are removed)
* `stream` puts these together, and nobody else touches its log
* `workers`, `pace` and `committer`: group commit, the threads that wait for the disk, and when a group begins
* `store` (all streams of a data directory), `verify` (checks and repairs a stopped one)
"""
