"""AWS's SDK for Java, from a directory that is given: `STREAMBRIDGE_JAVA_SDK=/path/to/jars`.

No package registry has the SDK. AWS publishes it as the repository aws-greengrass-stream-manager-sdk-java on
GitHub; the jar in its folder `sdk` has all that it needs. Without the variable the test is deselected. With
it, the test needs a JDK (Java 11 or newer).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.greengrass.conftest import JAVA_SDK, finish
from tests.greengrass.harness import Server

PROGRAM = Path(__file__).parent / "sdks" / "Operations.java"


@pytest.mark.java_sdk
def test_the_guides_operations_run_with_the_java_sdk(server: Server, tmp_path: Path) -> None:
    jars = sorted(Path(os.environ[JAVA_SDK]).glob("*.jar"))
    assert jars, f"{JAVA_SDK} names a directory without *.jar: {os.environ[JAVA_SDK]}"
    assert shutil.which("javac"), "a JDK is missing; install it: sudo apt-get install openjdk-17-jdk-headless"
    process = subprocess.Popen(
        ["java", "-cp", os.pathsep.join(map(str, jars)), str(PROGRAM)],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "STREAM_MANAGER_SERVER_HOST": "127.0.0.1",
            "STREAM_MANAGER_SERVER_PORT": str(server.port),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert finish(process, 120).endswith("done\n")
    assert server.manager.definitions == {}
