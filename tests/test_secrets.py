"""No token, secret or code appears in any log, text, pickle or traceback, whatever a server responds."""

from __future__ import annotations

import asyncio
import copy
import html
import io
import json
import logging
import pickle
import socket
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import aiohttp
import pytest
from aiohttp import web
from rich.pretty import pretty_repr

from signing_async import (
    APIError,
    Attempt,
    AuthError,
    ConfigurationError,
    FileTokenStore,
    MemoryTokenStore,
    OAuth,
    Response,
    RetryPolicy,
    SigningClient,
    SigningError,
    Token,
    TransportError,
    User,
)
from signing_async._secret import Secret  # private: what the token endpoint is given
from signing_async.postgres import PostgresInbox, PostgresJournal, PostgresTokenStore
from signing_async.redis import RedisRateLimiter, RedisSeenEvents, RedisTokenStore
from signing_async.sandbox import Sandbox
from signing_async.settings import Settings  # private: the command line gives its options to it
from signing_async.transport.operation import Observer  # private: exchange() leaves the frames of its task out
from signing_async.webhooks import Inbox
from tests.auth.oauth_servers import (
    REDIRECT,
    Received,
    Scripted,
    ScriptedResponse,
    drops,
    hangs,
    let_pass,
    oauth_for,
    says,
)

# Every secret starts with this, so that a part of one is found too.
MARK = "S3CR3T"
CLIENT_SECRET = f"{MARK}/client+secret=&~"
CODE = f"{MARK}.code/+%&=1"
OLD = Token(f"{MARK}-access/+==", f"{MARK}-refresh/+==")
HERE = str(Path(__file__).parent)

Calls = Callable[[SigningClient, OAuth], Awaitable[object]]


class Watch:
    """Collects everything that is written or raised."""

    def __init__(self) -> None:
        self.log = io.StringIO()
        self.attempts: list[Attempt] = []
        self.responses: list[Response] = []
        self.errors: list[BaseException] = []

    async def failing(self, call: Awaitable[object]) -> SigningError:
        """Return the error that the call raises."""
        with pytest.raises(SigningError) as caught:
            await call
        self.errors.append(caught.value)
        return caught.value

    def check(self) -> None:
        """Nothing shows a secret, and nothing leads to aiohttp."""
        assert self.log.getvalue()
        hidden("log", self.log.getvalue())
        for attempt in self.attempts:
            hidden("attempt", repr(attempt))
            hidden("headers of an attempt", repr(dict(attempt.headers)))
        for response in self.responses:
            hidden("response", f"{response!r} {response} {response.request_id} {pretty_repr(response)}")
        for error in self.errors:
            check(error)


def hidden(where: str, text: str | bytes) -> None:
    """Assert that no part of a secret is in the text, in any spelling."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    place = data.find(MARK.encode())
    assert place < 0, f"{where}: ...{data[max(0, place - 300) : place + 100]!r}"


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and everything in its chain, including suppressed ones."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen.append(one)
            todo += [one.__cause__, one.__context__]
            yield one


def frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    """Yield file and variable of each frame outside the tests, as debuggers and rich's tracebacks show it."""
    for frame, _ in traceback.walk_tb(trace):
        name = frame.f_code.co_filename
        for value in () if name.startswith(HERE) else frame.f_locals.values():
            with suppress(AttributeError):  # an object that is half made may have no repr yet
                yield name, repr(value)
            yield name, pretty_repr(value)


def check(error: BaseException) -> None:
    """What can be seen of an exception, and of all that it leads to."""
    for one in chain(error):
        assert not type(one).__module__.startswith("aiohttp"), repr(one)
        hidden("str", str(one))
        hidden("repr", repr(one))
        hidden("args", repr(one.args))
        for name, value in vars(one).items():
            if name != "body":
                hidden(name, repr(value))
        for name, text in frames(one.__traceback__):
            assert "/aiohttp/" not in name
            hidden(f"a frame of {name}", text)
    pickled = pickle.dumps(error)
    hidden("pickle", pickled)
    for again in (pickle.loads(pickled), copy.copy(error), copy.deepcopy(error)):
        hidden("a copy", f"{again} {again!r}")
    hidden("the formatted exception", "".join(traceback.format_exception(strip(error))))


