"""The sockets of the embedded broker: listeners, and one Connection per client.

batch                            acknowledgements that wait for commits
requests                         the operations on streams
publishing, control, handshake   packets and what they do
turns                            what costly packets get of a turn of the event loop
connection                       one client; `websocket` and `tls` are its ways in
clients                          what an operator may ask about them
lane                             all clients
"""
