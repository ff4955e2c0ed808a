"""The protocol of AWS IoT Greengrass Stream Manager, for unmodified clients of the AWS SDKs.

frontend.py    the listeners (TCP, unix socket), the token, the stop
connection.py  one client: framing, handshake, requests and replies, the end with FIN
operations.py  requests and results in the SDK's terms; extensions stay out of sight
wire.py        frames and replies as bytes
"""

from bridge.greengrass.frontend import GreengrassFrontEnd as GreengrassFrontEnd