def strip(error: BaseException) -> BaseException:
    """Return the exception without the frames of tests, which may hold anything, at the top of its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(HERE):
        trace = trace.tb_next
    return error.with_traceback(trace)


@pytest.fixture
async def watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Watch]:
    """Log everything: every logger at DEBUG, asyncio in debug mode with every step as a slow one."""
    watching = Watch()
    handler = logging.StreamHandler(watching.log)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    for name in ("", "signing_async", "aiohttp", "aiohttp.client", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])  # conftest's hides slow steps
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.0
    logging.getLogger().addHandler(handler)
    try:
        # Warnings would be errors: here they are searched like the log.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield watching
        for warning in caught:
            hidden("warning", str(warning.message))
    finally:
        logging.getLogger().removeHandler(handler)
    watching.check()


def everything(received: Received) -> str:
    """Return what a malicious server might echo: all that it received, and what else it knows."""
    sent = received.body.decode("utf-8", "replace")
    fields = [values[0] for values in parse_qs(sent).values()]
    known = [OLD.access_token, str(OLD.refresh_token), CLIENT_SECRET]
    return " | ".join([received.headers.get("Authorization", ""), *fields, *known])


def escaped(text: str) -> str:
    """Escape as some JSON libraries do, including slashes and non-ASCII characters."""
    return json.dumps(text).replace("/", "\\/")


def tells(status: int, shape: Callable[[str], Any], **headers: str) -> ScriptedResponse:
    """Respond with that status and everything in the shape: text as it is, the rest as JSON."""

    async def respond(request: web.Request, received: Received) -> web.StreamResponse:
        body = shape(everything(received))
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        data = text.encode() if isinstance(text, str) else text
        return web.Response(status=status, body=data, headers={"Content-Type": "application/json"} | headers)

    return respond


def heads(status: int, header: str, prefix: str = "") -> ScriptedResponse:
    """Respond with everything in a header, or in the status line."""

    async def respond(request: web.Request, received: Received) -> web.StreamResponse:
        said = prefix + everything(received).encode("ascii", "replace").decode()
        if header == "reason":
            return web.Response(status=status, reason=said)
        return web.Response(status=status, headers={header: said}, body=b"{}")

    return respond


async def breaks_off(request: web.Request, received: Received) -> web.StreamResponse:
    """Respond with success and close the connection in the middle of the body."""
    response = web.StreamResponse(headers={"request_id": received.headers.get("Authorization", "none")})
    response.content_length = 100_000
    await response.prepare(request)
    await response.write(everything(received).encode())
    assert request.transport is not None
    request.transport.close()
    return response


RESPONSES: dict[str, ScriptedResponse] = {
    "message": tells(400, lambda said: {"message": said, "code": said.replace(" ", ""), "request_id": said}),
    "oauth": tells(400, lambda said: {"error": "invalid_grant", "error_description": said}),
    "oauth code": tells(400, lambda said: {"error": said.replace(" ", "")}),
    "nested": tells(422, lambda said: {"error": {"code": said, "message": said, "details": [{"field": said}]}}),
    "fields": tells(400, lambda said: {"errors": {said: [said, said], "name": said}}),
    "list": tells(400, lambda said: [{"code": said, "message": said}]),
    "problem": tells(403, lambda said: {"type": f"https://x/{said}", "title": said, "detail": said, "instance": said}),
    "escaped": tells(404, lambda said: f'{{"message": {escaped(said)}}}'),
    "url": tells(400, lambda said: {"message": f"no: {quote(said)} {quote(said, safe='')} {urlencode({'q': said})}"}),
    "401": tells(401, lambda said: {"message": said}),
    "429": tells(429, lambda said: {"message": said}, **{"Retry-After": "100"}),
    "500": tells(500, lambda said: {"message": said}),
    "html": tells(502, lambda said: f"<html><title>{html.escape(said)}</title><body>{said}</body></html>"),
    "html without title": tells(503, lambda said: f"<html><body><p>{said}</p></body></html>"),
    "long html": tells(500, lambda said: f"<p>{'x' * (200 - len(MARK) - 9)} {said}</p>"),
    "plain": tells(500, lambda said: said),
    "latin-1": tells(400, lambda said: b"\xe5\xff " + said.encode("latin-1", "replace")),
    "long message": tells(400, lambda said: {"message": "x" * 489 + " " + said}),
    "no JSON": tells(200, lambda said: said),
    "wrong shape": tells(200, lambda said: {"id": {"x": said}, "data": said, "request_id": said, said: said}),
    "wrong list": tells(200, lambda said: [said, {"id": said}]),
    "request id": heads(400, "request_id"),
    "request id of success": heads(200, "X-Request-Id"),
    "long request id": heads(500, "request_id", "x" * 185),
    "location": heads(302, "Location", "/?next="),
    "authenticate": heads(401, "WWW-Authenticate", "Bearer "),
    "retry after": heads(503, "Retry-After"),
    "reason": heads(500, "reason"),
    "breaks off": breaks_off,
    "hangs up": drops,
    "waits": hangs,
}


async def _stream(client: SigningClient, oauth: OAuth) -> None:
    async with client.stream("GET", "/x") as response:
        async for _ in response:
            pass


OPERATIONS: dict[str, Calls] = {
    "exchange": lambda client, oauth: oauth.exchange(f"{REDIRECT}?code={quote(CODE, safe='')}&state=st4te", "st4te"),
    "exchange code": lambda client, oauth: oauth.exchange(CODE),
    "refresh": lambda client, oauth: oauth.refresh(rejected=OLD.access_token),
    "me": lambda client, oauth: client.me(),
    "create": lambda client, oauth: client.signings.create(name="n", language="EN", signing_order="parallel"),
    "list": lambda client, oauth: client.signings.list(),
    "get": lambda client, oauth: client.signings.get("s-1"),
    "send": lambda client, oauth: client.signings.send("s-1"),
    "upload": lambda client, oauth: client.documents.upload("s-1", b"%PDF-1.4\n" * 9, "a.pdf", preflight=False),
    "read": lambda client, oauth: client.documents.read_signed("s-1", "d-1"),
    "add": lambda client, oauth: client.recipients.add("s-1", email="a@b.example", first_name="A", last_name="B"),
    "recipients": lambda client, oauth: client.recipients.list("s-1"),
    "remind": lambda client, oauth: client.recipients.remind("s-1", "r-1"),
    "request": lambda client, oauth: client.request("POST", "/x/{id}", path={"id": "x-1"}, json={"a": 1}),
    "request a record": lambda client, oauth: client.request("GET", "/x", params={"a": "b"}, into=User),
    "request, reconciled": lambda client, oauth: client.request(
        "POST", "/x", json={"a": 1}, into=User, reconcile=lambda read: read("/x")
    ),
    "paginate": lambda client, oauth: client.paginate("/x", into=User),
    "stream": _stream,
}
# With these some operations succeed: they ignore the body, or keep unknown fields.
SUCCESSES = {"no JSON", "wrong shape", "wrong list", "request id of success", "breaks off"}


def secret_oauth(base_url: str, token: Token | None = OLD, **settings: Any) -> OAuth:
    """Return an `OAuth` with recognizable secrets."""
    return oauth_for(base_url, client_secret=CLIENT_SECRET, store=MemoryTokenStore(token), **settings)


@asynccontextmanager
async def served(response: ScriptedResponse, token: Token | None = OLD) -> AsyncIterator[tuple[OAuth, SigningClient]]:
    """Serve this response, and yield what asks for it."""
    async with (
        Scripted(response) as server,
        secret_oauth(server.base_url, token) as oauth,
        SigningClient(server.base_url, oauth) as client,
    ):
        yield oauth, client


@pytest.mark.parametrize("name", RESPONSES)
async def test_no_secret_appears_whatever_the_server_responds(name: str, watch: Watch) -> None:
    timeout = 0.05 if name == "waits" else 10
    async with Scripted(RESPONSES[name]) as server:
        for operation, call in OPERATIONS.items():
            retry = RetryPolicy(max_attempts=2 if operation in {"me", "refresh"} else 1, base_delay=0.001)
            async with (
                secret_oauth(server.base_url, retry=retry, timeout=timeout) as oauth,
                SigningClient(
                    server.base_url,
                    oauth,
                    retry=retry,
                    timeout=timeout,
                    on_attempt=watch.attempts.append,
                    on_response=watch.responses.append,
                ) as client,
            ):
                await oauth.token()
                try:
                    await call(client, oauth)
                except SigningError as error:
                    watch.errors.append(error)
                else:
                    assert name in SUCCESSES, operation
    assert len(watch.errors) >= len(OPERATIONS) // 2


async def test_no_secret_appears_without_a_connection(watch: Watch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    retry = RetryPolicy(max_attempts=2, base_delay=0.001)
    async with secret_oauth(base_url, retry=retry) as oauth, SigningClient(base_url, oauth, retry=retry) as client:
        for call in OPERATIONS.values():
            assert isinstance(await watch.failing(call(client, oauth)), TransportError)
    session = aiohttp.ClientSession()
    await session.close()
    async with (
        secret_oauth(base_url, session=session) as oauth,
        SigningClient(base_url, oauth, session=session) as client,
    ):
        for call in OPERATIONS.values():
            await watch.failing(call(client, oauth))


async def test_no_secret_appears_in_the_whole_flow(sandbox: Sandbox, watch: Watch, tmp_path: Path) -> None:
    """Authorize, exchange, calls, refresh, and a reused refresh token, with the sandbox."""
    app = sandbox.register_app(REDIRECT)
    assert app.client_secret is not None
    path = tmp_path / "token.json"
    known = [app.client_secret]
    async with (
        OAuth(
            sandbox.base_url,
            client_id=app.client_id,
            client_secret=app.client_secret,
            redirect_uri=REDIRECT,
            store=FileTokenStore(path),
        ) as oauth,
        SigningClient(sandbox.base_url, oauth, on_attempt=watch.attempts.append) as client,
    ):
        request = oauth.authorization_request()
        known.append(code := sandbox.authorize(app))
        first = await oauth.exchange(f"{REDIRECT}?code={code}&state={request.state}", request.state)
        await client.me()
        errors = [await watch.failing(oauth.exchange(code))]
        known.append(code := sandbox.authorize(app))
        tokens = [first, await oauth.exchange(code)]
        sandbox.clock.advance(hours=2)
        signing = await client.signings.create(name="n", language="EN")
        tokens.append(await oauth.token())
        errors.append(await watch.failing(client.signings.send(signing.id)))
        # A reused refresh token: the service revokes the whole family.
        await FileTokenStore(path).save(
            Token(tokens[1].access_token, tokens[1].refresh_token, datetime(2020, 1, 1, tzinfo=UTC))
        )
        errors.append(await watch.failing(oauth.refresh()))
        path.write_bytes(path.read_bytes()[:-3])
        errors.append(await watch.failing(oauth.refresh()))
        shown = " ".join(map(repr, [oauth, client, *tokens, request, FileTokenStore(path), client.signings]))
    known += [str(part) for token in tokens for part in (token.access_token, token.refresh_token)]
    seen = [watch.log.getvalue(), shown, repr(watch.attempts)]
    for error in errors:
        for one in chain(error):
            seen += [str(one), repr(one), repr({k: v for k, v in vars(one).items() if k != "body"})]
            seen += [text for _, text in frames(one.__traceback__)]
        seen.append(pickle.dumps(error).decode("latin-1"))
    assert "oauth.token" in repr([record.operation for record in sandbox.requests])
    for secret in known:
        for text in seen:
            assert secret not in text


async def test_error_body_is_as_received_but_redacted_in_texts_and_pickles() -> None:
    async with served(tells(400, lambda said: {"message": said})) as (_, client):
        with pytest.raises(APIError) as caught:
            await client.me()
    assert OLD.access_token.encode() in caught.value.body
    assert "[redacted]" in str(caught.value)
    assert b"[redacted]" in pickle.loads(pickle.dumps(caught.value)).body
    hidden("str", str(caught.value))


@pytest.mark.parametrize(
    "response",
    [
        tells(200, lambda said: {"token": f"{MARK}-response"}),
        tells(400, lambda said: {"error": "invalid_grant", "error_description": f"{MARK}-response"}),
        tells(503, lambda said: {"token": f"{MARK}-response"}),
    ],
    ids=["no token in it", "refused", "failed"],
)
async def test_no_part_of_a_token_response_stays_in_a_frame_or_a_field(response: ScriptedResponse) -> None:
    """Debuggers and crash reporters show the fields of what the variables of a traceback lead to."""
    async with Scripted(response) as server, oauth_for(server.base_url, retry=RetryPolicy.none()) as oauth:
        # Not by exchange(): it copies the error of its task, which leaves these frames out.
        with pytest.raises(AuthError) as caught:
            await oauth.current.endpoint.request("oauth.exchange", {"code": Secret("code")}, Observer())
    for frame, _ in traceback.walk_tb(caught.value.__traceback__):
        if not frame.f_code.co_filename.startswith(HERE):
            for name, value in reachable(frame.f_locals):
                if name not in ("message", "args"):  # what the service says of an error is a part of its message
                    assert f"{MARK}-response" not in value, f"{name} of {frame.f_code}"


def reachable(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the names and contents of all texts that a variable leads to."""
    if isinstance(value, str | bytes):
        yield name, str(value)
    elif isinstance(value, dict) and depth < 8:
        for key, each in value.items():
            yield from reachable(each, str(key), depth + 1)
    elif isinstance(value, list | tuple) and depth < 8:
        for each in value:
            yield from reachable(each, name, depth + 1)
    elif hasattr(value, "__self__"):
        yield from reachable(value.__self__, name, depth + 1)
    elif type(value).__module__.startswith("signing_async.") and depth < 8:
        slots = {slot: getattr(value, slot, None) for slot in getattr(value, "__slots__", ())}
        yield from reachable({**slots, **getattr(value, "__dict__", {})}, name, depth + 1)


