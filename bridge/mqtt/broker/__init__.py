"""The state of MQTT: who subscribes to what, what each is to be sent, and what of it survives a restart.

store                    what the broker needs of the streams
message, headers         a message on its way; what a stream keeps of it
outbox, sessions         what a subscriber is to be sent; one client's state
records, journal, marks  what of that survives, and from where streams are searched at a start
retained                 the newest message of a topic
router                   where a message goes
recovery                 what the journal says at a start
"""
