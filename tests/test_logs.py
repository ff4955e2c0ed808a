"""Log lines as they reach stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from bridge import logs

Emit = Callable[..., None]


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(output: io.StringIO) -> Iterator[logging.Logger]:
    """A logger that writes to `output` with windows of half a second."""
    handler = logs.CountingHandler(output, logs.LineFormatter(), window=0.5)
    logger = logging.getLogger("bridge.test_logs")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    handler.close()


def stderr_of(program: str, **env: str) -> list[str]:
    """The lines that a process writes which logs as the service does."""
    done = subprocess.run(
        [sys.executable, "-c", "import logging\nfrom bridge import logs\n" + textwrap.dedent(program)],
        env=os.environ | env,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr.splitlines()


def test_a_line_has_time_level_logger_message_and_the_ids_of_stream_and_client() -> None:
    (line,) = stderr_of("""
        logs.setup()
        logging.getLogger("bridge.mqtt").info(
            "client %s", "connected", extra={"client": "pump 1", "stream": "s"})
    """)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info bridge\.mqtt "
        r'msg="client connected" client="pump 1" stream=s',
        line,
    )


def test_as_json_a_line_is_one_object() -> None:
    (line,) = stderr_of("""
        logs.setup("info", "json")
        logging.getLogger("bridge").warning("stream is full", extra={"stream": "sensors", "dropped": 3})
    """)
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning", "logger": "bridge", "msg": "stream is full", "stream": "sensors", "dropped": 3,
    }  # fmt: skip


def test_a_line_stays_one_line_and_leaves_the_terminal_alone(
    logger: logging.Logger, output: io.StringIO
) -> None:
    logger.error("bad client", extra={"client": 'a\nmsg="forged"\x1b[2J'})
    assert output.getvalue().count("\n") == 1
    assert r'client="a\nmsg=\"forged\"\u001b[2J"' in output.getvalue()


@pytest.mark.parametrize("style", ["text", "json"])
def test_no_terminal_control_characters_reach_the_log(
    logger: logging.Logger, output: io.StringIO, style: Literal["text", "json"]
) -> None:
    logger.handlers[0].setFormatter(logs.LineFormatter(style))
    steering = "\x1b[2J\x7f\x9b2J\x85\u2028\u202egnp.exe\u2066\u200f\u061c\r\n\ud800 grün \U000e0041"
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 1, steering, (), None)
    record.client = steering
    logger.handlers[0].handle(record)  # pytest would put what is logged into its report, and fail to send it
    line = output.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert "grün" in line
    if style == "json":
        assert json.loads(line)["client"] == steering


def test_an_exception_is_one_key_and_its_traceback_is_for_debug() -> None:
    program = """
        logs.setup("{level}")
        try:
            open("/nowhere")
        except OSError:
            logging.getLogger("bridge").exception("cannot read")
    """
    (line,) = stderr_of(program.replace("{level}", "info"))
    assert "error=\"FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'\"" in line
    assert "Traceback" not in line
    (line,) = stderr_of(program.replace("{level}", "debug"))
    assert 'traceback="Traceback' in line


def test_repeated_lines_are_counted_and_the_count_is_logged_at_the_end() -> None:
    first, other, repeated = stderr_of("""
        logs.setup()
        log = logging.getLogger("bridge")
        for number in range(100):
            log.warning("cannot reach %s", "s3", extra={"stream": "a"})
        log.warning("cannot reach %s", "s3", extra={"stream": "b"})
    """)
    assert first.endswith('msg="cannot reach s3" stream=a')
    assert other.endswith('msg="cannot reach s3" stream=b')
    assert repeated.endswith('msg="cannot reach s3" stream=a repeated=99')


def test_a_flood_of_lines_that_differ_in_a_value_only_is_cut_short_and_counted() -> None:
    lines = stderr_of("""
        logs.setup()
        log = logging.getLogger("bridge")
        for number in range(1000):
            log.warning("%s closed: stream is full", f"client-{number}")
        log.warning("something else")
    """)
    assert sum("closed" in line for line in lines) == 21
    assert lines[-2].endswith('msg="something else"')
    assert lines[-1].endswith('msg="client-999 closed: stream is full" alike=980')


def test_the_count_is_logged_without_another_line_when_the_window_ends(
    logger: logging.Logger, output: io.StringIO
) -> None:
    for _ in range(3):
        logger.info("again")
    handler = next(handler for handler in logger.handlers if isinstance(handler, logs.CountingHandler))
    timer = handler.timer
    assert timer is not None
    timer.join(timeout=30)
    assert [line.split(" ", 1)[1] for line in output.getvalue().splitlines()] == [
        "info bridge.test_logs msg=again",
        "info bridge.test_logs msg=again repeated=2",
    ]


def test_the_count_has_the_time_at_which_it_is_written(logger: logging.Logger, output: io.StringIO) -> None:
    logger.info("again")
    for _ in range(2):
        again = logger.makeRecord(logger.name, logging.INFO, __file__, 1, "again", (), None)
        again.created = 0.0
        logger.handle(again)
    logger.info("other")
    logger.handlers[0].close()
    times = [line.split(" ", 1)[0] for line in output.getvalue().splitlines()]
    assert (len(times), times) == (3, sorted(times))


def test_a_line_that_repeats_once_is_written_again_without_a_count(
    logger: logging.Logger, output: io.StringIO
) -> None:
    logger.info("again")
    logger.info("again")
    logger.handlers[0].close()
    assert output.getvalue().count("again") == 2
    assert "repeated" not in output.getvalue()


@pytest.mark.parametrize("style", ["text", "json"])
def test_urls_in_the_log_have_no_credentials(
    logger: logging.Logger, output: io.StringIO, style: Literal["text", "json"]
) -> None:
    logger.handlers[0].setFormatter(logs.LineFormatter(style))
    logger.info(
        "cannot post to %s: no route", "http://ann:SECRET@host:81/in?token=SECRET", extra={"stream": "s"}
    )
    logger.info('Max retries exceeded with url: /in?token=SECRET "x"')
    logger.info("not a valid URL: http://ann:SEC/RET@host/ http://[::1]:80/a@b")
    assert "SEC" not in output.getvalue()
    assert "RET" not in output.getvalue()
    assert "http://host:81/in: no route" in output.getvalue()
    assert "http://[::1]:80/a@b" in output.getvalue()


def test_the_journal_gets_priorities_instead_of_times() -> None:
    program = """
        import os
        stat = os.fstat(2)
        os.environ["JOURNAL_STREAM"] = f"{stat.st_dev}:{stat.st_ino}"
        logs.setup()
        logging.getLogger("bridge").error("disk full", extra={"stream": "a"})
        logging.getLogger("bridge").info("ready")
    """
    assert stderr_of(program) == ['<3>error bridge msg="disk full" stream=a', "<6>info bridge msg=ready"]


def test_a_journal_that_is_not_our_stderr_changes_nothing() -> None:
    (line,) = stderr_of("logs.setup(); logging.getLogger('bridge').error('x')", JOURNAL_STREAM="1:2")
    assert not line.startswith("<")


def test_libraries_are_quiet_below_warning() -> None:
    lines = stderr_of("""
        logs.setup("debug")
        for name in ("s3transfer.tasks", "urllib3.connectionpool", "botocore.hooks", "bridge.mqtt"):
            logging.getLogger(name).info("hello")
            logging.getLogger(name).warning("beware")
    """)
    assert sum("hello" in line for line in lines) == 1
    assert sum("beware" in line for line in lines) == 4


def test_a_wrong_format_string_is_reported_and_stops_nothing() -> None:
    lines = stderr_of("logs.setup(); log = logging.getLogger('x'); log.error('%d', 'a'); log.error('next')")
    assert lines[-1].endswith("msg=next")
