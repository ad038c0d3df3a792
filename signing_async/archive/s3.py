"""An archive in a bucket of S3, or of a compatible service."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from .. import _checks
from ..errors import ArchiveConflict, ArchiveError, ConfigurationError
from .s3_bucket import Bucket
from .store import check_lines, check_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["S3Store"]

_GETS_AT_ONCE = 8
_PART = re.compile(r"(.+)/([0-9]{20})\.part")
_LOCK_MODES = ("COMPLIANCE", "GOVERNANCE")


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
        bucket, prefix = _parse_url(url)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url: str = f"s3://{bucket}/{prefix}".rstrip("/")
        """The bucket and the prefix."""
        if endpoint_url is not None:
            _check_endpoint(endpoint_url)
        if region is not None:
            _checks.string("region", region)
        if object_lock is not None:
            _check_object_lock(object_lock)
        self._bucket = Bucket(bucket, endpoint_url=endpoint_url, region=region, object_lock=object_lock)
        self._ends: dict[str, int] = {}
        """For each file that grows by appends, an offset at which an append ended. The bytes before it never change."""

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    async def put(self, name: str, source: Path, sha256: str) -> None:
        key = self._key(name)
        if not await self._bucket.create_from(source, key, sha256) and await self._hash(key) != sha256:
            raise ArchiveConflict(f"{self.url}: {name!r} holds another file")

    async def read(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        key = self._key(name)
        if name not in self._ends:
            try:
                async for chunk in self._bucket.get(key, offset):
                    yield chunk
                return
            except FileNotFoundError:
                pass
        batch: list[int] = []
        async for start, _ in self._parts(name, offset):
            batch.append(start)
            if len(batch) == _GETS_AT_ONCE:
                for content in await self._get_parts(key, batch, offset):
                    yield content
                batch = []
        for content in await self._get_parts(key, batch, offset):
            yield content
        if name not in self._ends:
            raise FileNotFoundError(f"{self.url}: {name!r} does not exist")

    async def append(self, name: str, offset: int, data: bytes) -> None:
        key = self._key(name)
        check_lines(data)
        if offset and self._ends.get(name) != offset:
            await self._find_end(name)
            if (end := self._ends.get(name, 0)) != offset:
                raise ArchiveConflict(f"{self.url}: {name!r} has {end} bytes, not {offset}")
        # A retry after a lost response is refused. The object's metadata tells who created the object.
        part, writer = _part_key(key, offset), {"writer": secrets.token_hex(16)}
        if not await self._bucket.create(part, data, writer) and await self._metadata(part) != writer:
            raise ArchiveConflict(f"{self.url}: {name!r} has more than {offset} bytes")
        self._ends[name] = offset + len(data)

    async def names(self) -> AsyncIterator[str]:
        last = None
        async for key, _ in self._bucket.list(self._prefix):
            name = key.removeprefix(self._prefix)
            if part := _PART.fullmatch(name):
                name = part[1]
            if name != last and "/." not in f"/{name}":
                yield name
            last = name

    async def aclose(self) -> None:
        """Close the connections."""
        await self._bucket.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._prefix}{name}"

    async def _hash(self, key: str) -> str:
        metadata = await self._metadata(key)
        if "sha256" in metadata:
            return metadata["sha256"]
        # Another program stored the object: it has no hash in its metadata.
        found = hashlib.sha256()
        async for chunk in self._bucket.get(key):
            found.update(chunk)
        return found.hexdigest()

    async def _metadata(self, key: str) -> dict[str, str]:
        """Return the metadata of an object that the bucket reported to exist."""
        try:
            return await self._bucket.metadata(key)
        except FileNotFoundError as error:
            failure = ArchiveError(f"{error} does not exist any more: it was removed while it was stored")
        failure.client_wide = False
        raise failure

    # Files that grow by appends

    async def _parts(self, name: str, offset: int) -> AsyncIterator[tuple[int, int]]:
        """Yield start and end of the parts that reach beyond ``offset``, and update ``_ends``."""
        key, known = self._key(name), self._ends.get(name, 0)
        end = known if known <= offset else 0
        async for part, size in self._bucket.list(f"{key}/", _part_key(key, end - 1) if end else ""):
            if (found := _PART.fullmatch(part)) is None or found[1] != key:
                continue
            if int(found[2]) != end:
                message = f"{self.url}: {name!r} lacks the bytes from {end} on: an object was removed or added"
                raise ArchiveError(message, transient=False)
            end += size
            self._ends[name] = end
            if end > offset:
                yield end - size, end

    async def _find_end(self, name: str) -> None:
        async for _ in self._parts(name, self._ends.get(name, 0)):
            pass

    async def _get_parts(self, key: str, starts: list[int], offset: int) -> list[bytes]:
        """Return the content of parts, without the bytes before ``offset``."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._get_part(_part_key(key, start))) for start in starts]
        except* ArchiveError as errors:
            failure = errors.exceptions[0]
        else:
            return [task.result()[max(0, offset - start) :] for task, start in zip(tasks, starts, strict=True)]
        raise failure

    async def _get_part(self, key: str) -> bytes:
        return b"".join([chunk async for chunk in self._bucket.get(key)])


def _part_key(key: str, offset: int) -> str:
    return f"{key}/{offset:020}.part"


def _parse_url(url: Any) -> tuple[str, str]:
    """Return the bucket and the prefix."""
    _checks.string("url", url)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/")
    if not url.startswith("s3://") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        # The URL may contain a password.
        shown = f", got {url!r}" if "@" not in url else ""
        raise ConfigurationError(f"url: must be s3://bucket or s3://bucket/prefix{shown}")
    if prefix:
        check_name(prefix)
    return bucket, prefix


def _check_endpoint(endpoint_url: Any) -> None:
    _checks.string("endpoint_url", endpoint_url)
    try:
        parts = urlsplit(endpoint_url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname is not None and "@" not in parts.netloc
    except ValueError:
        is_valid = False
    if not is_valid:
        shown = f", got {endpoint_url!r}" if "@" not in endpoint_url else ""
        raise ConfigurationError(f"endpoint_url: must be https://host or https://host:port, without a user{shown}")


def _check_object_lock(object_lock: Any) -> None:
    if not isinstance(object_lock, tuple) or len(object_lock) != 2 or object_lock[0] not in _LOCK_MODES:
        modes = " or ".join(_LOCK_MODES)
        raise ConfigurationError(f"object_lock: must be a tuple of {modes} and a number of days, got {object_lock!r}")
    _checks.integer("object_lock: days", object_lock[1])
