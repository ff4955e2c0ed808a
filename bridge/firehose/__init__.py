"""The API of Amazon Data Firehose, for unmodified clients of any AWS SDK.

settings     the section [firehose] of the configuration
frontend     the listener: a request's signature, its operation, its answer
signature    AWS Signature Version 4, as the side that checks it
replies      answers and errors in JSON 1.1

The operations are in `bridge.operations.deliveries`; HTTP itself is in `bridge.net.httpserver`.
"""
