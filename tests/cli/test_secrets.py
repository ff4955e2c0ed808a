"""Secrets in the URLs of exports: the commands show none, and `check` warns."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Fill, streambridge
from tests.cli.test_check import OFFLINE, QUIET

URI = "https://ann:hunter2@127.0.0.1:9/in?api_key=hunter3&db=plant"


def test_the_command_shows_no_secret_and_check_warns_of_it(tmp_path: Path, fill: Fill) -> None:
    fill(export_definition={"http": [{"identifier": "web", "uri": URI}]})
    for how in ((), ("--json",), ("--toml",)):
        shown = streambridge("streams", "describe", "sensors", "--data-dir", tmp_path / "data", *how).stdout
        assert "127.0.0.1:9" in shown or not how
        assert "hunter" not in shown
    path = tmp_path / "x.toml"
    for uri, warned in ((URI, True), ("https://127.0.0.1:9/in?db=plant", False)):
        path.write_text(QUIET + f'[[streams.a.export.http]]\nidentifier = "w"\nuri = "{uri}"\n')
        found = json.loads(streambridge("check", "-c", path, "--json", env=OFFLINE).stdout)["findings"]
        assert any("a secret in the URL" in one["what"] for one in found) == warned
