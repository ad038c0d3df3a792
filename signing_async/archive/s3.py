"""An archive in a bucket of S3, or of a compatible service. Objects are created once. No error shows a secret."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
import mimetypes
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from .. import _checks
from .._connections import is_refused_by_proxy, is_untrusted, roots_problem
from .._files import is_transient
from ..errors import ArchiveConflict, ArchiveError, ConfigurationError
from .stores import MissingBytes, check_name

try:
    import aiobotocore.session
    import aiohttp
    from botocore import exceptions as aws
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "signing_async.archive.s3 needs aiobotocore: pip install 'signing-async[s3]'", name="aiobotocore"
    ) from None

__all__ = ["S3Store"]

_GETS_AT_ONCE = 8
_PART = re.compile(r"(.+)/([0-9]{20})\.part")
_LOCK_MODES = ("COMPLIANCE", "GOVERNANCE")
_ERRORS = (aws.ClientError, aws.BotoCoreError, aiohttp.ClientError, OSError)
_NO_CREDENTIALS = (aws.CredentialRetrievalError, aws.MetadataRetrievalError)
_LOST = (aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, aiohttp.ClientError)
# Another request for the key is in progress: the service requires a retry.
_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}
_CONFLICT_PAUSES = (0.1, 0.3, 1.0)
# The request was damaged in transit.
_TRANSIENT_CODES = _CONFLICTS | {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
# The error concerns one key, not the whole bucket.
_REFUSED_KEY = {"EntityTooLarge", "KeyTooLongError", "InvalidObjectState", "XMinioInvalidObjectName"}
_SINGLE_KEY_CODES = _TRANSIENT_CODES | _REFUSED_KEY | {"XMinioObjectExistsAsDirectory", "XMinioParentIsObject"}
_SESSION_TOKEN = re.compile(r"(x-amz-security-token\W+(?:b['\"])?)[^'\"\s,]+", re.IGNORECASE)


class S3Store:
    """An archive in a bucket, which any number of machines may share. Needs the extra ``s3``. ::

        async with S3Store("s3://contracts/signed", object_lock=("COMPLIANCE", 3650)) as store:
            async with PostgresJournal(dsn) as journal, Archive(client, store, journal=journal) as archive:
                ...

    Credentials, region and endpoint come from the usual places of AWS's SDKs (``AWS_*`` variables, profiles, roles);
    ``region`` and ``endpoint_url`` take precedence. The service must support conditional writes (``If-None-Match``) and
    SHA-256 checksums. With ``object_lock``, a mode and a number of days, the bucket retains each object for that time.

    A file that grows by appends is a folder of objects, one for each append, named by its offset.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        object_lock: tuple[str, int] | None = None,
    ) -> None:
        self._bucket, prefix = _parse_url(url)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url: str = f"s3://{self._bucket}/{prefix}".rstrip("/")
        """The bucket and the prefix."""
        _check_options(endpoint_url, region, object_lock)
        self._options = {"endpoint_url": endpoint_url, "region_name": region}
        self._object_lock = object_lock
        self._ends: dict[str, int] = {}
        """For each file that grows by appends, an offset at which an append ended. The bytes before it never change."""
        self._exits = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._closed = False
        self._client: Any = None

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    async def put(self, name: str, source: Path, sha256: str) -> None:
        key = self._key(name)
        with io.FileIO(source) as file:
            is_new = await self._create(key, file, bytes.fromhex(sha256), {"sha256": sha256})
        if not is_new and await self._metadata(key) != {"sha256": sha256}:
            raise ArchiveConflict(f"{self.url}: {name!r} holds another file")

    async def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        key = self._key(name)
        if name not in self._ends:
            with suppress(FileNotFoundError):
                yield await self._get(key, offset)
                return
        starts: list[int] = []
        missing: MissingBytes | None = None
        try:
            async for start in self._parts(name, offset):
                starts.append(start)
        except MissingBytes as error:
            missing = error  # raised after the bytes before the gap
        for at in range(0, len(starts), _GETS_AT_ONCE):
            batch = starts[at : at + _GETS_AT_ONCE]
            contents = await asyncio.gather(*(self._get(_part_key(key, start)) for start in batch))
            for start, content in zip(batch, contents, strict=True):
                yield content[max(0, offset - start) :]
        if missing is not None:
            raise missing
        if name not in self._ends:
            raise FileNotFoundError(f"{self.url}: {name!r} does not exist")

    async def append(self, name: str, offset: int, data: bytes) -> None:
        key = self._key(name)
        if offset and self._ends.get(name) != offset:
            async for _ in self._parts(name, self._ends.get(name, 0)):
                pass
            if (end := self._ends.get(name, 0)) != offset:
                raise ArchiveConflict(f"{self.url}: {name!r} has {end} bytes, not {offset}")
        # A retry after a lost response is refused. The object's metadata tells who created the object.
        part, writer = _part_key(key, offset), {"writer": secrets.token_hex(16)}
        is_new = await self._create(part, io.BytesIO(data), hashlib.sha256(data).digest(), writer)
        if not is_new and await self._metadata(part) != writer:
            raise ArchiveConflict(f"{self.url}: {name!r} has more than {offset} bytes")
        self._ends[name] = offset + len(data)

    async def names(self) -> AsyncIterator[str]:
        last = None
        async for key, _ in self._list(self._prefix):
            name = key.removeprefix(self._prefix)
            if part := _PART.fullmatch(name):
                name = part[1]
            if name != last and "/." not in f"/{name}":
                yield name
            last = name

    async def aclose(self) -> None:
        """Close the connections."""
        self._closed, self._client = True, None
        await self._exits.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._prefix}{name}"

    async def _parts(self, name: str, offset: int) -> AsyncIterator[int]:
        """Yield the starts of a file's parts that reach beyond ``offset``, and update ``_ends``."""
        key, known = self._key(name), self._ends.get(name, 0)
        end = known if known <= offset else 0
        async for part, size in self._list(f"{key}/", _part_key(key, end - 1) if end else ""):
            if (found := _PART.fullmatch(part)) is None or found[1] != key:
                continue
            if int(found[2]) != end:
                message = f"{self.url}: {name!r} lacks the bytes from {end} on: an object was removed, added or changed"
                raise MissingBytes(message)
            end += size
            self._ends[name] = end
            if end > offset:
                yield end - size

    async def _create(self, key: str, content: io.FileIO | io.BytesIO, sha256: bytes, metadata: dict[str, str]) -> bool:
        """Create an object; return False if it exists, perhaps through a request whose response was lost."""
        arguments: dict[str, Any] = {
            "Key": key,
            "IfNoneMatch": "*",
            "ChecksumAlgorithm": "SHA256",
            "ChecksumSHA256": base64.b64encode(sha256).decode(),
            "ContentType": mimetypes.guess_type(key)[0] or "application/octet-stream",
            "Metadata": metadata,
        }
        if self._object_lock is not None:
            mode, days = self._object_lock
            until = datetime.now(UTC) + timedelta(days=days)
            arguments |= {"ObjectLockMode": mode, "ObjectLockRetainUntilDate": until}
        for pause in _CONFLICT_PAUSES:
            with suppress(_InProgress):
                return await self._call("put_object", "PreconditionFailed", Body=content, **arguments) is not None
            await asyncio.sleep(pause)
            content.seek(0)
        return await self._call("put_object", "PreconditionFailed", Body=content, **arguments) is not None

    async def _metadata(self, key: str) -> dict[str, str]:
        metadata: dict[str, str] = (await self._call("head_object", Key=key))["Metadata"]
        return metadata

    async def _get(self, key: str, offset: int = 0) -> bytes:
        """Return the content of an object from ``offset`` on; raise `FileNotFoundError` if there is no such object."""
        place = {"Range": f"bytes={offset}-"} if offset else {}
        response = await self._call("get_object", "InvalidRange", Key=key, **place)
        return b"" if response is None else response["Body"]

    async def _list(self, prefix: str, after: str = "") -> AsyncIterator[tuple[str, int]]:
        """Yield the keys that begin with a prefix and follow ``after``, with the sizes of their objects, in order."""
        place = {"StartAfter": after} if after else {}
        while True:
            page = await self._call("list_objects_v2", Prefix=prefix, **place)
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["Size"]
            if not page.get("IsTruncated"):
                return
            place = {"ContinuationToken": page["NextContinuationToken"]}

    async def _call(self, operation: str, refusal: str = "", **arguments: Any) -> Any:
        """Return the response with its body; None if the service refuses the request with the code ``refusal``."""
        await self._open()
        try:
            response = await getattr(self._client, operation)(Bucket=self._bucket, **arguments)
            if "Body" in response:
                async with response["Body"] as body:
                    response["Body"] = await body.read()
            return response
        except _ERRORS as error:
            code = _code(error)
            kind = _InProgress if code in _CONFLICTS else ArchiveError
            failure: Exception = kind(
                f"s3://{self._bucket}: {operation} failed: {_describe(error)}",
                transient=_is_transient(error),
                client_wide=code not in _SINGLE_KEY_CODES and not isinstance(error, aws.FlexibleChecksumError),
            )
        if code is not None and code == refusal:
            return None
        # Only a response to `head_object` has no code of S3. Any other 404 may come from a proxy.
        if code == "NoSuchKey" or (code == "404" and operation == "head_object"):
            failure = FileNotFoundError(f"s3://{self._bucket}/{arguments['Key']}")
        # Raised outside of the handler: the original error may hold the request, with a session token.
        raise failure

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise ArchiveError(f"the store s3://{self._bucket} is closed", transient=False)
            if self._client is not None:
                return
            try:
                session = aiobotocore.session.get_session()
                problem = roots_problem(session.get_config_variable("ca_bundle"))
                if not problem:
                    self._client = await self._exits.enter_async_context(session.create_client("s3", **self._options))
                    return
            except ValueError:
                problem = "invalid endpoint URL"  # not shown: it may contain a password
            except (aws.BotoCoreError, OSError) as error:
                problem = _describe(error)
        raise ConfigurationError(f"s3://{self._bucket}: {problem}")


