"""Plugins that decide who may log in, and who may publish and subscribe where.

    settings     the section [auth] of the configuration
    supervisor   `Auth`: asks, waits no longer than `timeout`, and keeps the child process running
    worker       the child process, which calls the hooks in threads
    wire         the messages between them

What it promises:

* A plugin that is slow, hangs or crashes stops no client that is logged in: it runs in a process of its own,
  and only the connection that waits for an answer is not read meanwhile.
* No answer in time is a refusal. The client may try again; nothing of the refusal is remembered for long.
* At most `pending` questions wait; one more is refused at once.
* The child is killed if it answers nothing for long, and started again when it has ended, with backoff.
* Plugins add users, and take away rights: they are never asked about users in `mqtt.users_file`, their users
  may not have a name from there, and what the rules deny they cannot allow.
"""
