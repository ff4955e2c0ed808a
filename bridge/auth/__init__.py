"""Plugins that decide who may log in, and who may publish and subscribe where.

    settings     the section [auth] of the configuration
    supervisor   `Auth`: asks, waits no longer than `timeout`, and keeps the child process running
    worker       the child process, which calls the hooks in threads
    wire         the messages between them

What it promises:

* A plugin that is slow, hangs or crashes stops no logged-in client. It runs in a separate process, and only
  the connection that waits for an answer is paused.
* If no answer comes in time, the client is refused. It may try again; the refusal is not remembered for long.
* At most `pending` logins wait; one more is refused at once. Questions about topics take turns of their own.
  So a client that publishes on many topics delays neither logins of others nor questions of other users.
* The child is killed if it does not answer for long, and restarted after its end, with backoff.
* Plugins can add users and remove rights. They are never asked about users in `mqtt.users_file`, their users
  cannot have a name from there, and they cannot allow what the rules deny.
"""
