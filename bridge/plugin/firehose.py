"""Sending records to a Firehose delivery stream.

Service limits: 500 records and 4 MiB per request, 1,000 KiB per record. Firehose bills each record
rounded up to 5 KB, so packing many small messages into one record saves money. Each record of a request
succeeds or fails on its own (`FailedPutCount`); only failed ones are sent again.

The service restricts only the size of a record, which is checked here: only messages that are too large
are rejected. A rejected request, whatever its code, is caused by the delivery stream, such as
InvalidArgumentException if its source is a Kinesis stream. It is retried.
"""

from __future__ import annotations

from bridge.model import MIB
from bridge.plugin.api import AwsBatchedConfig, Batch, Context, Outcome, Retry
from bridge.plugin.aws import failure, is_throttled, probe, safe_code
from bridge.plugin.records import RecordEncoder

MAX_RECORDS, MAX_BYTES, MAX_RECORD = 500, 4 * MIB, 1000 * 1024


def probe_stream(config: AwsBatchedConfig, name: str, context: Context) -> str:
    """Describe a delivery stream; for `Exporter.probe`."""
    client = context.client("firehose", config)
    doing = f"describing the delivery stream {name}"
    probe(lambda: client.describe_delivery_stream(DeliveryStreamName=name, Limit=1), doing)
    return f"could describe the delivery stream {name}"


class FirehoseSender:
    """Sends batches to one delivery stream.

    `record` defines what each message becomes (see `bridge.plugin.records`), without its delimiter. `pack` is
    the size of packed records in bytes; 0: no packing.
    """

    def __init__(
        self,
        config: AwsBatchedConfig,
        delivery_stream: str,
        context: Context,
        *,
        delimiter: bytes,
        pack: int = 0,
        record: str = "payload",
    ) -> None:
        # Our records are always valid, and botocore's check of each would cost a quarter of the time.
        self._client = context.client("firehose", config, parameter_validation=False)
        self._name, self._context = delivery_stream, context
        self._delimiter, self._pack, self._encoder = delimiter, pack, RecordEncoder(record)
        self._error, self._after = "", 0.0

    def send(self, batch: Batch) -> Outcome:
        """Send a batch of any size, in as many requests as necessary."""
        encoded, rejected = self._encoder.encode(batch, MAX_RECORD - len(self._delimiter))
        payloads = [data + self._delimiter for data in encoded]
        retry: list[int] = []
        self._error, self._after, cut = "", 0.0, False
        requests = self._requests(payloads, rejected)
        for number, groups in enumerate(requests):
            try:
                retry += self._put(payloads, groups)
            except Retry as problem:
                if len(requests) == 1:
                    raise
                retry += [n for rest in requests[number:] for group in rest for n in group]
                self._error, cut = str(problem), problem.cut
                self._after = problem.after or self._after
                break
        return Outcome(
            retry=sorted(retry), rejected=rejected, error=self._error, after=self._after or None, cut=cut
        )

    def _requests(self, payloads: list[bytes], without: dict[int, str]) -> list[list[list[int]]]:
        """Split messages into requests within the limits: lists of records, which are lists of indexes."""
        requests: list[list[list[int]]] = [[]]
        size = record_size = 0
        for n, payload in enumerate(payloads):
            if n in without:
                continue
            groups = requests[-1]
            fits_request = size + len(payload) <= MAX_BYTES
            if self._pack and groups and record_size + len(payload) <= self._pack and fits_request:
                groups[-1].append(n)
                record_size += len(payload)
            else:
                if len(groups) == MAX_RECORDS or not fits_request:
                    groups, size = [], 0
                    requests.append(groups)
                groups.append([n])
                record_size = len(payload)
            size += len(payload)
        return [groups for groups in requests if groups]

    def _put(self, payloads: list[bytes], groups: list[list[int]]) -> list[int]:
        records = [{"Data": b"".join(payloads[n] for n in group)} for group in groups]
        self._context.working()
        try:
            answer = self._client.put_record_batch(DeliveryStreamName=self._name, Records=records)
        except Exception as error:
            raise failure(error, f"putting records to {self._name}") from error
        failed = []
        if answer.get("FailedPutCount"):
            for group, result in zip(groups, answer["RequestResponses"], strict=True):
                if code := result.get("ErrorCode"):
                    failed += group
                    self._error = safe_code(code)
                    if is_throttled(code) or code == "ServiceUnavailableException":
                        self._after = 1.0
        return failed
