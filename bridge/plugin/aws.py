"""AWS for exporters: the `[aws]` table, clients with fresh credentials, and the meaning of errors.

boto3 is imported when the first client is made. Clients are shared: botocore's are thread-safe, and
making one costs tens of milliseconds and megabytes.

Credentials come from the first of these sources that has any:
1. a plugin's `aws_credentials` hook,
2. `credentials.iot`: the IoT Core credentials provider, by X.509 certificate and role alias,
3. `profile`, or else boto3's own chain (environment, shared files, container, instance).
They are refreshed while the process runs. If there are none, or a service rejects them, the source is asked
again, so a corrected file, for example, applies without a restart. Missing, expired or rejected credentials
are never a reason to drop a record: `failure` turns them into a `Retry`.
"""

from __future__ import annotations

import io
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from bridge.plugin import awserrors, metadata
from bridge.plugin.api import Context, Retry, Unproven
from bridge.plugin.link import UNLIMITED, Link
from bridge.settingtypes import Endpoint

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 20.0
READ_TIMEOUT = 60.0
MAX_RETRY_AFTER = 300.0  # seconds
MAX_CAUSE = 300  # characters of an error message, in the log
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})")  # http.client: what a proxy answered
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")

# A request with one of these errors can never succeed unchanged. All other errors are retried: a futile
# retry, visible in the status, is better than dropping a record that a corrected policy would have accepted.
_PERMANENT = frozenset(
    {"InvalidArgumentException", "InvalidRequestException", "SerializationException", "ValidationException"}
)
# Other credentials may help. This includes AccessDenied: they may have belonged to another user.
_CREDENTIAL_ERRORS = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "UnrecognizedClient",
        "UnrecognizedClientException",
    }
)
_THROTTLED = frozenset(
    {
        "BandwidthLimitExceeded",
        "LimitExceededException",
        "PriorRequestNotComplete",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)


class IotCredentials(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The IoT Core credentials provider: a device certificate and a role alias give AWS credentials.

    `endpoint` is the host of `aws iot describe-endpoint --endpoint-type iot:CredentialProvider`.
    """

    endpoint: str
    role_alias: str
    cert: Path
    key: Path
    ca: Path | None = None
    thing: str | None = None


class AwsCredentials(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`[aws.credentials]`: a source of credentials instead of boto3's own chain."""

    iot: IotCredentials


class AwsSettings(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `[aws]` table. `proxies` maps `http` and `https` to URLs; the default is the environment's."""

    region: str | None = None
    endpoint_url: Endpoint | None = None
    profile: str | None = None
    credentials: AwsCredentials | None = None
    proxies: dict[str, str] = {}


class Credentials(Struct, kw_only=True, frozen=True):
    """Temporary credentials; `expiry` is Unix time in seconds."""

    access_key: str
    secret_key: str
    token: str
    expiry: float

    def __repr__(self) -> str:
        return f"Credentials(access_key={self.access_key!r}, expiry={self.expiry})"


_lock = threading.Lock()
_sessions: dict[bytes, Any] = {}
_clients: dict[bytes, Any] = {}
_provider: Callable[[AwsSettings], Callable[[], Credentials] | None] | None = None


def use_provider(provider: Callable[[AwsSettings], Callable[[], Credentials] | None]) -> None:
    """Set the first source of credentials (the `aws_credentials` hook)."""
    global _provider
    _provider = provider


def client(
    settings: AwsSettings,
    service: str,
    region: str | None = None,
    endpoint_url: str | None = None,
    link: Link = UNLIMITED,
    **config: Any,
) -> Any:
    """Return the shared client for a service; `region` and `endpoint_url` override the settings.

    Its connections go over `link`.

    A given endpoint is used as it is, without a bucket or a prefix before its host name. `config` has
    keywords of botocore.config.Config. Retries are off by default, because the scheduler retries and shows
    it.
    """
    key = msgspec.json.encode([settings, service, region, endpoint_url, id(link), config], enc_hook=str)
    with _lock:
        if key not in _clients:
            from botocore.config import Config

            from bridge.plugin.httplink import put_over

            defaults: dict[str, Any] = {
                "connect_timeout": CONNECT_TIMEOUT,
                "read_timeout": READ_TIMEOUT,
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": 32,
                "user_agent_extra": "streambridge",
            }
            if settings.proxies:
                defaults["proxies"] = settings.proxies
            endpoint_url = endpoint_url or settings.endpoint_url
            if endpoint_url:
                # A private server has no name that begins with SiteWise's `data.`. Buckets go into the path
                # by botocore's own rule.
                defaults["inject_host_prefix"] = False
            session = _session(settings)
            try:
                made = session.create_client(
                    service,
                    region_name=region or settings.region or _region(session, endpoint_url),
                    endpoint_url=endpoint_url,
                    config=Config(**(defaults | config)),
                )
            except Exception:
                _sessions.clear()  # a session caches ~/.aws/config, even the fact that it has no region
                raise
            made.meta.events.register("before-send", _stream_body)
            put_over(link, made._endpoint.http_session)
            _clients[key] = made
        return _clients[key]


def _stream_body(request: Any, **_: Any) -> None:
    """Have a body sent in pieces. The time-out applies to each piece, so a slow link only takes longer.

    A bytes object would go out in one call with one time-out.
    """
    if isinstance(request.body, bytes | bytearray):
        request.body = io.BytesIO(request.body)


def _region(session: Any, endpoint_url: str | None) -> str | None:
    # boto3 knows AWS_DEFAULT_REGION only; Greengrass gives its components AWS_REGION, as other SDKs use it.
    region = session.get_config_variable("region") or os.environ.get("AWS_REGION")
    if not region and endpoint_url:
        return "us-east-1"  # the endpoint is not AWS: any region will do, but botocore needs one
    return str(region) if region else None


def _session(settings: AwsSettings) -> Any:
    key = msgspec.json.encode(settings, enc_hook=str)
    if key not in _sessions:
        import botocore.session

        from bridge.plugin.models import CompactFiles

        core: Any = botocore.session.Session(profile=settings.profile)
        fetch = _provider(settings) if _provider else None
        if fetch is None and settings.credentials is not None:
            fetch = iot_credentials(settings.credentials.iot, settings.proxies)

        def ask() -> Any:
            if fetch is not None:
                return _refreshable(fetch)
            # A new session each time: sessions cache the shared files.
            fresh: Any = botocore.session.Session(profile=settings.profile)
            fresh._last_client_region_used = core._last_client_region_used  # to assume a role in
            return fresh.get_credentials()

        core._credentials = _SessionCredentials(ask)
        core.register("after-call", core._credentials.check)
        core.get_component("data_loader").file_loader = CompactFiles()
        _sessions[key] = core
    return _sessions[key]


class _SessionCredentials:
    """The credentials of a session. They replace botocore's, which are looked up only once.

    Clients keep this object. `ask` returns botocore's credentials or None. It is called while there are none,
    and after a service has rejected the last ones.
    """

    method = "streambridge"

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask, self._found = ask, None
        self._identity = ""  # for messages: the access key and where it came from
        self._asking = threading.Lock()

    def get_frozen_credentials(self) -> Any:
        """Return the keys that sign a request. Without credentials, raises what botocore raises."""
        with metadata.allowed():  # for an instance's role; also to renew its credentials
            with self._asking:
                found = self._found = self._found or self._ask()
            if found is None:
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
            keys = found.get_frozen_credentials()
            self._identity = f"the access key {keys.access_key} ({found.method})"
            return keys

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        """Return a function that returns one of the keys, or the account's id."""
        return lambda: getattr(self.get_frozen_credentials(), name)

    def check(self, parsed: Any, model: Any = None, context: Any = None, **_: Any) -> None:
        """Drop the credentials if a response rejects them, and say in an error what was asked for."""
        if parsed.get("Error"):
            parsed["Asked"] = awserrors.asked(model, context, self._identity)
        if parsed.get("Error", {}).get("Code") in _CREDENTIAL_ERRORS:
            self._found = None


def _refreshable(fetch: Callable[[], Credentials]) -> Any:
    from botocore.credentials import DeferredRefreshableCredentials

    def metadata() -> dict[str, str]:
        fresh = fetch()
        return {
            "access_key": fresh.access_key,
            "secret_key": fresh.secret_key,
            "token": fresh.token,
            "expiry_time": datetime.fromtimestamp(fresh.expiry, UTC).isoformat(),
        }

    return DeferredRefreshableCredentials(metadata, "streambridge")


def iot_credentials(settings: IotCredentials, proxies: dict[str, str]) -> Callable[[], Credentials]:
    """Return a function that fetches credentials from the IoT Core credentials provider.

    It uses `proxies`, or else those of the environment.
    """

    def fetch() -> Credentials:
        # botocore's own HTTP session: TLS and proxies without another dependency.
        from botocore.awsrequest import AWSRequest
        from botocore.httpsession import URLLib3Session
        from botocore.utils import get_environ_proxies

        url = settings.endpoint if "://" in settings.endpoint else f"https://{settings.endpoint}"
        # New each time, so that a certificate rotated on disk applies.
        verify: Any = str(settings.ca) if settings.ca else True
        session = URLLib3Session(
            verify=verify,
            proxies=proxies or get_environ_proxies(url),
            client_cert=(str(settings.cert), str(settings.key)),
            timeout=int(CONNECT_TIMEOUT),
        )
        headers = {"x-amzn-iot-thingname": settings.thing} if settings.thing else {}
        request = AWSRequest("GET", f"{url}/role-aliases/{settings.role_alias}/credentials", headers=headers)
        try:
            response = session.send(request.prepare())
        finally:
            session.close()
        if response.status_code != 200:
            raise Retry(
                f"the IoT credentials provider {settings.endpoint} answered {response.status_code}: "
                f"{response.text[:200]}"
            )
        found = msgspec.json.decode(response.content, type=_IotAnswer).credentials
        expiry = datetime.fromisoformat(found.expiration).timestamp()
        return Credentials(
            access_key=found.access_key_id,
            secret_key=found.secret_access_key,
            token=found.session_token,
            expiry=expiry,
        )

    return fetch


class _IotFound(Struct, rename="camel"):
    access_key_id: str
    secret_access_key: str
    session_token: str
    expiration: str


class _IotAnswer(Struct):
    credentials: _IotFound


class Body(io.BytesIO):
    """A request's body that is sent in pieces and reports progress of the export with each."""

    def __init__(self, content: bytes, context: Context) -> None:
        super().__init__(content)
        self._context = context

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next piece."""
        self._context.working()
        return super().read(size)


def error_code(error: BaseException) -> str:
    """Return the service's error code, such as `ThrottlingException`; empty if the service did not answer."""
    response = getattr(error, "response", None)
    found = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    return str(found)


def is_permanent(error: BaseException) -> bool:
    """Return whether the service rejected the request's content, so it can never succeed."""
    return error_code(error) in _PERMANENT


def is_invalid(error: BaseException) -> bool:
    """Return whether botocore sent nothing because its model of the service forbids the parameters.

    Reject the message then, if the parameters come from the message and not from the configuration.
    """
    from botocore.exceptions import ParamValidationError

    return isinstance(error, ParamValidationError)


def is_throttled(code: str) -> bool:
    """Return whether an error code asks to slow down."""
    return code in _THROTTLED


def failure(error: BaseException, doing: str) -> Retry:
    """Return the `Retry` for an error of boto3: the action, the cause, the remedy, and how long to wait.

    If there was no connection, the action is left out.
    """
    code = error_code(error)
    after = 1.0 if is_throttled(code) else None
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        after = retry_after(headers.get("retry-after", "")) or after
    text = cause(error)
    server = _server(error)
    if not server:
        text = f"{doing}: {text}"
    elif is_unsent(error) and not server.partition(":")[0].endswith(_AMAZON):
        text += "; see endpoint_url"
    if hint := remedy(error):
        text += f"; {hint}"
    return Retry(text, after=after, unsent=is_unsent(error), cut=is_cut(error))


def remedy(
    error: BaseException,
    ca: str = "AWS_CA_BUNDLE of the service's environment, or `ca_bundle` of the AWS config file",
    proxy: str = "`proxies` of [aws], or HTTPS_PROXY of the service's environment",
) -> str:
    """Return what to do about an error; empty if that is not known. `ca` and `proxy` name the options."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return awserrors.remedy(error_code(error), response)
    return awserrors.remedy_of(error, ca, proxy)


def probe(call: Callable[[], Any], doing: str) -> None:
    """Make a call that changes nothing, for `Exporter.probe`. Raises Retry, or Unproven if it is denied.

    An export does not need the right to it.
    """
    try:
        call()
    except Exception as error:
        retry = failure(error, doing)
        if error_code(error) in awserrors.DENIED:
            raise Unproven(
                f"the destination answers; whether it may be written to is not known: {retry}"
            ) from error
        raise retry from error


def retry_after(header: str) -> float | None:
    """Return the seconds of a `Retry-After`, at most five minutes; None without one.

    It has seconds or, as some proxies write it, a date.
    """
    if header.isdecimal():
        seconds = float(header)
    else:
        try:
            date = parsedate_to_datetime(header)
        except (ValueError, TypeError, OverflowError):
            return None
        # The zone is missing in `-0000` only, which also means UTC.
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, min(seconds, MAX_RETRY_AFTER))


def safe_code(code: str) -> str:
    """Return an error code from a response, without any other text of the response."""
    return re.sub(r"[^A-Za-z0-9._-]", "?", code)[:64]


def cause(error: BaseException) -> str:
    """Describe an error in botocore's words, and those of the response only for AWS's known codes.

    The client that defined the export can read this text, and may have chosen the server that responds.
    """
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        from botocore.exceptions import NoRegionError

        if isinstance(error, NoRegionError):
            return "there is no region; set `region` of the export, or of [aws]"
        return (_connection_cause(error) or str(error))[:MAX_CAUSE]
    code = safe_code(error_code(error))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    operation = getattr(error, "operation_name", "the request")
    log.info("%s was answered: %s", operation, str(error)[:MAX_CAUSE])
    text = f"{operation} {awserrors.as_whom(response)}".rstrip()
    text += f" was answered {status} {code or 'without an error code'}"
    said = awserrors.sentence(code, response)
    return f"{text}: {said}" if said else text


def _server(error: BaseException) -> str:
    """Return host and port of the server if the error is one of the connection to it; otherwise empty."""
    from botocore import exceptions as botocore

    if not isinstance(error, botocore.ConnectionError | botocore.HTTPClientError):
        return ""
    fields = error.kwargs
    parts = urlsplit(str(fields.get("proxy_url") or fields.get("endpoint_url") or ""))
    return parts.netloc.rpartition("@")[2]


def _connection_cause(error: BaseException) -> str:
    """Return the cause of a connection error; empty for other errors.

    botocore and urllib3 repeat the URL with the name of the object, and end with the cause.
    """
    from botocore import exceptions as botocore

    if not (where := _server(error)):
        return ""
    if isinstance(error, botocore.ProxyConnectionError):
        where = f"the proxy {where}"
    why = _system_cause(error)
    if isinstance(error, botocore.SSLError):
        return f"no TLS with {where}: {why or error.kwargs.get('error')}"
    if isinstance(error, botocore.ConnectTimeoutError):
        return f"cannot connect to {where}: no answer in time"
    if isinstance(error, botocore.EndpointConnectionError | botocore.ProxyConnectionError):
        return f"cannot connect to {where}: {why or 'no connection'}"
    if isinstance(error, botocore.ReadTimeoutError):
        return f"no answer in time from {where}"
    return f"the connection to {where} ended before its answer" + (f": {why}" if why else "")


def _system_cause(error: BaseException | None) -> str:
    """Return the operating system's message for the first cause of an error, such as `connection refused`."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        nested = getattr(error, "kwargs", {}).get("error")  # botocore keeps what urllib3 raised
        error = (
            error.__cause__ or error.__context__ or (nested if isinstance(nested, BaseException) else None)
        )
    for one in reversed(seen):
        if isinstance(one, ssl.SSLCertVerificationError):
            return one.verify_message
        if isinstance(one, OSError) and one.strerror:
            return one.strerror[:1].lower() + one.strerror[1:]
        if isinstance(one, OSError) and (found := _TUNNEL.search(str(one))):
            return f"it answered {found[1]}"
    return ""


def is_cut(error: BaseException) -> bool:
    """Return whether the link is the cause: no connection, or one that ended without an answer."""
    from botocore import exceptions as botocore

    if error_code(error) == "RequestTimeout":  # S3: the body did not arrive in time
        return True
    return isinstance(error, botocore.ConnectionError | botocore.HTTPClientError) and not isinstance(
        error, botocore.SSLError
    )


def is_unsent(error: BaseException) -> bool:
    """Return whether nothing was sent: there was no connection, or there were no credentials."""
    from botocore import exceptions as botocore

    return isinstance(
        error,
        botocore.EndpointConnectionError
        | botocore.ConnectTimeoutError
        | botocore.ProxyConnectionError
        | botocore.NoCredentialsError
        | botocore.CredentialRetrievalError,
    )
