"""Packets and properties of MQTT 3.1, 3.1.1 and 5: bytes to values and back. Pure functions.

properties   the properties of MQTT 5
packets      the packets that clients send; names of reason codes, and which packet may carry which
answers      the packets with reason codes that the server sends
"""
