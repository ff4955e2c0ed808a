"""The HTTP interface: a status page for people, metrics and health checks for programs. Read only.

    /               the page: one document, nothing loaded from elsewhere
    /status.json    the current state                 /metrics   the same for Prometheus
    /history.json   the last hour in steps of 5 s     /healthz   200 while alive and able to store
                                                      /readyz    200 while messages are accepted

What it promises:
* It changes nothing: only GET and HEAD, no cookies, no state per client.
* Web pages of other sites cannot read it: no CORS, and requests whose Host is not a name of this machine are
  refused (DNS rebinding).
* It does not block the event loop: threads access the disk and write long texts, and an answer is reused
  while a new one would cost too much.

Modules, each importing only those before it: `state` (what is shown), `observer` (collects it), `frontend`
(routes). `metrics` writes a state for Prometheus. HTTP itself is in `bridge.net.httpserver`.
"""