async def test_recent_tokens_and_the_client_secret_are_redacted(watch: Watch) -> None:
    count = 0

    async def respond(request: web.Request, received: Received) -> web.StreamResponse:
        nonlocal count
        if request.path == "/api/oauth/token":
            count += 1
            pair = {"access_token": f"{MARK}-a{count}", "refresh_token": f"{MARK}-r{count}", "expires_in": 3600}
            return await says(pair)(request, received)
        told = " ".join([CLIENT_SECRET, *(f"{MARK}-{kind}{n}" for n in range(count - 3, count + 1) for kind in "ar")])
        return await says({"message": told}, 400)(request, received)

    async with served(respond) as (oauth, client):
        request = oauth.authorization_request()
        callback = f"{REDIRECT}?code={quote(CODE)}&state={request.state}"
        tokens = [await oauth.exchange(callback, request.state), *[await oauth.refresh() for _ in range(30)]]
        error = await watch.failing(client.me())
        hidden("repr", " ".join(map(repr, [oauth, client, request, client.signings, *tokens])))
    assert str(error).count("[redacted]") == 9


async def test_refused_callback_shows_no_code(watch: Watch) -> None:
    async with secret_oauth("https://tenant.example.com") as oauth:
        for callback in (
            f"{REDIRECT}?code={quote(CODE)}&state=other",
            f"{REDIRECT}?code={quote(CODE)}",
            f"{REDIRECT}?code={quote(CODE)}&code={MARK}2&state=st4te",
            f"{REDIRECT}?error=access_denied&error_description={MARK}2+st4te&code={MARK}2&state=st4te",
            f"{MARK} with spaces",
            f"https://[{MARK}?code={MARK}&state=st4te",
        ):
            await watch.failing(oauth.exchange(callback, "st4te"))


