"""Shared by all listeners: sockets, flow control, limits of connections and memory, a fair queue, HTTP."""
