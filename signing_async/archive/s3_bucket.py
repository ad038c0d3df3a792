"""The objects of a bucket: each is created once, as a whole, with checksums. No error shows a secret."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import mimetypes
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from .._connections import is_refused_by_proxy, is_untrusted, roots_problem
from .._files import is_transient
from ..errors import ArchiveError, ConfigurationError
from ..worker_pool import log

try:
    import aiobotocore.session
    import aiohttp
    import botocore.loaders
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        CredentialRetrievalError,
        FlexibleChecksumError,
        HTTPClientError,
        IncompleteReadError,
        MetadataRetrievalError,
        ProxyConnectionError,
        SSLError,
    )
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "signing_async.archive.s3 needs aiobotocore: pip install 'signing-async[s3]'", name="aiobotocore"
    ) from None

__all__ = ["Bucket"]

T = TypeVar("T")

_UPLOAD_PART = 8 * 2**20  # as in the AWS SDKs; S3 requires 5 MiB
_BLOCK = 2**20
_CONNECTION_ERRORS = (ConnectionError, HTTPClientError, IncompleteReadError, aiohttp.ClientError)
_NO_CREDENTIALS = (CredentialRetrievalError, MetadataRetrievalError)
_CONFLICT_CODES = ("ConditionalRequestConflict", "OperationAborted")
_CONFLICT_PAUSES = (0.1, 0.3, 1.0)
_DAMAGED_CODES = ("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch")  # the request was damaged in transit
_TRANSIENT_CODES = (
    *(*_CONFLICT_CODES, *_DAMAGED_CODES, "RequestTimeout", "SlowDown", "Throttling"),
    *("ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded"),
)
_LOADER = botocore.loaders.create_loader()  # shared, as it caches models: a second client opens in 0.03 s, not 0.16 s
# The error concerns one key, not the whole bucket.
_SINGLE_KEY_CODES = (
    *(*_CONFLICT_CODES, *_DAMAGED_CODES, "EntityTooLarge", "KeyTooLongError", "InvalidObjectState"),
    *("XMinioInvalidObjectName", "XMinioObjectExistsAsDirectory", "XMinioParentIsObject"),
)
_NOT_SUPPORTED = (501, 505)  # for example a header that a compatible service does not implement
_SESSION_TOKEN = re.compile(r"(x-amz-security-token\W+(?:b['\"])?)[^'\"\s,]+", re.IGNORECASE)


class Bucket:
    """A bucket. ``object_lock`` is the mode in which each new object is retained, and the number of days."""

    def __init__(
        self, name: str, *, endpoint_url: str | None, region: str | None, object_lock: tuple[str, int] | None
    ) -> None:
        self.name = name
        self._options = {"endpoint_url": endpoint_url, "region_name": region}
        self._object_lock = object_lock
        self._exits = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._closed = False
        self._client: Any = None

    async def create(self, key: str, data: bytes, metadata: dict[str, str]) -> bool:
        """Create an object; return False if it exists, perhaps through a request whose response was lost."""
        checks = {"ChecksumSHA256": _checksum(data), "IfNoneMatch": "*"}
        arguments = {"Key": key, "Body": data, **checks, **self._attributes(key, metadata)}
        return await _retry_conflicts(lambda: self._call("put_object", "PreconditionFailed", **arguments)) is not None

    async def create_from(self, source: Path, key: str, sha256: str) -> bool:
        """Create an object with the content of a file; return False if it exists, as `create` does.

        Raises `ArchiveError` if the file does not have this hash.
        """
        metadata = {"sha256": sha256}
        if (await asyncio.to_thread(source.stat)).st_size > _UPLOAD_PART:
            # After a conflict, S3 requires that the whole upload is repeated.
            return await _retry_conflicts(lambda: self._create_in_parts(source, key, metadata))
        data = await asyncio.to_thread(source.read_bytes)
        _check_hash(source, hashlib.sha256(data).hexdigest(), sha256)
        return await self.create(key, data, metadata)

    async def metadata(self, key: str) -> dict[str, str]:
        """Return the metadata of an object; raise `FileNotFoundError` if there is no such object."""
        found: dict[str, str] = (await self._call("head_object", Key=key))["Metadata"]
        return found

    async def get(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the content of an object from ``offset`` on; raise `FileNotFoundError` if there is no such object."""
        place = {"Range": f"bytes={offset}-"} if offset else {}
        response = await self._call("get_object", "InvalidRange", Key=key, **place)
        if response is None:
            return
        failure = None
        try:
            async with response["Body"] as body:
                while chunk := await body.read(_BLOCK):
                    yield chunk
        except (BotoCoreError, aiohttp.ClientError, OSError) as error:
            failure = self._failure("get_object", error)
        if failure is not None:
            raise failure

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[tuple[str, int]]:
        """Yield the keys that begin with a prefix and follow ``after``, with the sizes of their objects, in order."""
        place = {"StartAfter": after} if after else {}
        while True:
            page = await self._call("list_objects_v2", Prefix=prefix, **place)
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["Size"]
            if not page.get("IsTruncated"):
                return
            place = {"ContinuationToken": page["NextContinuationToken"]}

    async def aclose(self) -> None:
        """Close the connections."""
        self._closed, self._client = True, None
        await self._exits.aclose()

    async def _create_in_parts(self, source: Path, key: str, metadata: dict[str, str]) -> bool:
        started = await self._call("create_multipart_upload", Key=key, **self._attributes(key, metadata))
        upload = {"Key": key, "UploadId": started["UploadId"]}
        completed = None
        try:
            parts = await self._upload_parts(source, upload, metadata["sha256"])
            # If the completion is retried after a lost response, the upload no longer exists.
            refusals = ("PreconditionFailed", "NoSuchUpload")
            content = {"MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*"}
            completed = await self._call("complete_multipart_upload", *refusals, **content, **upload)
        finally:
            if completed is None:
                await self._abort(upload)
        return completed is not None

    async def _upload_parts(self, source: Path, upload: dict[str, str], sha256: str) -> Sequence[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        whole = hashlib.sha256()
        with await asyncio.to_thread(source.open, "rb") as file:
            while data := await asyncio.to_thread(file.read, _UPLOAD_PART):
                await asyncio.to_thread(whole.update, data)
                part = {"PartNumber": len(parts) + 1, "ChecksumSHA256": await asyncio.to_thread(_checksum, data)}
                response = await self._call("upload_part", Body=data, **part, **upload)
                parts.append({**part, "ETag": response["ETag"]})
        _check_hash(source, whole.hexdigest(), sha256)
        return parts

    async def _abort(self, upload: dict[str, str]) -> None:
        try:
            await self._call("abort_multipart_upload", "NoSuchUpload", **upload)
        except ArchiveError as error:
            log.warning("an upload could not be aborted; its parts stay until a lifecycle rule removes them: %s", error)

    def _attributes(self, key: str, metadata: dict[str, str]) -> dict[str, Any]:
        kind = mimetypes.guess_type(key)[0] or "application/octet-stream"
        attributes: dict[str, Any] = {"ChecksumAlgorithm": "SHA256", "ContentType": kind, "Metadata": metadata}
        if self._object_lock is not None:
            mode, days = self._object_lock
            attributes["ObjectLockMode"] = mode
            attributes["ObjectLockRetainUntilDate"] = datetime.now(UTC) + timedelta(days=days)
        return attributes

    async def _call(self, operation: str, *refusals: str, **arguments: Any) -> Any:
        """Return the response; None if the service refuses the request with one of the codes ``refusals``."""
        await self._open()
        try:
            return await getattr(self._client, operation)(Bucket=self.name, **arguments)
        except (ClientError, BotoCoreError, aiohttp.ClientError, OSError) as error:
            code = _code(error)
            failure: Exception = self._failure(operation, error)
        if code in refusals:
            return None
        # A response to `head_object` has no body, and so no code of S3; any other 404 may come from a proxy.
        if code == "NoSuchKey" or (code == "404" and operation == "head_object"):
            failure = FileNotFoundError(f"s3://{self.name}/{arguments['Key']}")
        # Raised outside of the handler: the original error may hold the request, with a session token.
        raise failure

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise ArchiveError(f"the store s3://{self.name} is closed", transient=False)
            if self._client is not None:
                return
            try:
                session = aiobotocore.session.get_session()
                session.register_component("data_loader", _LOADER)
                problem, transient = roots_problem(session.get_config_variable("ca_bundle")), False
                if not problem:
                    self._client = await self._exits.enter_async_context(session.create_client("s3", **self._options))
                    return
            except ValueError:
                problem, transient = "invalid endpoint URL", False  # not shown: it may contain a password
            except (BotoCoreError, OSError) as error:
                problem, transient = _describe(error), _is_transient(error)
        message = f"s3://{self.name}: {problem}"
        raise ArchiveError(message) if transient else ConfigurationError(message)

    def _failure(self, operation: str, error: Exception) -> ArchiveError:
        kind = _Conflict if _code(error) in _CONFLICT_CODES else ArchiveError
        failure = kind(f"s3://{self.name}: {operation} failed: {_describe(error)}", transient=_is_transient(error))
        failure.client_wide = _code(error) not in _SINGLE_KEY_CODES and not isinstance(error, FlexibleChecksumError)
        return failure


class _Conflict(ArchiveError):
    """Another request for the same key is in progress. The service requires a retry of this request."""


async def _retry_conflicts(create: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``create``; after a conflict, retry it a few times."""
    for pause in _CONFLICT_PAUSES:
        with suppress(_Conflict):
            return await create()
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
    return await create()


def _is_transient(error: Exception) -> bool:
    if isinstance(error, ClientError):
        status = error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
        is_failing = status >= 500 and status not in _NOT_SUPPORTED
        return is_failing or status == 429 or _code(error) in _TRANSIENT_CODES
    if isinstance(error, SSLError):
        return not is_untrusted(error.kwargs["error"])
    if isinstance(error, ProxyConnectionError):
        return not is_refused_by_proxy(getattr(error.kwargs["error"], "status", 0))
    # First, because some of these are an `OSError` with a number that is not the system's.
    if isinstance(error, (*_CONNECTION_ERRORS, *_NO_CREDENTIALS, FlexibleChecksumError)):
        return True
    return isinstance(error, OSError) and is_transient(error)


def _code(error: Exception) -> str | None:
    return error.response["Error"].get("Code") if isinstance(error, ClientError) else None


def _describe(error: Exception) -> str:
    if isinstance(error, ClientError):
        fields = error.response["Error"]
        return f"{fields.get('Code')}: {fields.get('Message') or 'no message'}"
    if isinstance(error, _NO_CREDENTIALS):
        return "the credentials could not be retrieved"  # the error's message contains the output of a program
    return str(error) or type(error).__name__


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _check_hash(source: Path, found: str, expected: str) -> None:
    if found != expected:
        message = f"{source}: changed before it was stored (sha256 mismatch: expected {expected}, found {found})"
        failure = ArchiveError(message, transient=False)
        failure.client_wide = False
        raise failure


def _redact_session_token(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if _SESSION_TOKEN.search(text):
        record.msg, record.args = _SESSION_TOKEN.sub(r"\1***", text), ()
    return True


# At level DEBUG these loggers show the headers of each request.
for _name in ("botocore.auth", "botocore.endpoint"):
    logging.getLogger(_name).addFilter(_redact_session_token)
