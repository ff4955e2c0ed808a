"""The HTTP interface: a status page for people, metrics, health checks and requests for programs.

    /               the page: one document, nothing loaded from elsewhere
    /status.json    the current state                 /metrics   the same for Prometheus
    /history.json   the last hour in steps of 5 s     /healthz   200 while alive and able to store
    /requests/<operation>   see `requests`            /readyz    200 while messages are accepted

What it promises:
* Looking changes nothing: GET and HEAD, no cookies, no state per client.
* Only POST changes something: below `/requests/`, for a user with a password, and with that user's rights.
* Web pages of other sites cannot read it: no CORS, and requests whose Host is not a name of this machine are
  refused (DNS rebinding).
* It does not block the event loop: threads access the disk and write long texts, and an answer is reused
  while a new one would cost too much.

Modules, each importing only those before it: `state` (what is shown), `observer` (collects it), `requests`
(operations), `frontend` (routes). `metrics` writes a state for Prometheus. HTTP itself is in
`bridge.net.httpserver`.
"""
