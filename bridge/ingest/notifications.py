"""The names of new objects from an SQS queue that gets the event notifications of the bucket.

With `--notifications QUEUE-URL` a run lists nothing that the queue has named. S3 sends a message for each new
object, at least once and in any order. A message is deleted when the run has settled all of its objects: they
are in the table, quarantined, or gone. The message of an unreadable object stays, and comes back after the
queue's visibility timeout. So do all messages of a run that fails, and those of gateway reports that no
commit has recorded. A repeated message is skipped like any object that the table has.

A notification may be lost (a queue set up too late, an expired message). The next gateway report reveals it,
and the full listing finds objects that no report promises. See `bridge.ingest.listing`.

The queue belongs to one table: messages about other places are deleted, and counted in a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import unquote_plus, urlparse

from bridge.ingest.errors import BadOption
from bridge.ingest.store import Entry, StorageLocation
from bridge.objectkeys import REPORTS

MESSAGES = 20_000  # of one run; later ones are for the next
BATCH = 10  # messages of one request, as SQS allows
WAIT = 1  # seconds; without waiting, SQS asks only some of its servers


class Notifications:
    """A queue, and its notifications about objects under `source`.

    Raises BadOption if `url` is not that of a queue, or `source` is not in S3.
    """

    def __init__(self, url: str, source: StorageLocation) -> None:
        parsed = urlparse(url)
        if parsed.scheme not in ("http", "https") or not parsed.path.strip("/"):
            raise BadOption(
                f"--notifications {url}: give the URL of an SQS queue, "
                "such as https://sqs.eu-central-1.amazonaws.com/123456789012/exports"
            )
        if not source.is_s3:
            raise BadOption(f"--notifications is for objects in S3, and --source is {source.url}")
        import boto3

        region = re.match(r"(?:sqs\.)?([a-z]{2}-[a-z-]+-\d)\.", parsed.netloc)
        session = boto3.session.Session()
        self._client: Any = session.client(
            "sqs",
            endpoint_url=f"{parsed.scheme}://{parsed.netloc}",
            region_name=region[1] if region else session.region_name or "us-east-1",
        )
        self.url = url
        place = urlparse(source.url)
        prefix = place.path.strip("/")
        self._bucket, self._prefix = place.netloc, f"{prefix}/" if prefix else ""
        self._received: dict[str, list[str]] = {}  # keys by the receipt of their message
        self._reports: dict[str, Entry] = {}  # gateway reports, by key, that no commit has recorded yet
        self.strange = 0  # messages about no object under `source`

    def receive(self) -> Iterator[Entry]:
        """Yield the objects that the queue names; an object may come several times.

        Gateway reports that are not recorded come each time: the queue hides their messages for a while.
        """
        self._received, self.strange = {}, 0
        yield from list(self._reports.values())
        while len(self._received) < MESSAGES:
            answer = self._client.receive_message(
                QueueUrl=self.url, MaxNumberOfMessages=BATCH, WaitTimeSeconds=WAIT
            )
            messages = answer.get("Messages", ())
            if not messages:
                return
            for message in messages:
                entries = list(self._entries(message["Body"]))
                self._received[message["ReceiptHandle"]] = [entry.key for entry in entries]
                self._reports |= {entry.key: entry for entry in entries if entry.key.startswith(REPORTS)}
                yield from entries

    def done(self, unreadable: Collection[str], *, recorded: bool) -> None:
        """Delete the messages, except those of unreadable objects (by key).

        Those of gateway reports stay, too, if the reports are not `recorded` in the state of the table.
        """
        if recorded:
            self._reports = {}
        settled = [
            receipt
            for receipt, keys in self._received.items()
            if not any(key in unreadable or (key.startswith(REPORTS) and not recorded) for key in keys)
        ]
        for start in range(0, len(settled), BATCH):
            batch = settled[start : start + BATCH]
            # one that is not deleted comes again, and does no harm
            self._client.delete_message_batch(
                QueueUrl=self.url,
                Entries=[{"Id": str(at), "ReceiptHandle": receipt} for at, receipt in enumerate(batch)],
            )

    def _entries(self, body: str) -> Iterator[Entry]:
        """Yield the new objects of a message: https://docs.aws.amazon.com/AmazonS3/latest/userguide/
        notification-content-structure.html"""
        found = 0
        try:
            document = json.loads(body)
            if document.get("Event") == "s3:TestEvent":  # S3 sends it when the notification is set up
                return
            for record in document["Records"]:
                if not record["eventName"].startswith("ObjectCreated:"):  # deleted, or archived
                    found += 1
                    continue
                one = record["s3"]["object"]
                key = unquote_plus(one["key"])
                if record["s3"]["bucket"]["name"] != self._bucket or not key.startswith(self._prefix):
                    continue
                when = int(datetime.fromisoformat(record["eventTime"]).timestamp() * 1000)
                etag = str(one.get("eTag", "")).strip('"')
                entry = Entry(key[len(self._prefix) :], int(one["size"]), etag, when)
                found += 1
                yield entry
        # a message may be anything that somebody has sent to the queue
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError):
            pass
        self.strange += not found
