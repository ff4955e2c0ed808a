"""What exporters are made with. Public: plugin authors import it, most of it from `bridge` itself.

api                   Exporter, its configuration, batches and outcomes
hooks                 the hooks that a plugin may implement
discovery             how plugins are found, loaded and asked
allow                 what a client's definition may reach
aws                   clients with the gateway's credentials, and what errors mean
firehose, heads, keys, uploads   what several exporters share
testing               the contract as tests, for a plugin's own test suite
"""
