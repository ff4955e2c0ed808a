"""What a burst has used goes back to the system."""

from __future__ import annotations

import subprocess
import sys

BURST = """
import psutil
from bridge import process

def resident():
    return psutil.Process().memory_info().rss >> 20

burst = [bytes(4000) for _ in range(20_000)]
left = burst[::100]  # what is still in use lies between the holes
most = resident()
del burst
process.trim_memory()
print(most, resident())
"""


def test_memory_that_a_burst_has_left_in_holes_is_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=True)
    most, now = map(int, done.stdout.split())
    assert now < most - 50
