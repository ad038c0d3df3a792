"""What the token store, the rate limiter and the seen events have in common: settings, secrets and closing."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from typing import Any

import pytest

from signing_async import AuthError, ConfigurationError, LocalRateLimiter, Token
from signing_async.redis import RedisRateLimiter, RedisSeenEvents, RedisTokenStore
from tests.redis.server import RedisServer, running_redis
from tests.servers import talking

TOKEN = Token("access", "refresh")
PASSWORD = "pass-word-4711"
URL = f"redis://:{PASSWORD}@127.0.0.1"


@pytest.mark.parametrize(
    ("part", "settings", "words"),
    [
        (RedisTokenStore, {"key": "short"}, "an encryption key must be 32 bytes"),
        (RedisSeenEvents, {"timeout": float("nan")}, "timeout: must be a number above 0, got nan"),
        (RedisSeenEvents, {"redis": "http://x"}, "invalid Redis URL: must begin with redis://, rediss:// or unix://"),
        (RedisSeenEvents, {"redis": f"redis://:{PASSWORD}@h:port"}, "invalid Redis URL: invalid host or port"),
        (RedisSeenEvents, {"redis": f"{URL}/?socket_timeout=x"}, "invalid Redis URL: Invalid value for"),
        (RedisSeenEvents, {"namespace": ""}, "namespace: must be a non-empty string, got ''"),
        (RedisRateLimiter, {"redis": 5}, "redis: must be a URL or a client of redis.asyncio, got int"),
        (RedisRateLimiter, {"rate": 0}, "rate: must be a number above 0, got 0"),
        (RedisRateLimiter, {"rate": 5, "burst": 0}, "burst: must be an integer of at least 1, got 0"),
        (RedisRateLimiter, {"burst": 5}, "burst: needs a rate"),
        (RedisRateLimiter, {"local": LocalRateLimiter}, "local: must be a RateLimiter, such as LocalRateLimiter"),
    ],
)
def test_invalid_settings_are_rejected_without_showing_the_password(
    part: Any, settings: dict[str, Any], words: str
) -> None:
    known: dict[str, Any] = {"redis": URL, **({"name": "a"} if part is RedisTokenStore else {})}
    with pytest.raises(ConfigurationError) as caught:
        part(**known | settings)
    assert words in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert caught.value.__context__ is None


def test_missing_redis_py_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio.connection", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'signing-async\[redis\]'"):
        RedisTokenStore("redis://127.0.0.1", "a")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://user:{PASSWORD}@cache.example.com/3", "redis://cache.example.com:6379/3"),
        (f"rediss://:{PASSWORD}@[::1]:7000?ssl_cert_reqs=none", "rediss://::1:7000"),
        (f"unix://user:{PASSWORD}@/run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_repr_shows_the_address_without_the_password(url: str, shown: str) -> None:
    assert repr(RedisTokenStore(url, "a")) == f"RedisTokenStore({shown!r}, 'a')"


async def test_password_appears_in_no_text_traceback_or_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running_redis("--requirepass", PASSWORD) as server:
        url = server.url.replace("://", f"://:{PASSWORD}@")
        other = url.replace(PASSWORD, f"wrong{PASSWORD}")
        async with RedisTokenStore(url, "a") as store, RedisTokenStore(other, "a") as wrong:
            await store.save(TOKEN)
            with pytest.raises(AuthError, match="AuthenticationError") as caught:
                await wrong.save(TOKEN)
            frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
            assert frames
            assert PASSWORD not in "".join(repr(frame.f_locals) for frame in frames)
            assert PASSWORD not in f"{store!r} {wrong!r} {wrong} {caught.value!r}"
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize("url", ["redis://app:{password}@{place}", "redis://{place}?password={password}"])
async def test_password_echoed_by_the_server_is_redacted(url: str) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(f"-ERR no {PASSWORD}! for you\r\n".encode())

    async with talking(echo) as origin:
        place = origin.removeprefix("http://")
        async with RedisTokenStore(url.format(place=place, password=f"{PASSWORD}%21"), "a") as store:
            with pytest.raises(AuthError, match="for you") as caught:
                await store.load()
            assert PASSWORD not in str(caught.value)
            assert place in repr(store)


@pytest.mark.parametrize("part", [RedisSeenEvents, RedisTokenStore])
async def test_part_that_is_collected_while_it_is_open_warns(part: Any, redis: RedisServer) -> None:
    opened = part(redis.url) if part is RedisSeenEvents else part(redis.url, "dropped")
    await (opened.claim("a") if part is RedisSeenEvents else opened.load())
    with pytest.warns(ResourceWarning, match=rf"{part.__name__}\(.* was not closed"):
        opened.__del__()
    await opened.aclose()
