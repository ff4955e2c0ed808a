"""The steps that a plan is made of, and how each is told."""

from __future__ import annotations

from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step; `wait` in seconds after it."""

    do: str
    arguments: tuple[Any, ...] = ()
    wait: float = 0.0

    def words(self) -> str:
        text = WORDS[self.do]
        return text.format(*self.arguments)


WORDS = {
    "publish": "device {0} publishes {1} messages on {2} with QoS {3}",
    "append": "client asks to append {0} messages with ids to the stream ids, again after a lost answer: {1}",
    "drop": "the connection of device {0} breaks",
    "leave": "device {0} goes away (with DISCONNECT: {1})",
    "come": "device {0} comes back",
    "subscriber": "the subscriber goes away or comes back",
    "kill": "the service is killed {0} {1}",
    "cut": "the power is cut {0} {1}",
    "stop": "the service is stopped, and started",
    "worker": "the export worker is killed {0} {1}",
    "link": "the link to the cloud is down: {0}",
    "breaks": "the link works, and breaks after {0} requests to {1}",
    "faults": "{0:.0%} of the requests to the cloud fail, of each kind",
    "late": "a request that was under way arrives",
    "syncs": "the next {0} syncs fail (of files with '{1}' in their path)",
    "refuse": "the disk has no room for the next {0} writes (to files with '{1}' in their path)",
    "lie": "syncs do nothing: {0}",
    "full": "the disk is full: {0}",
    "slow": "a sync takes up to {0} s",
    "lag": "a sync of files with '{1}' in their path takes up to {0} s",
    "repair": "the disk and the link work",
    "backup": "the data directory is copied",
    "restore": "the service is killed, and its data directory is what was copied",
    "clock": "the wall clock jumps by {0:.0f} s",
    "revoke": "a reload takes the rights of device {0} on {1}, or gives them back",
    "purge": "a client purges the stream both",
    "drain": "a client purges what it has read of the dead letter stream",
    "repeat": "client asks again to append {0} messages that were answered long ago",
    "off": "the service ends ({1}), and nothing happens for {0:.0f} s",
    "recreate": "a client deletes the stream fresh, and creates it",
    "ntp": "the wall clock is set right",
    "pause": "nothing happens for {0:.0f} s, and somebody looks",
    "span": "something begins whose time is limited ({0}), {1} after {2:.0%} of it, and a look at {3:.0%}",
    "room": "the disk works, and a client fills the stream exact until it takes no more",
    "retain": "device {0} publishes {1} retained messages",
    "hoard": "device {0} publishes a retained message on each of {1} topics",
    "churn": "device {0} publishes a large retained message {1} times on one topic",
    "fill": "a client fills the stream exact with {0} messages, or purges it",
    "update": "a reload changes the limits of the stream ring, and an export",
    "redefine": "a reload moves the start of the export of {0} back to {1:.0%} of what it had sent",
    "shrink": "a reload moves the start of the export of kin back to {0:.0%}, and lowers its max_size",
    "plugin": "the plugin of the stream kin is gone: {0}",
    "passwords": "a reload changes the password of device {0}",
    "attempt": "a guest from another machine asks for {0}, which he has no right to",
    "stall": "a slow subscriber does not read: {0}",
    "flood": "device {0} publishes {1} messages of 8 KB with QoS 0 for the slow subscriber",
    "slowly": "the slow subscriber goes away or comes back",
    "hire": "worker {0} goes away or comes back",
    "rehire": "a reload moves the start of the consumer, which begins again",
    "rest": "an operator pauses the exports of {0}",
    "resume": "an operator resumes the exports",
    "member": "member {0} of a shared subscription goes away or comes back",
    "members": "all members of a shared subscription come back, or go away (come back: {0})",
    "crowd": "many members of a shared subscription come, or go away (come: {0})",
    "ingest": "an ingest run",
    "query": "a trigger of a streaming query over the landing prefix",
    "prune": "an operator prunes the landing prefix, or merges and expires files of the table",
    "harm": "somebody harms an object: {0}",
}
