"""`python -m tests.waits` counts the waits and the cells of the table, and names cells without a test."""

from __future__ import annotations

import re
from pathlib import Path

from .sites import sites
from .test_table import cells, rows

HERE = Path(__file__).parent
exact = {name for path in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
found = cells()
missing = [cell for cell in found if cell[3].startswith("- ")]
here = sum(cell[3] in exact for cell in found)
for file, function, column, why in missing:
    print(f"{file} {function.rpartition(' *')[0]}: {column} {why}")
print(
    f"{len(sites())} waits in {len(rows())} rows; {len(found)} cells: {here} with a case here, "
    f"{len(found) - here - len(missing)} with another test, {len(missing)} without"
)
