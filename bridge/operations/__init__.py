"""Operations: what can be asked of the streams, whatever the transport.

    catalog    each operation, declared once: its name, its request, the right it needs, its result
    manager    the StreamManager, which carries them out
    reading, waiting   reads, and those that wait for messages
    allow      what a definition from a client may contain
    codec      requests and replies as JSON and CBOR
    audit      the log line of a change, and what a disk that refuses one answers

A front end turns bytes into `Operations.call` and the result into bytes. Rights are checked and changes are
logged in there, and nowhere else.
"""
