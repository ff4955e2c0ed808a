"""Other brokers: their messages come into the streams.

link          whether there is a connection to it, and why not
subscribing   which subscriptions our session there has
external      the messages, and their acknowledgement after the commit
"""
