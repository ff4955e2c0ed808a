"""Writes objects to S3 that are never overwritten, for exporters with one object per batch.

The same batch has the same name. An object is written only if none has its name (`If-None-Match: *`). The
metadata of an object has the digest of its messages. If an object with the same digest exists, an earlier
attempt has arrived. If a different one exists, another gateway has the same id or runs on a copy of the data
directory: the export stops, and overwrites nothing. Without `conditional`, for stores without
conditional requests, objects are overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.plugin.api import Context, Stopped
from bridge.plugin.aws import Body, error_code, failure, probe

ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
EXISTS = frozenset({"412", "PreconditionFailed"})
NOT_SUPPORTED = frozenset({"501", "NotImplemented"})
_ETAG = re.compile(r"[0-9A-Za-z-]{1,100}")


def probe_bucket(client: Any, bucket: str, prefix: str) -> str:
    """List at most one object; for `Exporter.probe`."""
    url = f"s3://{bucket}/{prefix}"
    probe(lambda: client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1), f"listing {url}")
    return f"could list {url}"


class ObjectWriter:
    """Writes the objects of one export to a bucket."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        context: Context,
        *,
        digest_key: str,
        conditional: bool = True,
        replace_etag: str | None = None,
        options: dict[str, Any],
    ) -> None:
        """`digest_key` is the key of the digest in an object's metadata.

        `replace_etag` names an object that may be replaced although it has other messages; `options` are
        keywords of every PutObject.
        """
        self._client, self._bucket, self._context = client, bucket, context
        self._digest_key, self._conditional, self._options = digest_key, conditional, options
        self._replace_etag = replace_etag.strip('"') if replace_etag else None

    def url(self, key: str) -> str:
        """Return the URL of an object, for messages."""
        return f"s3://{self._bucket}/{key}"

    def put_once(
        self, key: str, body: bytes, content_type: str, digest: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write an object, unless an earlier attempt has done so. Raises Retry or Stopped.

        `metadata` has further entries for the object's metadata.
        """
        once = {"IfNoneMatch": "*"} if self._conditional else {}
        described = {self._digest_key: digest, **(metadata or {})}
        try:
            self.put(key, body, content_type, Metadata=described, **once)
        except Exception as error:
            if not once or error_code(error) not in EXISTS:
                doing = f"uploading {self.url(key)}"
                if error_code(error) in NOT_SUPPORTED:
                    doing += " (a store without conditional requests needs conditional_put = false)"
                raise failure(error, doing) from error
            self._compare(key, body, content_type, described)

    def _compare(self, key: str, body: bytes, content_type: str, described: Mapping[str, str]) -> None:
        """Compare the existing object of this name with these messages. Raises Retry or Stopped."""
        doing = f"comparing with {self.url(key)}, which exists already"
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=key)
        except Exception as error:
            if error_code(error) == "403":
                doing += " (without s3:GetObject the gateway cannot compare its messages)"
            raise failure(error, doing) from error
        there = found.get("Metadata", {}).get(self._digest_key)
        if there == described[self._digest_key]:
            return  # an earlier attempt arrived, but its answer did not
        etag = str(found.get("ETag", "")).strip('"')
        if self._replace_etag and etag == self._replace_etag:
            try:
                self.put(key, body, content_type, Metadata=described, IfMatch=etag)
            except Exception as error:
                raise failure(error, f"replacing {self.url(key)}") from error
            self._context.log.warning("%s had other messages (ETag %s) and was replaced", self.url(key), etag)
            return
        raise Stopped(
            f"there are already {'other messages' if there else 'messages without a digest'} with these "
            f"numbers, and nothing was overwritten: another gateway has the id {self._context.gateway!r}, or "
            f"this data directory is a copy (see `Recover from a disaster`): {self.url(key)}"
            f"{f', ETag {etag}' if _ETAG.fullmatch(etag) else ''}"
        )

    def landed(self, key: str, digest: str) -> bool | None:
        """Return whether the object exists; None if it differs or that is unknown. Raises Retry."""
        where, doing = {"Bucket": self._bucket, "Key": key}, f"looking for {self.url(key)}"
        try:
            found = self._client.head_object(**where)
        except Exception as error:
            code = error_code(error)
            if code in ("400", "403"):  # HEAD has no body with the reason; an expired token is a 400
                try:
                    self._client.get_object(**where, Range="bytes=0-0")["Body"].close()
                except Exception as denied:
                    # Without the right to list the bucket, S3 answers AccessDenied for a missing object.
                    code = "404" if error_code(denied) == "AccessDenied" else error_code(denied)
                    error = denied
            if code in ABSENT:
                return False
            raise failure(error, doing) from error
        if found.get("Metadata", {}).get(self._digest_key) == digest:
            return True
        return None if self._conditional else False  # the next attempt compares it

    def put(self, key: str, body: bytes, content_type: str, **more: Any) -> None:
        """Put an object; raises what boto3 raises."""
        self._client.put_object(
            Bucket=self._bucket,
            Key=key,
            Body=Body(body, self._context),
            ContentType=content_type,
            **self._options,
            **more,
        )
