"""Consumers: exports whose destination is the clients that fetch messages and acknowledge each.

A consumer is an entry of the kind `consumer` in a stream's exports. Its position is kept here, in the process
that writes the streams, since that answers the clients; no worker process is involved.

One message's life
------------------
    not delivered --fetch--> leased --ack--------------------------> settled
                              ^  |---terminate, too often delivered-> settled (rejected, dead letter)
                              |  |---dropped by a limit or a purge--> settled (skipped)
                              +--+ deadline passed, nack, fetched again

A position is a set of numbers, the settled ones, as ranges: messages are acknowledged in any order. Below the
`frontier` each number is settled or leased, so there are at most as many holes as leases.

What it promises
----------------
1. A message is delivered until it is settled: at least once. A lease, an acknowledgement, a nack and an
   extension are on the disk (fdatasync) before their reply is sent, as the boundaries and the positions of
   exports are. Requests at the same time share a sync.
2. A leased message is not delivered again before its deadline, also after a crash or a power cut. The age
   timeline (`bridge.clock`) counts deadlines. After a reboot or if that is lost, a message may come later: at
   most its whole lease again.
3. The number of deliveries never forgets one that a client has received. It may count one whose reply was
   lost.
4. At most `max_unacknowledged` messages are leased, so the position has at most that many holes. Then new
   messages wait until some are settled; expired ones are still delivered.
5. A message beyond `max_deliveries`, or terminated, is in the dead-letter stream before it is settled. If
   that stream does not accept it, it stays leased, and this is tried again.
6. With retention "exported", nothing is freed that is not settled on the disk.
7. Only the client that holds a lease can shorten or extend it. An acknowledgement counts from whomever, also
   after the deadline: the work is done.

Modules, each importing only those above it:

    position   the state of one consumer and its changes: no files, no clock
    journal    the file of the changes
    consumer   one consumer: fetch, acknowledge, dead letters
    consumers  all consumers of the streams
"""
