"""What listeners share: sockets, flow control, limits of connections and memory, fair turns, HTTP."""
