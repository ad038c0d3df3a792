"""A real S3 for tests: moto in a child process on a free loopback port, and a proxy in front of it that fails."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any, Self

import aiohttp
from aiohttp import web
from yarl import URL

from tests.servers import serving

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIA-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "s3cret-access-key-of-the-tests",
    "AWS_SESSION_TOKEN": "session-token-of-the-tests",
    "AWS_DEFAULT_REGION": "eu-north-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=AKIA/20310101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"

_REFUSALS = {"ConditionalRequestConflict": 409, "BadDigest": 400, "InvalidObjectState": 403}


class S3Server:
    """The server at ``url``, for as long as the block lasts. Each test makes its own bucket."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not start"
        self._numbers = itertools.count()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def new_bucket(self, *, versioned: bool = False) -> str:
        """Return the name of an empty bucket; a versioned one supports object lock."""
        name = f"bucket-{next(self._numbers)}"
        headers = {"x-amz-bucket-object-lock-enabled": "true"} if versioned else {}
        self.request("PUT", name, headers=headers)
        return name

    def request(self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
        """Send a request, and return the body of the response with its headers."""
        headers = {"Authorization": _AUTHORIZATION, "Content-Type": "binary/octet-stream", **(headers or {})}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request) as response:
            return response.read(), dict(response.headers)


class Proxy:
    """The URL of the proxy, and what it does with a request instead of forwarding it.

    ``fail`` gets each request; it returns what to do with it: ``"forward"``, ``"lose request"``, ``"lose response"``,
    ``"cut off"`` or ``"damage"`` (the response), a status, or the code of a refusal to respond with. ``page_size`` is
    the most that a list returns.
    """

    def __init__(self) -> None:
        self.url = ""
        self.page_size: int | None = None
        self.fail: Callable[[web.Request], str | int] = lambda request: "forward"


@asynccontextmanager
async def failing(target: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server. It refuses content without its SHA-256, which keeps bytes from changing."""
    proxy = Proxy()

    async def forward(request: web.Request) -> web.StreamResponse:
        todo = proxy.fail(request)
        try:
            body = await request.read()
        except ConnectionResetError:  # the client was killed
            return web.Response()
        if request.method == "PUT" and "x-amz-checksum-sha256" not in request.headers:
            todo = 400
        if isinstance(todo, int):
            return web.Response(status=todo)
        if todo in _REFUSALS:
            text = f"<Error><Code>{todo}</Code><Message>Try again</Message></Error>"
            return web.Response(status=_REFUSALS[todo], text=text, content_type="application/xml")
        if todo == "lose request":
            _abort(request)
            return web.Response()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
        url = URL(target + request.raw_path, encoded=True)
        if proxy.page_size is not None and "list-type" in request.query:
            url = url.update_query({"max-keys": proxy.page_size})
        async with session.request(request.method, url, data=BytesIO(body), headers=headers) as response:
            content = await response.read()
        left_out = ("content-length", "connection", "transfer-encoding", "date", "server")
        headers = {name: value for name, value in response.headers.items() if name.lower() not in left_out}
        if todo == "lose response":
            _abort(request)
        elif todo == "cut off":
            kept = web.StreamResponse(status=response.status, headers=headers)
            kept.content_length = len(content)
            await kept.prepare(request)
            await kept.write(content[: len(content) // 2])
            _abort(request)
            return kept
        elif todo == "damage":
            content = bytes([content[0] ^ 1]) + content[1:]
        return web.Response(status=response.status, body=content, headers=headers)

    async with aiohttp.ClientSession() as session, serving(forward) as server:
        proxy.url = server.origin
        yield proxy


def _abort(request: web.Request) -> None:
    if request.transport is not None:  # None if the client has gone
        request.transport.abort()


def _serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *args: Any, **kwargs: Any) -> None: ...

    moto = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: Any, start_response: Any) -> Any:
        """S3 checks a precondition and writes in one step, which moto does not."""
        environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with lock:
            return list(moto(environ, start_response))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Quiet)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
