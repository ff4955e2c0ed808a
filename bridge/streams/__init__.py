"""Persistent streams: the storage core. It knows nothing of MQTT, JSON or AWS.

What it promises
----------------
* A message is *committed* when the file system has its whole commit group; with `flush_on_write`
  when fdatasync has returned. `Stream.after_commit` notifies the caller, in the order of the calls.
* Sequence numbers of a stream are contiguous from 0, never reused, never reset.
* Bytes that fail their check are never returned: a torn tail is cut at the last good frame, a
  damaged segment is quarantined, its good frames are kept, and it is reported.
* Only one process writes (it holds a lock on the data directory); any number may read.

Layout on disk
--------------
    <data_dir>/format                         which format all this has, see `formats.py`
    <data_dir>/lock/                          held (flock) by the writing process
    <data_dir>/keys/                          of encrypted streams, see `bridge.encryption`
    <data_dir>/streams/<directory>/           one per stream; the escaped name, see `layout.py`
        meta.0, meta.1                        two copies of the definition, see `meta.py`
        <first sequence number>.seg           segments, see `segment.py`
        <first sequence number>.idx           index of a sealed segment; a hint, rebuilt if missing
        drops.log                             which numbers are gone, and why, see `drops.py`
        quarantine/                           damaged files, kept for inspection

Modules, from the bottom up (`make lint` enforces the order):

* `layout` (names, system calls), `sums` (checksums of many long parts of a file), `segment` and `meta` (byte
  layouts of segments and definitions), `headers` (of a message), `drops` (which numbers are gone, and why),
  `sealing` (encrypts and decrypts frames)
* `formats` (which format the directory has, and bringing an earlier one to it)
* `reader` (read only, for any process), `recovery` (opening the files after a stop or a crash)
* `queue` (what is not committed yet), `staging` (plans where a group is written), `directory` (the files as
  threads use them, and those to delete), `log` (writes the groups)
* `contents` (what a stream has stored), and the policies that read it: `segment_limits`, `message_limits`
  and `dedup` (recent message ids)
* `stream` (appends, commits and drops; nobody else changes the log)
* `pace` and `committer`: group commit in threads of a `Runtime`, and when a group begins
* `store` (all streams of a data directory), `verify` (checks and repairs a stopped one)
"""
