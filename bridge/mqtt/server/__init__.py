"""The embedded broker's server: sockets to packets, and the broker's answers to bytes.

connection, states, handshake    one client, from its CONNECT to its end
connections                      all of them together: limits, guests
server                           the listeners
tls, websocket                   transports
requests, clients                operations on streams over MQTT; what the command line asks about clients
"""