@pytest.mark.parametrize(
    "settings", [{"token_format": "xml"}, {"timeout": -1}, {"redirect_uri": ""}, {"base_url": "http://x.example"}]
)
def test_invalid_setting_does_not_show_the_client_secret(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        secret_oauth(**{"base_url": "https://tenant.example.com"} | settings)
    check(caught.value)


@pytest.mark.parametrize(
    "construct",
    [
        lambda: RedisTokenStore(f"redis://:{MARK}@h", "a", key=MARK.encode() * 4, lease=-1),
        lambda: RedisTokenStore("redis://h", "a", key=[MARK]),
        lambda: RedisSeenEvents(f"redis://:{MARK}@h", ttl=-1),
        lambda: RedisRateLimiter(f"redis://:{MARK}@h:port"),
        lambda: PostgresTokenStore(f"postgresql://u:{MARK}@h/d", "a", grace=-1),
        lambda: PostgresJournal(f"postgresql://u:{MARK}@h/d#x"),
        lambda: PostgresInbox(f"postgresql://u:{MARK}@h/d", key=MARK, lease=-1),
        lambda: Inbox("inbox", key=[MARK]),
        lambda: Settings.load(given={"timeout": "-1"}),
    ],
    ids=range(9),
)
def test_invalid_argument_or_setting_shows_no_secret_of_the_others(
    construct: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text(f'client_secret = "{MARK}"\njournal = "postgresql://u:{MARK}@h/d"\n')
    (tmp_path / "config.toml").chmod(0o600)
    monkeypatch.setenv("SIGNING_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", MARK)
    with pytest.raises(ConfigurationError) as caught:
        construct()
    check(caught.value)


def test_object_that_holds_a_secret_is_not_pickled() -> None:
    for holder in (secret_oauth("https://tenant.example.com"), PostgresJournal(f"postgresql://u:{MARK}@h/d")):
        with pytest.raises(TypeError, match=r"^a Secret cannot be pickled$"):
            pickle.dumps(holder)


async def test_corrupt_token_file_shows_none_of_its_content(watch: Watch, tmp_path: Path) -> None:
    """json's own error would hold all of it."""
    path = tmp_path / "token.json"
    path.write_text(f'{{"access_token": "{MARK}", "refresh_token": "{MARK}", ')
    store = FileTokenStore(path)
    await watch.failing(store.load())
    path.write_text(f'{{"access_token": "{MARK} {MARK}"}}')
    await watch.failing(store.load())
    (tmp_path / "file").write_text("")
    await watch.failing(FileTokenStore(tmp_path / "file" / "token.json").save(OLD))


async def test_background_refresh_logs_no_secret(watch: Watch) -> None:
    async with served(RESPONSES["message"]) as (oauth, _):
        task = asyncio.create_task(oauth.refresh(rejected=OLD.access_token))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await oauth.settle()


async def test_failed_early_refresh_is_logged_without_secrets(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    token = Token(OLD.access_token, OLD.refresh_token, datetime.now(UTC) + timedelta(seconds=50))
    async with served(RESPONSES["message"], token) as (oauth, _):
        await oauth.token()
        let_pass(monkeypatch, 48)
        assert (await oauth.token()).access_token == OLD.access_token
    assert "early token refresh" in watch.log.getvalue()


def test_token_is_neither_shown_nor_pickled() -> None:
    hidden("repr", f"{OLD!r} {OLD}")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(OLD)


@pytest.mark.parametrize("spell", [escaped, json.dumps, html.escape, quote, lambda text: quote(text, safe="")])
async def test_client_secret_is_redacted_however_the_server_spells_it(spell: Callable[[str], str]) -> None:
    secret = f'{MARK}/"å"&<ö>'
    async with (
        Scripted(tells(400, lambda said: f"Sorry, wrong: {spell(secret)}")) as server,
        oauth_for(server.base_url, client_secret=secret) as oauth,
    ):
        with pytest.raises(AuthError, match=r"wrong: .*\[redacted\]") as caught:
            await oauth.exchange("code")
    check(caught.value)


def test_these_tests_notice_secrets_in_messages_attributes_variables_and_causes() -> None:
    elsewhere: dict[str, Any] = {}
    exec(compile("def fail(error):\n    local = 'S3CR3T'\n    raise error", "/elsewhere.py", "exec"), elsewhere)
    caused, foreign, raised = AuthError("x"), AuthError("x"), AuthError("x")
    caused.__cause__, foreign.__cause__ = ValueError(MARK), aiohttp.ClientError()
    with pytest.raises(AuthError):
        elsewhere["fail"](raised)
    shown = [AuthError(MARK), AuthError("x", code=MARK), AuthError("x", request_id=MARK)]
    for broken in (*shown, caused, foreign, raised):
        with pytest.raises(AssertionError):
            check(broken)
