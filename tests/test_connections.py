"""A connection that could not be made: an untrusted certificate is permanent, everything else is transient."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from taskiq import InMemoryBroker

from signing_async import ConfigurationError, MemoryTokenStore, OAuth, RetryPolicy, SigningClient, SigningError, Token
from signing_async import taskiq as taskiq_module  # a broker gets more time on a busy machine
from signing_async._connections import describe_failure  # macOS and Windows cannot be reached from here
from signing_async.archive import S3Store
from signing_async.postgres import PostgresJournal
from signing_async.redis import RedisSeenEvents, RedisTokenStore
from signing_async.taskiq import enqueuing, redis_streams
from tests.archive.s3_server import CREDENTIALS
from tests.servers import talking

REFUSED, UNKNOWN = "127.0.0.1:1", "service.invalid:443"
PATIENCE = 20.0


async def _call(place: str) -> None:
    async with SigningClient(f"https://{place}", "token", retry=RetryPolicy.none()) as client:
        await client.me()


async def _refresh(place: str) -> None:
    store = MemoryTokenStore(Token("old", "refresh"))
    settings = {"client_id": "app", "client_secret": "secret", "redirect_uri": "https://app.example.com/"}
    async with OAuth(f"https://{place}", store=store, retry=RetryPolicy.none(), **settings) as oauth:
        await oauth.refresh()


async def _claim(place: str) -> None:
    # asyncpg has no roots of its own.
    dsn = f"postgresql://user:secret@{place}/db?sslmode=verify-full&sslrootcert=roots.pem"
    # A transient failure is retried for as long.
    async with PostgresJournal(dsn, timeout=0.2 if place in (REFUSED, UNKNOWN) else PATIENCE) as journal:
        await journal.claim("lease")


async def _load_token(place: str) -> None:
    async with RedisTokenStore(f"rediss://{place}", "app", timeout=PATIENCE) as store:
        await store.load()


async def _look_up_event(place: str) -> None:
    """Without an event loop, as WSGI receivers do."""
    seen = RedisSeenEvents(f"rediss://{place}", timeout=PATIENCE)
    try:
        await asyncio.to_thread(seen.claim, "event")
    finally:
        await seen.aclose()


async def _enqueue(place: str) -> None:
    async with enqueuing(redis_streams(f"rediss://{place}")):
        pass


async def _enqueue_elsewhere(place: str) -> None:
    """With a broker whose errors are those of the system."""

    class Broker(InMemoryBroker):
        async def startup(self) -> None:
            host, _, port = place.rpartition(":")
            await asyncio.open_connection(host, int(port), ssl=True)

    async with enqueuing(Broker()):
        pass


async def _append(place: str) -> None:
    async with S3Store("s3://bucket/archive", endpoint_url=f"https://{place}") as store:
        await store.append("manifest.jsonl", 0, b"x\n")


CONNECTIONS = [*(_call, _refresh, _claim), *(_load_token, _look_up_event, _enqueue, _enqueue_elsewhere, _append)]
each_connection = pytest.mark.parametrize("connect", CONNECTIONS, ids=lambda connect: connect.__name__.strip("_"))


@asynccontextmanager
async def _untrusted(connect: Callable[[str], Awaitable[None]]) -> AsyncIterator[str]:
    """A server whose certificate no client trusts; gives its host and port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if connect is _claim:
                await reader.readexactly(8)  # PostgreSQL's request for TLS
                writer.write(b"S")
            await writer.start_tls(context)
            received.append(await reader.read(1))

    received: list[bytes] = []
    async with talking(talk) as origin:
        yield origin.rpartition("//")[2]
    assert not received


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots for asyncpg, time for the broker; credentials, and a single attempt, for S3."""
    monkeypatch.setattr(taskiq_module, "_TIMEOUT", PATIENCE)
    monkeypatch.chdir(tmp_path)
    trustme.CA().cert_pem.write_to_path("roots.pem")
    for name, value in {**CREDENTIALS, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)


@each_connection
async def test_untrusted_certificate_is_a_permanent_failure(connect: Callable[[str], Awaitable[None]]) -> None:
    async with _untrusted(connect) as place:
        with pytest.raises(SigningError) as caught:
            await connect(place)
    assert (caught.value.transient, caught.value.effect) == (False, "none")


@each_connection
@pytest.mark.parametrize("place", [REFUSED, UNKNOWN], ids=["refused", "unknown"])
async def test_refused_connection_and_unknown_host_are_transient_failures(
    connect: Callable[[str], Awaitable[None]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver of a host that starts may not know any name yet."""

    def resolve(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if place is UNKNOWN:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(SigningError) as caught:
        await connect(place)
    assert (caught.value.transient, caught.value.effect) == (True, "none")


async def test_missing_socket_of_a_restarting_database_is_a_transient_failure(tmp_path: Path) -> None:
    async with PostgresJournal(f"postgresql:///db?host={tmp_path}", timeout=0.2) as journal:
        with pytest.raises(SigningError, match="No such file") as caught:
            await journal.claim("lease")
    assert caught.value.transient


async def _configure_postgresql(roots: str) -> None:
    PostgresJournal(f"postgresql://127.0.0.1/db?sslmode=verify-ca&sslrootcert={roots}")


async def _configure_redis(roots: str) -> None:
    RedisTokenStore(f"rediss://127.0.0.1?ssl_ca_certs={roots}", "app")


async def _configure_s3(roots: str) -> None:
    os.environ["AWS_CA_BUNDLE"] = roots
    await _append(REFUSED)


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "not PEM"])
@pytest.mark.parametrize("configure", [_configure_postgresql, _configure_redis, _configure_s3])
async def test_file_of_trusted_certificates_that_cannot_be_loaded_is_a_wrong_setting(
    configure: Callable[[str], Awaitable[None]], content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection would fail."""
    roots = tmp_path / "ca.pem"
    if content is not None:
        roots.write_text(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", "")  # set by one of them, and restored afterwards
    with pytest.raises(ConfigurationError, match=f"cannot load the trusted certificates of '{re.escape(str(roots))}'"):
        await configure(str(roots))


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Path]:
    """Files of a client certificate, its key, and both; a text; and a missing one."""
    issued = trustme.CA().issue_cert("worker")
    paths = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key", "both", "text", "missing")}
    issued.cert_chain_pems[0].write_to_path(paths["certificate"])
    issued.private_key_pem.write_to_path(paths["key"])
    issued.private_key_and_cert_chain_pem.write_to_path(paths["both"])
    paths["text"].write_text("no certificate")
    return paths


def _postgresql(paths: dict[str, Path], certificate: str, key: str) -> None:
    PostgresJournal(f"postgresql://127.0.0.1/db?sslcert={paths[certificate]}&sslkey={paths[key]}")


def _redis(paths: dict[str, Path], certificate: str, key: str) -> None:
    RedisTokenStore(f"rediss://127.0.0.1?ssl_certfile={paths[certificate]}&ssl_keyfile={paths[key]}", "app")


@pytest.mark.parametrize(("certificate", "key"), [("missing", "key"), ("text", "key"), ("certificate", "text")])
@pytest.mark.parametrize("connect", [_postgresql, _redis])
def test_client_certificate_that_cannot_be_loaded_is_a_wrong_setting(
    connect: Callable[[dict[str, Path], str, str], None], certificate: str, key: str, pair: dict[str, Path]
) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot load the client certificate .*{certificate}.pem'"):
        connect(pair, certificate, key)


def test_client_certificate_of_redis_is_loaded_with_its_key_and_password(pair: dict[str, Path]) -> None:
    private = load_pem_private_key(pair["key"].read_bytes(), None)
    sealed = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"s3cret"))
    pair["text"].write_bytes(sealed)
    _redis(pair, "certificate", "key")
    url = f"rediss://127.0.0.1?ssl_certfile={pair['certificate']}&ssl_keyfile={pair['text']}"
    RedisTokenStore(f"{url}&ssl_password=s3cret", "app")
    with pytest.raises(ConfigurationError, match="cannot load the client certificate of "):
        RedisTokenStore(f"rediss://127.0.0.1?ssl_keyfile={pair['key']}", "app")


def test_client_certificate_of_postgresql_may_be_valid_or_unused(pair: dict[str, Path]) -> None:
    _postgresql(pair, "certificate", "key")
    PostgresJournal(f"postgresql://127.0.0.1/db?sslcert={pair['both']}")
    PostgresJournal("postgresql://127.0.0.1/db?sslmode=disable&sslcert=/nowhere/cert.pem&sslkey=/nowhere/key.pem")
    PostgresJournal("postgresql://127.0.0.1/db?sslmode=prefer&sslrootcert=/nowhere/ca.pem")
    PostgresJournal("postgresql:///db?host=/run/postgresql&sslcert=/nowhere/cert.pem&sslcrl=/nowhere/crl.pem")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (socket.gaierror(8, "nodename nor servname provided, or not known"), "nodename nor servname provided"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), "certificate verify failed"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_failure_to_connect_is_described_without_the_address(error: OSError, words: str) -> None:
    """The numbers of name resolution are not those of the system, and positive on macOS and Windows."""
    text = describe_failure(error)
    assert words in text
    assert "127.0.0.1" not in text
