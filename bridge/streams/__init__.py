"""Persistent streams: the storage core. It knows nothing of MQTT, JSON or AWS.

What it promises
----------------
* A message is *committed* when the file system has its whole commit group; with `flush_on_write`,
  when fdatasync has returned. `Stream.after_commit` notifies the caller, in the order of the calls.
* The sequence numbers of a stream are contiguous from 0. They are never reused and never reset.
* Bytes that fail their check are never returned. A torn tail is cut off after the last good frame. A
  damaged segment is reported and quarantined, and its good frames are kept.
* Only one process writes (it holds a lock on the data directory); any number may read.

Layout on disk
--------------
    <data_dir>/format                         the version of the format, see `formats.py`
    <data_dir>/lock/                          held (flock) by the writing process
    <data_dir>/clock                          the age timeline of all streams, see `bridge.clock`
    <data_dir>/keys/                          keys of encrypted streams, see `bridge.encryption`
    <data_dir>/streams/<directory>/           one per stream, named as in `layout.py`
        meta.0, meta.1                        two copies of the definition, see `meta.py`
        <first sequence number>.seg           segments, see `segment.py`
        <first sequence number>.idx           index of a closed segment; rebuilt if missing
        drops.log                             which numbers were dropped, and why, see `drops.py`
        quarantine/                           damaged files, kept for inspection
    <data_dir>/memory                         a link to `gateway.memory_dir`: there, each memory stream has
                                              a second directory, with its segments and `drops.log`

Other parts of the gateway keep these in the same directory:

    <data_dir>/exports/                       positions of exports, see `bridge.export.cursor`
    <data_dir>/consumers/                     positions of consumers, see `bridge.consumers.journal`
    <data_dir>/mqtt/sessions.journal          sessions, retained messages, see `bridge.mqtt.broker.journal`
    <data_dir>/streambridge.sock              the socket of the command line, see `bridge.control`

Modules, from the bottom up (`make lint` enforces the order):

* `layout` (names, system calls), `sums` (checksums of many long parts of a file), `segment` and `meta` (byte
  layouts of segments and definitions), `headers` (of a message), `drops` (the record of drops), `sealing`
  (encrypts and decrypts frames)
* `formats` (the version of the format, and upgrades from earlier ones)
* `reader` (read only, for any process), `recovery` (opens the files after a stop or a crash)
* `queue` (uncommitted messages), `staging` (plans where a group is written), `directory` (the files that
  threads share, and those to delete), `log` (writes the groups)
* `contents` (what a stream has stored), and the policies that read it: `segment_limits`, `message_limits`
  and `dedup` (recent message ids)
* `stream` (appends, commits and drops; no other module changes the log)
* `pace` (decides when a group begins) and `committer` (commits groups in threads of a `Runtime`)
* `store` (all streams of a data directory), `verify` (checks and repairs the directory of a stopped service)
"""
