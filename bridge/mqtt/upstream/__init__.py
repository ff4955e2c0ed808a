"""Other brokers: their messages come into the streams.

trouble       the log of a connection that fails again and again
subscribing   which subscriptions our session there has
external      the messages, and their acknowledgement after the commit
"""
