"""The state of MQTT: sessions, subscriptions, what each client is to be sent, and what survives a restart.

No sockets and no event loop: time and threads come from a `bridge.runtime.Runtime`, packets come as values,
and what is sent goes to a `Line`. Only the journal touches files.

broker                        what a connection calls; sessions in their life, wills, subscriptions
publishing, inbox, router     what becomes of a PUBLISH; when it is answered; where it goes
outbox, sessions, retained    what a subscriber is to be sent; one client's state; newest messages of topics
message, store, line          a message on its way; what the broker needs of streams and of connections
turns, reports                fairness between clients; counters and log
journal, records, journalfile, replay, recovery
                              what survives: which records, their layout, their file, what a start makes of it
"""
