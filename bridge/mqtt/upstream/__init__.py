"""Other brokers: their messages come here, and are acknowledged there once they are stored.

upstream      one broker: connection, order, acknowledgement after the commit
client        paho, as an upstream needs it: connecting, and messages as PUBLISH packets
subscribing   which subscriptions our session there has
intake        where the messages go: into the embedded broker, or in mode "external" into the streams
requests      operations that clients of an external broker ask for
link          whether there is a connection to it, and why not
"""
