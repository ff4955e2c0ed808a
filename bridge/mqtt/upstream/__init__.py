"""Other brokers: their messages come here, and are acknowledged there once they are stored.

upstream      one broker: connection, order, acknowledgement after the commit
client        connects, and speaks the packets of a client
subscribing   the subscriptions of our session there
intake        where the messages go: into the embedded broker, or in mode "external" into the streams
requests      operations that clients of an external broker ask for
link          whether there is a connection, and if not, why
"""
