"""The HTTP door: a status page for people, metrics and health checks for programs. Read only.

    /               the page: one document, nothing from elsewhere
    /status.json    what is now                       /metrics   the same for Prometheus
    /history.json   the last hour in steps of 5 s     /healthz   200 while alive and able to store
                                                      /readyz    200 while messages are taken in

What it promises:
* Looking changes nothing: only GET and HEAD, no cookies, no state of a client.
* A web page of somebody else cannot read it: no CORS, and requests whose Host is a name that is not
  this machine's are refused (DNS rebinding).
* The event loop is not held up: the disk is asked in threads, long texts are written in threads, and
  an answer is used again for as long as it would cost too much to make it anew.

Modules, each knowing only those before it: `state` (what is shown), `observer` (gathers it), `frontend`
(routes). `bridge.http.metrics` writes a state for Prometheus. HTTP itself is in `bridge.net.httpserver`.
"""

from bridge.http.frontend import HttpFrontEnd

__all__ = ["HttpFrontEnd"]
