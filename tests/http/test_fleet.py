"""The page that `streambridge ingest report --html` writes, as a person sees it in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest.errors import BadOption
from bridge.ingest.fleet import document, write_page
from bridge.ingest.intact import Damage, Look
from bridge.ingest.report import Hole, Report, StreamReport
from tests.http.chromium import Browser

HOUR = 3_600_000
NOW = 1_795_000_000_000
EVIL = "</script><img src=x onerror=alert(1)><!--<script>"


def stream(gateway: str, hours: float = 0, name: str = "s0", **figures: Any) -> StreamReport:
    """A stream whose newest row is so many hours old."""
    usual = {
        "first": 0,
        "last": 99,
        "rows": 100,
        "newest_ms": int(NOW - hours * HOUR),
        "reported_ms": NOW - HOUR,
    }
    return StreamReport(gateway, name, 1, **(usual | figures))


def report(*streams: StreamReport, **more: Any) -> Report:
    return Report("lake.messages", list(streams), [], [], [], [], made_ms=NOW, full_ms=NOW - HOUR, **more)


def opened(browser: Browser, folder: Path, found: Report) -> Browser:
    path = folder / "fleet.html"
    write_page(found, path)
    browser.open(path.as_uri())
    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]
    return browser


def cells(browser: Browser, body: str) -> list[list[str]]:
    """The table's rows, as text."""
    texts = "[...row.cells].map((cell) => cell.innerText)"
    rows: list[list[str]] = browser.see(f"[...document.querySelectorAll('#{body} tr')].map((row) => {texts})")
    return rows


def test_ten_thousand_gateways_are_sorted_found_and_opened(browser: Browser, tmp_path: Path) -> None:
    holes = [Hole(10, 19, "missing", "", NOW - HOUR, None)]
    fleet = [stream(f"gw-{n:05d}", hours=n / 100, waiting=n % 7) for n in range(10_000)]
    fleet[123] = stream("gw-00123", hours=3, missing=10, holes=holes)
    versions = {f"gw-{n:05d}": "0.2.1" if n % 10 else "0.2.0" for n in range(10_000)}
    page = opened(browser, tmp_path, report(*fleet, versions=versions))
    first = cells(page, "gateways")
    assert [row[0] for row in first[:2]] == ["gw-09999", "gw-09998"]  # the latest come first
    assert first[0][1:] == ["4 d", "0", "0", "0", str(9999 % 7), "0", "100", "60 min", "0.2.1", "1"]
    assert page.text("#page") == "10,000 gateways, page 1 of 100"
    page.see("at('next').click()")
    assert cells(page, "gateways")[0][0] == "gw-09899"
    page.see(
        "[...document.querySelectorAll('#heads button')].find((one) => one.innerText === 'missing').click()"
    )
    assert cells(page, "gateways")[0][:3] == ["gw-00123", "3 h", "10"]
    page.see("(at('find').value = 'GW-0012', at('find').dispatchEvent(new Event('input')))")
    assert page.text("#page") == "10 gateways, page 1 of 1"
    page.see("(at('version').value = '0.2.0', at('version').dispatchEvent(new Event('input')))")
    assert [row[0] for row in cells(page, "gateways")] == ["gw-00120"]
    assert page.see("document.querySelectorAll('*').length") < 3000  # not a row for every gateway
    page.see("(location.hash = 'gw-00123')")
    page.until("!at('detail').hidden")
    assert cells(page, "ranges") == [
        ["s0", "1", "10..19", "10", "2026-11-18 10:06:40", "–", "missing"],
    ]
    assert cells(page, "streams")[0][:5] == ["s0", "1", "0..99", "100", "3 h"]
    assert page.text("#tiles").split("\n")[:3] == ["Gateways", "10,000", "0 without a report"]
    assert "0.2.1: 9,000, 0.2.0: 1,000" in page.text("#tiles")
    assert page.complaints == []


