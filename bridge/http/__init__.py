"""The HTTP interface: a status page for people, metrics, health checks and requests for programs.

    /               the page: one document, nothing loaded from elsewhere
    /metrics                the state for Prometheus      /*.json   what the page shows: `documents`
    /healthz                200 while alive and able to store
    /readyz                 200 while messages are accepted
    /login, /logout         sessions of browsers: `visitors`
    /requests/<operation>   operations: `requests`

What it promises:
* GET and HEAD change nothing. On this machine they need no login. From another machine, the page and its
  documents need a login once there are users. Metrics and health checks never do.
* Only POST changes something: below `/requests/`, for a user with a password or session, with that user's
  rights.
* The size of a document is bounded: 200 streams and 5,000 clients cost no more than one page of them.
* Web pages of other sites cannot read it: no CORS, and requests whose Host is not a name of this machine are
  refused (DNS rebinding).
* It does not block the event loop: threads access the disk and write long texts, and an answer is reused
  while a new one would cost too much.

Modules, each importing only those before it: `state` (what is shown), `history`, `events` and `clients` (the
last hour, the log, the devices), `observer` (collects all of it), `visitors` (who asks), `documents` (JSON),
`requests` (operations), `frontend` (routes). `metrics` writes a state for Prometheus. HTTP itself is in
`bridge.net.httpserver`. The page is in `page/`; its scripts are joined into one without a build step.
"""
