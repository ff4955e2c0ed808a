"""The control socket: how the command line asks the running service.

`<data_dir>/streambridge.sock` is open to this user alone (mode 0600), so that whoever reaches it is root or
the service's own user. It asks for no token, and its callers are trusted (`bridge.access.rules`).

    connection  = requests from the client, one reply to each from the service, in order
    request     = length u32 big-endian | operation: length u8, ASCII | body
    reply       = length u32 big-endian | body

Lengths do not count themselves. Bodies are those of `bridge.operations.codec`. A frame of more than 64 MiB
ends the connection.
"""

SOCKET = "streambridge.sock"
HEADER = 4
LARGEST = 64 * 1024 * 1024