class _InProgress(ArchiveError):
    """Another request for the same key is in progress."""


def _is_transient(error: Exception) -> bool:
    if isinstance(error, aws.ClientError):
        status = error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
        return _code(error) in _TRANSIENT_CODES or status in (429, 500, 502, 503, 504)
    if isinstance(error, aws.SSLError):
        return not is_untrusted(error.kwargs["error"])
    if isinstance(error, aws.ProxyConnectionError):
        return not is_refused_by_proxy(getattr(error.kwargs["error"], "status", 0))
    return isinstance(error, (*_LOST, *_NO_CREDENTIALS, aws.FlexibleChecksumError)) or (
        isinstance(error, OSError) and is_transient(error)
    )


def _code(error: Exception) -> str | None:
    return error.response["Error"].get("Code") if isinstance(error, aws.ClientError) else None


def _describe(error: Exception) -> str:
    if isinstance(error, aws.ClientError):
        fields = error.response["Error"]
        return f"{fields.get('Code')}: {fields.get('Message') or 'no message'}"
    if isinstance(error, _NO_CREDENTIALS):
        return "the credentials could not be retrieved"  # the error's message contains the output of a program
    return str(error) or type(error).__name__


def _part_key(key: str, offset: int) -> str:
    return f"{key}/{offset:020}.part"


