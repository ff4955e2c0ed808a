"""Consumers: exports whose destination is the clients that fetch and acknowledge messages.

A consumer is an entry of the kind `consumer` in a stream's exports. Its position is kept in the process that
writes the streams, because that process answers the clients; the export worker is not involved.

One message's life
------------------
    not delivered --fetch--> leased --ack--------------------------> settled
                              ^  |---terminate, too often delivered-> settled (rejected, dead letter)
                              |  |---dropped by a limit or a purge--> settled (skipped)
                              +--+ deadline passed, nack, fetched again

A position is a set of numbers, the settled ones, as ranges: messages are acknowledged in any order. Below the
`frontier` each number is settled or leased, so there are at most as many gaps as leases.

What it promises
----------------
1. A message is delivered until it is settled: at least once. A lease, an acknowledgement, a nack and an
   extension are on the disk (fdatasync) before their reply is sent, as the boundaries and the positions of
   exports are. Requests at the same time share a sync.
2. A leased message is not delivered again before its deadline, even after a crash or a power cut. Deadlines
   are on the age timeline (`bridge.clock`). After a reboot, or if the timeline is lost, a message may come
   later, by at most the length of its lease.
3. The number of deliveries includes each one that a client has received. It may include one whose reply was
   lost.
4. At most `max_unacknowledged` messages are leased, so the position has at most that many gaps. At this
   limit, new messages wait until some are settled, while messages with expired leases are still delivered.
5. A message beyond `max_deliveries`, or terminated, is in the dead-letter stream before it is settled. If
   that stream does not accept it, it stays leased, and this is tried again.
6. With retention "exported", only messages that are settled on the disk are freed.
7. Only the client that holds a lease can shorten or extend it. An acknowledgement from any client counts,
   even after the deadline, because the work is done.

Modules, each importing only those above it:

    position   the state of one consumer and its changes: no files, no clock
    journal    the file of the changes
    consumer   one consumer: fetch, acknowledge, dead letters
    consumers  all consumers of the streams
"""
