"""`Auth`: the service's side of the plugins that decide logins and rights.

A question has these states:

    queued    it waits for its turn, by network and name: logins in one queue, in which networks that have
              logged in keep half; topics in another, so that they do not wait in front of logins
    waiting   the child is not ready yet
    sent      the child has it
    answered  the caller has continued: with the answer, or because the time is over, the child has ended,
              or the service stops

Everything here runs on the event loop. See `bridge.auth` for what it promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bridge import frames, process
from bridge.access.guesses import AT_A_TIME, Guesses, key_of
from bridge.access.remembered import remember
from bridge.auth import wire
from bridge.auth.settings import AuthSettings
from bridge.net.addresses import network_of
from bridge.net.fairqueue import FairQueue
from bridge.plugin.auth import Accepted, Denied, Login, Question

QUIET_AFTER = 60.0  # seconds; a child that has lived this long resets the backoff
MAX_RESTART = 30.0
HANGS = 5  # time-outs without any answer after which the child is killed
SHARE = 8  # a network without an earlier login gets at most 1/SHARE of `auth.pending`

log = logging.getLogger("bridge.auth")


class Known(NamedTuple):
    """A client that a plugin has accepted."""

    user: str
    expires: float | None
    plugin: str
    basis: str


class Refusal(NamedTuple):
    """Why a client is refused; `busy`: it may try again."""

    why: str
    busy: bool = False


class Auth:
    """Asks the plugins. Without plugins it answers nothing and starts no process."""

    def __init__(
        self,
        settings: AuthSettings = AuthSettings(),  # noqa: B008 - immutable
        plugin_dirs: Sequence[Path] = (),
        authorizers: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`authorizers` gives the names of the plugins that have the hook `authorize`."""
        self.settings, self._plugin_dirs, self._authorizers = settings, list(plugin_dirs), authorizers
        self._asked: dict[int, tuple[asyncio.Future[wire.Answer], wire.Ask]] = {}
        self._number = 0
        self._ready = False
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # cancelled ones, whose children may still exist
        self._guesses = Guesses()
        self._logins, self._topics = FairQueue(settings.threads), FairQueue(settings.threads)
        self._queued: Counter[str] = Counter()  # logins by network, until there is an answer
        self._networks: dict[str, None] = {}  # that have logged in, the last one at the end
        self._unheard: float | None = None  # since when the child has a question and has been silent
        self._bases: dict[str, frozenset[str]] = {}  # by plugin
        self._asking: set[asyncio.Task[wire.Answer]] = set()  # questions that have their turn
        self._stopping = False
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def active(self) -> bool:
        """Whether plugins decide logins."""
        return bool(self.settings.plugins)

    @property
    def waiting(self) -> int:
        """How many logins wait for an answer."""
        return self._queued.total()

    @property
    def authorizes(self) -> bool:
        """Whether plugins decide about topics."""
        return self.active and bool(self._authorizers() & self.settings.plugins.keys())

    async def start(self) -> None:
        """Start the child, if there are plugins, and keep it running."""
        if self.active:
            self._task = asyncio.create_task(self._supervise(), name="auth supervisor")

    async def stop(self) -> None:
        """Refuse waiting logins, and end the child."""
        self._stopping = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._ending.add(task)
        if self._ending:
            await asyncio.wait(self._ending)
        self._ending.clear()
        self._nobody_answers()
        if self._asking:
            await asyncio.wait(self._asking)

    def reload(self, settings: AuthSettings) -> None:
        """From now on, ask other plugins or with other options, in a new child."""
        if settings != self.settings:
            self.settings = settings
            self._logins, self._topics = FairQueue(settings.threads), FairQueue(settings.threads)
            if (old := self._task) is not None:
                old.cancel()
                self._ending.add(old)
                old.add_done_callback(self._ending.discard)
            self._task = asyncio.create_task(self._supervise(), name="auth supervisor")

    def bases(self) -> dict[str, frozenset[str]]:
        """Return the current bases of each plugin. It may read files."""
        found = {}
        for name, options in self.settings.plugins.items():
            try:
                found[name] = frozenset(options.bases())
            except Exception as error:  # a plugin's code must not break a reload
                log.error("%s: whom it has let in stays connected: %r", name, error)
                found[name] = self._bases.get(name, frozenset())
        self._bases = found
        return found

    # -- questions ------------------------------------------------------------

    async def log_in(self, login: Login) -> Known | Refusal:
        """Return who a client is. The answer to a wrong guess is delayed, each time longer.

        A client that disconnects still counts until its answer would have been sent, so parallel guesses are
        no faster.
        """
        network = network_of(login.address)
        key = key_of(network, login.user)
        if why := self._full(network):
            return Refusal(why, True)
        if not self._guesses.begin(key):
            return Refusal(f"{AT_A_TIME} logins of {login.user!r} from this address are being checked", True)
        loop = asyncio.get_running_loop()
        began, delay = loop.time(), 0.0
        try:
            answer = await self._counted(login, network)
            verdict = answer.verdict
            if answer.error:
                return Refusal(f"{answer.plugin or 'plugins'}: {answer.error}", True)
            if isinstance(verdict, Accepted) and verdict.user:
                self._guesses.right(network)
                remember(self._networks, network, None)
                return Known(verdict.user, verdict.expires, answer.plugin, verdict.basis)
            delay = began + self._guesses.wrong(network) - loop.time()
            await asyncio.sleep(delay)
        finally:
            self._guesses.end(key, began + delay - loop.time() if delay > 0 else 0.0)
        why = verdict.why if isinstance(verdict, Denied) else "no plugin knows this login"
        return Refusal(f"{answer.plugin or 'plugins'}: {why}")

    def _full(self, network: str) -> str:
        """Return why no more logins of a network may wait; empty if one may."""
        most, waiting = self.settings.pending, self.waiting
        if waiting >= most:
            return f"{waiting} clients wait; see auth.pending"
        share = max(most // SHARE, 1)
        if network not in self._networks and self._queued[network] >= share:
            return f"{share} clients of this address wait, and none has logged in yet; see auth.pending"
        return ""

    async def _counted(self, login: Login, network: str) -> wire.Answer:
        """Ask about a login, which counts towards `auth.pending` until there is an answer."""
        self._queued[network] += 1
        try:
            known = network in self._networks
            return await self._in_turn(self._logins, network, login.user, login, None, known=known)
        finally:
            self._queued[network] -= 1
            if not self._queued[network]:
                del self._queued[network]

    async def _in_turn(
        self,
        turns: FairQueue,
        network: str,
        user: str | None,
        login: Login | None,
        topic: Question | None,
        *,
        known: bool = False,
    ) -> wire.Answer:
        """Ask when it is the turn of this question, if that comes in time."""
        seconds = self.settings.timeout / 1000
        until = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await turns.wait(network, user or "", known=known)
        except TimeoutError:
            return wire.Answer(0, error=f"no turn in {seconds:g} s; see auth.timeout and auth.threads")
        # A client that disconnects does not return its turn, because the plugins are still busy with it.
        asking = asyncio.create_task(self._ask(login, topic, until))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asking.add_done_callback(lambda _: turns.done())
        return await asyncio.shield(asking)

    async def allows(self, question: Question) -> bool | None:
        """Return whether a client may do what the rules allow; None without an answer.

        A connection asks one question at a time, so the connections bound how many wait.
        """
        network = network_of(question.address)
        answer = await self._in_turn(self._topics, network, question.user, None, question)
        if answer.error:
            log.warning("%s on %.200r refused: %s", question.action, question.topic, answer.error)
            return None
        return answer.allowed is not False

    async def _ask(self, login: Login | None, topic: Question | None, until: float) -> wire.Answer:
        """Wait for an answer until `until`. Its `error` says why there is none."""
        self._number += 1
        ask = wire.Ask(self._number, login, topic, until)
        if self._stopping:
            return wire.Answer(ask.number, error="the gateway stops")
        future: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._asked[ask.number] = future, ask
        if self._ready:
            self._send(ask)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await future
        except TimeoutError:
            seconds = self.settings.timeout / 1000
            self._kill_if_it_hangs()
            return wire.Answer(ask.number, error=f"no answer in {seconds:g} s; see auth.timeout")
        finally:
            self._asked.pop(ask.number, None)

    def _send(self, ask: wire.Ask) -> None:
        assert self._writer is not None
        self._writer.write(frames.encode(ask))
        self._unheard = self._unheard or time.monotonic()

    def _kill_if_it_hangs(self) -> None:
        if self._unheard is None or self._process is None or not self._ready:
            return
        silence = time.monotonic() - self._unheard
        if silence > HANGS * self.settings.timeout / 1000:
            log.error("the auth process has not answered for %.1f s; killing it", silence)
            self._ready = False
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # -- the child's life ------------------------------------------------------------

    async def _supervise(self) -> None:
        failures = 0
        if self._ending:
            await asyncio.wait(self._ending)
        while self.active:
            began = time.monotonic()
            try:
                await self._run()
            except (OSError, msgspec.MsgspecError) as error:
                log.error("the auth process cannot be used: %s", error)
            self.restarts += 1
            failures = 0 if time.monotonic() - began > QUIET_AFTER else failures + 1
            await asyncio.sleep(min(0.125 * 2**failures, MAX_RESTART))

    async def _run(self) -> None:
        """Start a child, and serve it until it ends."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "bridge.auth.worker", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=process.child_environment(),
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
            plugins = {
                name: msgspec.to_builtins(one, enc_hook=str) for name, one in self.settings.plugins.items()
            }
            level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
            hello = wire.Hello(self._plugin_dirs, plugins, self.settings.threads, level)
            self._writer.write(frames.encode(hello))
            received = frames.Frames(wire.FROM_WORKER)
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(64 * 1024):
                    for message in received.feed(data):
                        self._handle(message)
            log.warning("the auth process has ended; a new one is started")
        finally:
            self._ready, self._unheard = False, None
            if self._writer is None:
                ours.close()
            else:
                self._writer.transport.abort()
                self._writer = None
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
                self._process = None
            self._nobody_answers()

    def _nobody_answers(self) -> None:
        for number, (future, _) in self._asked.items():
            if not future.done():
                future.set_result(wire.Answer(number, error="the auth process has ended"))

    def _handle(self, message: wire.Ready | wire.Answer) -> None:
        self._unheard = None
        if isinstance(message, wire.Ready):
            for error in message.errors:
                log.error("plugin not asked: %s", error)
            self._ready = True
            for _, ask in self._asked.values():
                self._send(ask)
            return
        if message.error:
            log.warning("plugin %s: %s", message.plugin, message.error)
        future, _ = self._asked.get(message.number, (None, None))
        if future is not None and not future.done():
            future.set_result(message)