def test_names_of_gateways_are_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    hole = Hole(2**63 - 3, 2**63 - 1, "trimmed", EVIL)
    evil = stream(EVIL, name=EVIL, last=2**63 - 1, holes=[hole], trimmed=3, reported_ms=None)
    page = opened(browser, tmp_path, report(evil, versions={EVIL: EVIL}))
    page.see("document.querySelector('#gateways button').click()")
    page.until("!at('detail').hidden")
    assert page.text("#name") == EVIL
    assert cells(page, "streams")[0][2] == f"0..{2**63 - 1}"  # larger than JavaScript's exact numbers
    assert cells(page, "ranges")[0][2:4] == [f"{2**63 - 3}..{2**63 - 1}", "3"]
    assert "a lost tail would go unnoticed" in page.text("#facts")
    assert (page.complaints, len(page.requests)) == ([], 1)
    assert page.see("document.images.length") == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_its_window(browser: Browser, tmp_path: Path, width: int) -> None:
    write_page(report(stream("g" * 200), stream("h")), tmp_path / "fleet.html")
    browser.open((tmp_path / "fleet.html").as_uri(), width=width)
    assert browser.see("document.documentElement.scrollWidth <= innerWidth")


def test_a_stream_with_many_ranges_shows_the_first_and_how_many_more(tmp_path: Path) -> None:
    holes = [Hole(n * 2, n * 2, "missing") for n in range(5000)]
    ((_, _, _, (found,)),) = document(report(stream("gw", holes=holes)))["gateways"]
    assert (len(found[-2]), found[-1]) == (200, 4800)


def test_the_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "fleet.html"
    for name in ("one", "two"):
        write_page(report(stream(name)), path)
        data = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
        assert data is not None
        assert json.loads(data[1])["gateways"][0][0] == name
    assert [found.name for found in tmp_path.iterdir()] == ["fleet.html"]
    with pytest.raises(BadOption, match="cannot be written: No such file or directory"):
        write_page(report(), tmp_path / "absent" / "fleet.html")


GONE = Damage("/lake/x.parquet", "data file", 7, None, 40)
BAD = {
    "missing": report(stream("gw", missing=1)),
    "quarantined": report(stream("gw", quarantined=1)),
    "unreadable": report(stream("gw", unreadable=1)),
    "others have changed the table": report(stream("gw"), differs=True),
    "files are gone": report(stream("gw"), files=Look([GONE])),
    "files are unseen": report(stream("gw"), files=Look([], ["gs://lake/x.parquet: no"])),
    "another source": report(stream("gw"), elsewhere=True),
    "nothing": report(),
    "all at once": report(
        stream("gw", missing=1, quarantined=2, unreadable=3, waiting=4), differs=True, files=Look([GONE])
    ),
}


@pytest.mark.parametrize("name", ["complete", "waiting", *BAD])
def test_the_tiles_agree_with_the_verdict(browser: Browser, tmp_path: Path, name: str) -> None:
    found = BAD.get(name) or report(
        stream("gw", waiting=5 * (name == "waiting"), trimmed=3), files=Look(full=NOW)
    )
    page = opened(browser, tmp_path, found)
    assert found.complete == (name not in BAD)
    assert page.text("#state") == ("Complete" if found.complete else "Not complete")
    bad = page.see("document.querySelectorAll('#tiles [data-level=bad]').length")
    assert (bad == 0) == found.complete
    tiles: list[str] = page.see("[...document.querySelectorAll('#tiles > div')].map((one) => one.innerText)")
    values = {tile.split("\n")[0]: tile.split("\n")[1:] for tile in tiles}
    assert values["Missing"][0] == str(found.total("missing"))
    unread = found.total("quarantined") + found.total("unreadable")
    assert values["Quarantined or unreadable"] == [str(unread), f"at {int(unread > 0)} gateways"]
    if name == "all at once":
        assert values["Table"] == ["1 files damaged", "changed by others"]
