"""Every crash state: what a power cut may leave of a real run is rebuilt, started and checked.

The way is that of ALICE ("All File Systems Are Not Created Equal", Pillai et al., OSDI 2014, section 3):
the system calls of a real run are recorded, a model of a file system says which states of the disk a crash
may leave at each point of the recording, and the real code is started on each of them.

What is recorded (`record`, `trace`)
------------------------------------
`strace -f` of `streambridge run` with its worker, while real MQTT clients publish: every call that changes
a file or syncs one, with all of its data, and what the service writes to its clients. So one log has both
the effects and the acknowledgements, in the order in which they happened: a PUBACK counts from the moment
at which the call that sends it begins; a sync counts when its call has returned, and covers only what had
returned when it began. Steps that have no packet of their own (a purge that was answered, two quiet seconds
in which everything gets synced) are marked in the log by a message that is acknowledged. The destination of
exports is a plugin that notes in a file outside the disk what it is sent and what it accepts.

Which states a model allows (`filesystem`)
------------------------------------------
A crash may come between any two events. Of what is not synced then, a model says what may be on the disk:

    killed       All of it: the process is killed, and the machine runs on.
    ordered      ext4 with data=ordered, XFS. Names and truncations reach the disk in their order (one
                 journal); a rename is atomic. Data reaches it in any order, by sectors of 512 bytes. A
                 file's size follows its data where blocks are new (ext4 writes the data of new blocks
                 before it commits the size that shows them, XFS sets the size when the write has ended), so
                 a file may lag behind its writes, long after later renames (delayed allocation). Within a
                 block that was there, the size may come first, and zeros stand where the data should be. A
                 size is never ahead of the names that were changed before it. fsync of a file commits the
                 journal up to the file's last change, fdatasync up to its last change of size or its
                 creation; fsync of a directory up to its last change of a name.
    writeback    ext4 with data=writeback: as above, but a size may be ahead of the data in new blocks too.
                 They hold zeros, or what another file has left there.
    no journal   ext2, ext4 without a journal, as strict as POSIX: names, sizes and data in any order. A
                 rename is two changes: the new name, and the end of the old one. A name is on the disk only
                 when its directory was synced after it was given.

ext4's own care for a file that is renamed over another (auto_da_alloc) is not assumed. Not modelled: a disk
that lies about its cache, bits that flip, metadata that a file system itself loses (fsck), btrfs' log tree.

How many there are
------------------
At each point: what is synced with nothing else, with everything else, with every prefix of the names, with
one file or one sector alone or missing. If all combinations are few, all of them; if they are more, a
sample is drawn from a seed that is printed, without repetition: a state counts once, as often as it is met.
A state that is met again when more has been acknowledged is judged again.

What is checked (`check`, `judge`)
----------------------------------
* The service starts: the store opens, every stream is there that was answered for, and takes a message.
* With `flush_on_write` each message that was acknowledged is there, unless it was dropped on purpose;
  without it, each that was acknowledged before the last quiet time, and nothing else is promised.
* Numbers are contiguous, but for recorded drops; each number has the message that the run gave to it. What
  a loss is recorded for was not promised.
* What was purged, and answered, is not back.
* A second start finds the same and nothing to repair, and `verify` finds nothing wrong after it. Before the
  first start, `verify` reads any state without an error of its own.
* A cursor is never ahead of what the destination has accepted, knows of everything that was sent (after a
  power cut not with `by_record`; then no number that was sent is given again), has the
  boundaries of a batch that is under way, and names why it has skipped a number. No number that was sent is
  given again.
* Sessions, retained messages and messages that wait for a subscriber are there as of the last quiet time. A
  QoS 2 client that goes on where it was loses no message: neither one that was under way, nor one whose id
  was used before.
"""
