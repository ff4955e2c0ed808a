"""The state of MQTT: sessions, subscriptions, queued and retained messages, and the journal of all this.

It uses no sockets and no event loop. Time and threads come from a `bridge.runtime.Runtime`, packets come as
values, and output goes to a `Line`. Only the journal touches files.

broker                        the methods that a connection calls; life of sessions, wills, subscriptions
publishing, inbox, router     what happens to a PUBLISH; when it is answered; where it goes
outbox, sessions, retained    the queue of a subscriber; the state of a client; retained messages
message, store, line          a message on its way; streams and connections as the broker uses them
joined                        our session at another broker
turns, reports                fairness between clients; counters and log
journal, records, journalfile, replay, recovery
                              the journal, its records, its file, and how a start reads it
"""