def _parse_url(url: Any) -> tuple[str, str]:
    """Return the bucket and the prefix."""
    _checks.string("url", url)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        # The URL may contain a password.
        shown = "" if "@" in url else f", got {url!r}"
        raise ConfigurationError(f"url: must be s3://bucket or s3://bucket/prefix{shown}")
    prefix = prefix.rstrip("/")
    if prefix:
        check_name(prefix)
    return bucket, prefix


def _check_options(endpoint_url: Any, region: Any, object_lock: Any) -> None:
    if region is not None:
        _checks.string("region", region)
    pattern = r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?(/[^@]*)?"
    if endpoint_url is not None and not re.fullmatch(pattern, str(endpoint_url)):
        # The URL may contain a password.
        shown = "" if "@" in str(endpoint_url) else f", got {endpoint_url!r}"
        raise ConfigurationError(f"endpoint_url: must be https://host or https://host:port, without a user{shown}")
    if object_lock is not None:
        if not isinstance(object_lock, tuple) or len(object_lock) != 2 or object_lock[0] not in _LOCK_MODES:
            problem = f"must be a tuple of {' or '.join(_LOCK_MODES)} and a number of days, got {object_lock!r}"
            raise ConfigurationError(f"object_lock: {problem}")
        _checks.integer("object_lock: days", object_lock[1])


def _redact_session_token(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if _SESSION_TOKEN.search(text):
        record.msg, record.args = _SESSION_TOKEN.sub(r"\1***", text), ()
    return True


# At level DEBUG these loggers show the headers of each request.
for _name in ("botocore.auth", "botocore.endpoint"):
    logging.getLogger(_name).addFilter(_redact_session_token)
