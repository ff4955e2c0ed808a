"""What an operator does to exports by hand, and what is promised of it.

A paused export makes no attempt once the one under way has ended, whatever else happens: a kill, a power cut,
a reload that moves its start. It goes on when it is resumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.objectkeys import parse_key

if TYPE_CHECKING:
    from .world import World

LAST = 2.0  # s that the attempt under way may take


class Hands:
    """The operator of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._paused: dict[str, float] = {}  # by stream: since when, as a reply has said
        self._asked: set[str] = set()  # streams whose exports may be paused

    def rest(self, stream: str) -> None:
        """Pause the exports of a stream."""
        self._asked.add(stream)

        def done(answer: dict[str, Any]) -> None:
            if answer.get("status") == 0 and stream in self._asked and not self.world.checks.lied:
                self._paused[stream] = self.world.kernel.now

        self.world.appender.ask("pauseExports", {"name": stream}, done)

    def resume(self) -> None:
        """Resume all exports."""

        def done(stream: str, answer: dict[str, Any]) -> None:
            if answer.get("status") == 0:
                self._asked.discard(stream)

        self._paused.clear()
        for stream in sorted(self._asked):
            self.world.appender.ask(
                "resumeExports", {"name": stream}, lambda answer, stream=stream: done(stream, answer)
            )

    def at_rest(self) -> None:
        """All faults have ended: nothing stays paused."""
        for _ in range(10):
            self.resume()
            if self.world.kernel.run(lambda: not self._asked, 1.0):
                return
            self.world.ensure()
        self.world.checks.broken(f"exports of {sorted(self._asked)} cannot be resumed")

    def attempted(self, request: str, options: dict[str, Any]) -> None:
        """A request to the cloud begins."""
        stream = None
        if request == "put_object" and (name := parse_key(options["Key"])) is not None:
            stream = name.stream
        elif request in ("put_records", "put_record_batch"):
            stream = "odd" if options.get("StreamName") == "odd" else "kin"
        since = self._paused.get(stream or "")
        if since is not None and self.world.kernel.now > since + LAST:
            self.world.checks.broken(
                f"{stream}: its exports are paused since {self.world.kernel.now - since:.1f} s, and send"
            )
