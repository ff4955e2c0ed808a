"""The fixtures of this directory; what they are made of is in `harness`."""

from tests.export.harness import bucket, credentials, moto, recorder

__all__ = ["bucket", "credentials", "moto", "recorder"]
