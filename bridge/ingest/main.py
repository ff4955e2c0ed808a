"""The entry point for spark-submit.

    spark-submit --py-files streambridge-ingest.zip main.py --source s3://bucket/prefix --table a.b ...

The options are those of `streambridge ingest`.
"""

from __future__ import annotations

from bridge.ingest.commands import app

if __name__ == "__main__":
    app()
