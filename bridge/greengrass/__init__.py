"""The protocol of AWS IoT Greengrass Stream Manager, for unmodified clients of the AWS SDKs.

settings     the section [greengrass] of the configuration
frontend     the listener, the token, the stop
connection   one client: framing, handshake, requests and replies, the end with FIN
operations   requests and results in the SDK's terms; our extensions are hidden
wire         frames and replies as bytes
"""
