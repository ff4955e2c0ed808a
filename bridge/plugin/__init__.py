"""The plugin API. Plugin authors import most of it from `bridge` itself.

api                   Exporter, its configuration, batches and outcomes
hooks                 the hooks that a plugin may implement
discovery             how plugins are found and loaded
mistakes              reports the mistakes in a plugin's module to its author
allow                 restricts what clients' definitions may reach
aws                   clients with the gateway's credentials, and the meaning of errors
firehose, keys, mqtt, reports, uploads   what exporters share
testing               the exporter contract as tests, for a plugin's own test suite
"""
