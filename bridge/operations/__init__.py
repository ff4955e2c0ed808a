"""Operations: the requests on streams, independent of the transport.

    catalog    each operation, declared once: its name, its request, the right it needs, its result
    bindings   which streams a message on a topic is appended to
    definitions    reads a stream's definition, and gives the store its part of it
    manager    the StreamManager, which carries them out
    reading    reads
    waiting    reads that wait for messages
    validate   rules for definitions that types cannot express
    allow      what exports in a client's definition may reach
    codec      requests and replies as JSON and CBOR
    deliveries, destinations    the operations of the Firehose API, on the same streams

A front end turns bytes into `Operations.call`, and the result into bytes. Only this package checks rights and
logs changes.
"""
