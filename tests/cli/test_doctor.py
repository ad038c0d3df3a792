"""doctor: what it finds out of services that answer in different ways, and that its file makes a client work."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import attrs
import pytest
import trustme
from aiohttp import web

from signing_async import Assumptions, AuthError, MemoryTokenStore, OAuth, RetryPolicy, SigningClient, SigningError
from signing_async.cli.probing import Finding, Probe, described
from signing_async.sandbox import Profile, Sandbox
from signing_async.transport import wire
from signing_async.transport.retry import Outcome
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service, running
from tests.cli.terminal import piped
from tests.pdfs import make_pdf
from tests.servers import answering, serving


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A sandbox with the profile that the test names, and three signings, of which one is completed."""
    with running(seed=7, profile=getattr(request, "param", None) or Profile()) as started:
        started.call(_seed(started))
        yield started


async def _seed(started: Service) -> None:
    sandbox = started.sandbox
    known = Assumptions(record_paths=("data", "payload"))
    async with SigningClient(sandbox.base_url, sandbox.access_token(), assumptions=known) as client:
        made = [await client.signings.create(name=name, language="EN") for name in ("one", "two", "three")]
        await client.documents.upload(made[0], make_pdf(), "lease.pdf")
        await client.recipients.add(made[0], email="anna@example.com")
        await client.signings.send(made[0])
        await sandbox.complete(made[0].id)


def listed(service: Service, assumptions: Assumptions) -> list[str]:
    """The names of all signings, in pages of one where that can be asked for."""

    async def work() -> list[str]:
        async with SigningClient(
            service.sandbox.base_url, service.sandbox.access_token(), assumptions=assumptions
        ) as client:
            return [signing.name async for signing in client.signings.list(limit=1)]

    return service.call(work())


def pending(service: Service, assumptions: Assumptions) -> int:
    """How many of the recipients of the completed signing are reminded."""

    async def work() -> int:
        async with SigningClient(
            service.sandbox.base_url, service.sandbox.access_token(), assumptions=assumptions
        ) as client:
            (signing,) = [one for one in service.sandbox.signings if one.name == "one"]
            return len(await client.recipients.remind_pending(signing.id))

    return service.call(work())


def checks(ran: Ran) -> dict[str, Any]:
    """What was found, by the names of the checks."""
    return {line["check"]: line for line in ran.lines if "check" in line}


PROFILES = {
    "default": Profile(),
    "laravel": Profile.laravel(),
    "rfc9457": Profile.rfc9457(),
    "numeric": Profile.numeric(),
    "cursors of another name": Profile(cursor_param="page_token", limit_param="take"),
    "a cursor at the top": Profile(pagination="top_cursor", cursor_param="after", limit_param="pageSize"),
    "items of another name": Profile(items_field="rows", limit_param="page_size"),
    "has more": Profile(pagination="has_more", cursor_param="starting_after", items_field="entries"),
    "wrapped records": Profile(record_field="payload"),
    "signed elsewhere": Profile(recipient_completed_field="finished_on"),
    "another request id": Profile(request_id="header", request_id_header="X-Correlation-Id"),
}


@pytest.mark.parametrize("service", PROFILES.values(), ids=PROFILES, indirect=True)
def test_its_file_makes_a_client_work(service: Service, run: Run, tmp_path: Path) -> None:
    """Every signing is listed once, page by page, and nobody who has signed is reminded."""
    ran = run("doctor", "--json", "--wrong-token")
    assert (ran.code, ran.err) == (0, ""), ran.out
    found = checks(ran)
    assert {name: one["state"] for name, one in found.items() if one["state"] not in ("ok", "unknown")} == {}
    assert found["client"]["pages"] == (1 if service.sandbox.profile.pagination == "bare" else 2)
    assumptions = Assumptions.from_file(tmp_path / "assumptions.toml")
    assert sorted(listed(service, assumptions)) == ["one", "three", "two"]
    assert pending(service, assumptions) == 0
    assert assumptions.expired_token_statuses == {401, service.sandbox.profile.expired_token_status}
    methods = {(one.method, one.operation) for one in service.do(lambda: service.sandbox.requests) if one.headers}
    assert all(method == "GET" for method, name in methods if name not in _SETUP)


_SETUP = ("signings.create", "signings.send", "documents.upload", "recipients.add", "recipients.remind")


NEEDED = ["numeric", "cursors of another name", "items of another name", "a cursor at the top", "signed elsewhere"]


@pytest.mark.parametrize("service", [PROFILES[name] for name in NEEDED], ids=NEEDED, indirect=True)
def test_the_defaults_do_not_work_there(service: Service) -> None:
    """So that the test above shows something."""
    try:
        names = listed(service, Assumptions())
        works = sorted(names) == ["one", "three", "two"] and pending(service, Assumptions()) == 0
    except SigningError:
        works = False
    limit = service.sandbox.profile.limit_param != "limit"
    assert not works or limit


@pytest.mark.parametrize("service", [Profile(pagination="bare")], ids=["bare"], indirect=True)
def test_a_list_that_is_never_cut(service: Service, run: Run) -> None:
    """What cannot be found out is said, and stays as it was."""
    ran = run("doctor", "--json")
    found = checks(ran)
    assert found["page size"]["state"] == "warning"
    assert found["next page"]["state"] == "unknown"
    assert found["client"]["pages"] == 1


def test_the_example_of_its_help(run: Run, tmp_path: Path) -> None:
    """Is run as it stands there; the file says how sure each value is, and is not replaced without --force."""
    _, _, example = run("doctor", "--help").out.partition("Example:\n")
    line = example.splitlines()[0].split()[1:]
    ran = run(*line)
    assert ran.code == 0
    assert "ok       token        works: Sandbox User" in ran.out
    assert f"SIGNING_ASSUMPTIONS={tmp_path}/tenant.toml" in ran.out
    text = (tmp_path / "tenant.toml").read_text()
    assert "# Seen: one item was asked for, and one came.\nlimit_param = " in text
    again = run(*line)
    assert (again.code, again.out) == (2, "")
    assert again.err == "Error: --output: tenant.toml is there already: --force replaces it\n"
    assert run(*line, "--force").code == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "tenant.toml"]


def test_it_can_leave_the_file_off(run: Run, tmp_path: Path) -> None:
    """For a look now and then."""
    ran = run("doctor", "--check-only")
    assert (ran.code, list(tmp_path.iterdir())) == (0, [])


def test_what_it_found_is_used_by_the_next_command(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Named by the settings, it is where the next look begins."""
    run("doctor")
    monkeypatch.setenv("SIGNING_ASSUMPTIONS", str(tmp_path / "assumptions.toml"))
    assert run("doctor", "--check-only").code == 0
    assert run("list").code == 0


def test_a_file_that_cannot_be_written(run: Run) -> None:
    """The error names the option, the path and the reason."""
    ran = run("doctor", "--output", "none/tenant.toml")
    assert ran.code == 2
    assert "Error: --output: 'none/tenant.toml' cannot be written: No such file or directory\n" in ran.err
    for folder in ("", ".", "/"):
        ran = run("doctor", "--force", "--output", folder)
        assert (ran.code, ran.err) == (2, f"Error: --output: {str(Path(folder))!r} is a folder\n")


def test_a_disk_that_is_full_leaves_no_half_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was begun of it."""

    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    ran = run("doctor")
    assert ran.code == 2
    assert "'assumptions.toml' cannot be written: No space left on device" in ran.err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("service", [Profile.numeric(), Profile()], ids=["numeric", "default"], indirect=True)
def test_a_token_that_is_not_accepted(
    service: Service, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 4; how it was refused is learned, and no wrong one is sent to find that out."""
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "wrong")
    before = len(service.sandbox.requests)
    ran = run("doctor", "--json")
    assert ran.code == 4
    assert list(checks(ran)) == ["https", "clock", "token"]
    assert Assumptions.from_file(tmp_path / "assumptions.toml").expired_token_statuses == {
        401,
        service.sandbox.profile.expired_token_status,
    }
    assert len(service.sandbox.requests) == before + 1


def test_without_asking_no_wrong_token_is_sent(service: Service, run: Run) -> None:
    """A service may count them."""
    run("doctor", "--check-only")
    assert sum(one.status == 401 for one in service.sandbox.requests_of("me")) == 1
    run("doctor", "--check-only", "--wrong-token")
    assert sum(one.status == 401 for one in service.sandbox.requests_of("me")) == 3


def test_a_service_that_limits_requests(service: Service, run: Run) -> None:
    """It waits as it is asked to, a few times, and says that it had to."""
    service.do(service.sandbox.faults.add, "signings.list", "429", times=2, retry_after=0)
    service.do(service.sandbox.faults.add, "me", "429", times=1, retry_after=None)
    ran = run("doctor", "--json", "--check-only")
    assert ran.code == 0
    told = checks(ran)["rate limit"]
    assert (told["state"], told["message"]) == ("warning", "3 requests were too many; no header tells how many may be")
    service.do(service.sandbox.faults.add, "signings.list", "429", times=None, retry_after=0)
    ran = run("doctor", "--json", "--check-only")
    assert (ran.code, checks(ran)["list"]["state"]) == (1, "failed")


def test_a_tenant_that_cannot_be_reached(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, exit code 1, and no file."""
    monkeypatch.setenv("SIGNING_BASE_URL", "http://127.0.0.1:1")
    ran = run("doctor")
    assert ran.code == 1
    assert "Error: GET /me: no connection could be made" in ran.err
    assert not Path("assumptions.toml").exists()


# Services that the sandbox does not play


Answers = dict[str, Any]


def canned(answers: Answers) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answers by path and query: JSON, or a response of its own; anything else is a 404."""

    async def handle(request: web.Request) -> web.StreamResponse:
        found = answers.get(
            request.path_qs.removeprefix("/api/1.0"), answers.get(request.path.removeprefix("/api/1.0"))
        )
        if callable(found):
            found = found(request)
        if isinstance(found, web.StreamResponse):
            return found
        return web.json_response(
            found if found is not None else {"message": "no"}, status=200 if found is not None else 404
        )

    return handle


@asynccontextmanager
async def probed(answers: Answers) -> AsyncIterator[tuple[dict[str, Finding], Probe]]:
    """What is found of a service with these answers."""
    async with (
        serving(canned(answers)) as server,
        SigningClient(server.origin, "t0ken", retry=RetryPolicy.none()) as client,
    ):
        probe = Probe(client)
        yield {finding.check: finding async for finding in probe.findings()}, probe


def learned(probe: Probe) -> dict[str, Any]:
    return {one.name: one.value for one in probe.learned}


def _signings(*ids: str) -> list[dict[str, Any]]:
    return [{"id": one, "name": one} for one in ids]


async def test_names_that_nobody_foresaw() -> None:
    """Items, cursors and flags are found by what they are, deep in an envelope."""

    def page(request: web.Request) -> web.Response:
        size, after = int(request.query.get("size", "3")), request.query.get("start")
        ids = [one for one in ("c", "b", "a") if after is None or one < after][:size]
        answer = {"meta": {"paging": {"nextToken": ids[-1] if ids[-1] != "a" else None, "prevToken": "x"}}}
        return web.json_response({**answer, "body": {"rows": _signings(*ids)}, "links": []})

    async with probed({"/me": {}, "/signings": page, "/signings/c": {"thing": {"id": "c"}}}) as (found, probe):
        assert found["next page"].words == "meta.paging.nextToken is sent back as 'start'"
        assert found["record"].words == "a signing is in thing"
        assert found["client"].state == "ok"
        assert (learned(probe)["limit_param"], learned(probe)["cursor_param"]) == ("size", "start")
        assert learned(probe)["item_paths"][0] == "body.rows"
        assert learned(probe)["next_paths"][0] == "meta.paging.nextToken"
        assert learned(probe)["record_paths"][0] == "thing"
        assert found["token"].words == "works: GET /me is answered"
        assert found["no token"].state == "warning"
        assert found["timestamps"].state == found["recipients"].state == found["request id"].state == "unknown"


async def test_a_flag_of_another_name() -> None:
    """With it the last item's id is the cursor."""

    def page(request: web.Request) -> web.Response:
        ids = [one for one in ("1", "2", "3") if one > request.query.get("after", "0")][
            : int(request.query.get("limit", 3))
        ]
        return web.json_response({"data": _signings(*ids), "info": {"moreToCome": ids[-1] != "3"}})

    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert found["next page"].words == "info.moreToCome, with the last item's id is sent back as 'after'"
        assert learned(probe)["has_more_paths"][0] == "info.moreToCome"
        assert found["client"].state == "ok"


async def test_a_cursor_that_nothing_takes() -> None:
    """It is said; the client's own try fails too."""
    page = {"data": _signings("1"), "next_cursor": "x"}
    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert found["next page"].state == "failed"
        assert learned(probe)["cursor_param"] is None
        assert "the service returned the cursor 'x' a second time" in found["client"].words
    numbers = iter(range(1, 10_000))
    odd = lambda _: web.json_response({"data": _signings("1"), "next_cursor": f"c{next(numbers)}"})  # noqa: E731  # short
    async with probed({"/me": {}, "/signings": odd}) as (found, probe):
        assert found["client"].words == "page 2 of a list repeats an earlier one"


async def test_a_name_that_reaches_into_the_file() -> None:
    """What a service answers stays in the remarks; the lines of the file are the command's own."""
    page = {"data": _signings("1", "2"), "next\nmax_pdf_bytes = 1\n#\x1b[2J": "x"}
    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert "max_pdf_bytes" in found["next page"].words
        text = described("https://tenant.example.com", probe.learned, Assumptions())
    assert "# A page gives a cursor in next max_pdf_bytes = 1 # [2J, and none of the names" in text
    assert "max_pdf_bytes" not in tomllib.loads(text)


async def test_a_list_that_grows_meanwhile_misleads_nobody() -> None:
    """Other items come for every name that is tried, but they also come for none."""
    numbers = iter(range(10_000))

    def page(request: web.Request) -> web.Response:
        at = next(numbers) // 2 * 2
        return web.json_response({"data": _signings(f"n{at}"), "next_cursor": "x"})

    async with probed({"/me": {}, "/signings": page}) as (found, _):
        assert found["next page"].state == "failed"


async def test_answers_that_are_none() -> None:
    """Each is told, and the others are still looked at."""
    broken: Answers = {
        "/me": {"data": {"name": "Anna"}},
        "/signings": web.json_response({"signings": None}, status=500),
    }
    async with probed(broken) as (found, _):
        assert found["list"].words == "GET /signings is answered by HTTP 500 without a list"
        assert "next page" not in found
        assert "client" not in found
        assert found["token"].words == "works: Anna"
    odd: Answers = {
        "/me": [],
        "/signings": [{"id": 5, "updated_at": "soon"}, 7, {"id": 6}],
        "/signings/5": {"a": {"b": 1}},
    }
    odd["/signings/5/recipients"] = [{"email": "a", "signed_at": None, "signed": True}, 3]
    odd["/signings/00000000-0000-0000-0000-000000000000"] = lambda _: web.Response(text="oh", status=500)
    async with probed(odd) as (found, probe):
        assert found["record"].words == "a signing has no id anywhere"
        assert found["timestamps"].words == "cannot be read: 'soon'"
        assert (found["recipients"].state, found["errors"].state) == ("ok", "warning")
        assert found["page size"].state == "warning"
        assert learned(probe)["recipient_done_fields"] == ["completed_at", "signed_at"]
    odd["/signings"] = [{"name": "x", "updated_at": 1_700_000_000}, {"id": "6"}]
    odd["/signings/6/recipients"] = {"people": [{"approvedOn": None}]}
    async with probed(odd) as (found, probe):
        assert found["record"].words == "a signing cannot be read: HTTP 500"
        assert found["timestamps"].words.startswith("numbers since 1970, such as 1700000000")
        assert found["recipients"].state == "warning"
        assert learned(probe)["item_paths"][0] == "people"


async def test_lists_of_what_are_no_records() -> None:
    """Are lists without records, and the rest is looked at."""
    for answer in (["a", "b"], {"data": ["a", "b"], "has_more": True}):
        async with probed({"/me": {}, "/signings": answer}) as (found, _):
            assert found["list"].words.startswith("0 signings on the first page")
            assert found["client"].state == "failed"


async def test_a_service_that_falters_under_way() -> None:
    """What it says of its failure is not taken for a page."""
    answers = iter([_signings("1", "2"), _signings("1")])

    def page(request: web.Request) -> web.Response:
        failure = {"error": {"next_steps": "call us"}}
        found = next(answers, failure)
        return web.json_response(found, status=500 if found is failure else 200)

    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert found["page size"].words == "is asked for as 'limit'"
        assert found["next page"].words == "the first page does not say how to go on"
        assert found["client"].state == "failed"
        assert "next_paths" not in learned(probe)


async def test_a_cursor_without_a_name_is_not_made_up() -> None:
    """A page that says there is more, and whose last item has no id."""
    page = {"data": [{"name": "x"}], "has_more": True}
    async with probed({"/me": {}, "/signings": page}) as (found, _):
        assert found["next page"].state == "failed"


async def test_the_clock_and_the_limits() -> None:
    """A clock that is wrong is a failure; headers of limits are told; no secret is repeated."""

    def me(request: web.Request) -> web.Response:
        headers = {"Date": format_datetime(datetime.now(UTC) - timedelta(minutes=5)), "X-RateLimit-Limit": "100"}
        return web.json_response({"name": request.headers.get("Authorization", "nobody")}, headers=headers)

    async with probed({"/me": me, "/signings": []}) as (found, _):
        assert found["clock"].state == "failed"
        assert re.match(r"this machine's clock is \d+ s ahead of the service's", found["clock"].words)
        assert found["rate limit"].words == "told in X-RateLimit-Limit"
        assert "t0ken" not in found["token"].words
        assert found["page size"].state == "unknown"
    async with probed({"/me": lambda _: web.json_response({}, headers={"Date": "noon"}), "/signings": []}) as (
        found,
        _,
    ):
        assert found["clock"].state == "unknown"
    late = format_datetime(datetime.now(UTC) + timedelta(minutes=5))
    async with probed({"/me": lambda _: web.json_response({}, headers={"Date": late}), "/signings": []}) as (found, _):
        assert "s behind the service's" in found["clock"].words


async def test_a_first_page_that_says_nothing() -> None:
    """Although fewer were asked for than there are."""

    def page(request: web.Request) -> web.Response:
        return web.json_response(_signings("a", "b")[: int(request.query.get("limit", 9))])

    async with probed({"/me": {}, "/signings": page}) as (found, _):
        assert found["next page"].words == "the first page does not say how to go on"


async def test_a_wrong_token_that_is_answered_well() -> None:
    """Says nothing of how an expired one is refused."""
    async with serving(canned({"/me": {}, "/signings": []})) as server, SigningClient(server.origin, "t") as client:
        probe = Probe(client, wrong_token=True)
        found = {finding.check: finding async for finding in probe.findings()}
    assert found["wrong token"].state == "warning"
    assert "expired_token_statuses" not in learned(probe)


@pytest.mark.parametrize(("status", "words"), [(403, "--wrong-token finds out"), (401, "HTTP 401 without a token")])
async def test_no_token(status: int, words: str) -> None:
    """How that is refused says little of a token that has expired, but where it is the usual status."""

    def me(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if "Authorization" in request.headers else status)

    async with probed({"/me": me, "/signings": []}) as (found, _):
        assert words in found["no token"].words


async def test_a_service_that_is_down() -> None:
    """An error of the server's says nothing of the token's kind."""
    async with probed({"/me": lambda _: web.Response(status=503)}) as (found, probe):
        assert (found["token"].state, probe.learned) == ("failed", [])


async def test_an_expired_token_is_renewed_once(sandbox: Sandbox) -> None:
    """As any call of the client does it; where that fails, it is told as such."""
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:8000/callback")
    store = MemoryTokenStore()

    def oauth() -> OAuth:
        named = {"client_id": app.client_id, "client_secret": app.client_secret or "", "redirect_uri": app.redirect_uri}
        return OAuth(sandbox.base_url, **named, store=store)  # type: ignore[arg-type]  # the names are right

    async with oauth() as first:
        request = first.authorization_request()
        code = sandbox.authorize(app)
        token = await first.exchange(f"{app.redirect_uri}?code={code}&state={request.state}", state=request.state)
    await store.save(attrs.evolve(token, access_token="old"))
    async with oauth() as second, SigningClient(sandbox.base_url, second) as client:
        found = [finding async for finding in Probe(client).findings() if finding.check == "token"]
    assert found[0].state == "ok"
    await store.save(attrs.evolve(token, access_token="old", refresh_token="old"))
    async with oauth() as third, SigningClient(sandbox.base_url, third) as client:
        with pytest.raises(AuthError):
            [finding async for finding in Probe(client).findings()]


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ssl.SSLContext]:
    """Makes a server's side of TLS, with a certificate for so many days from an authority that is trusted."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    def make(days: int) -> ssl.SSLContext:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days)).configure_cert(context)
        return context

    return make


@pytest.mark.parametrize(("days", "state"), [(90, "ok"), (9, "WARNING")])
async def test_a_certificate(days: int, state: str, tls: Callable[[int], ssl.SSLContext]) -> None:
    """For how long it is valid, and that it is to be renewed soon."""
    async with serving(canned({"/me": {}, "/signings": []}), ssl=tls(days)) as server:
        async with SigningClient(server.origin, "t") as client:
            finding = await Probe(client)._certificate()
        assert (finding.facts["days_left"], finding.state) == (days - 1, state.lower())
        if state == "ok":
            named = {"SIGNING_BASE_URL": server.origin, "SIGNING_ACCESS_TOKEN": "t"}
            ran = await asyncio.to_thread(lambda: piped("doctor", "--check-only", environment=named))
            assert ran.stdout.startswith("ok       https        TLSv1.3; the certificate is valid for 89 more days\n")


async def test_a_certificate_that_is_not_trusted(
    tls: Callable[[int], ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent."""
    context = tls(90)
    monkeypatch.delenv("SSL_CERT_FILE")
    async with serving(canned({}), ssl=context) as server, SigningClient(server.origin, "t") as client:
        with pytest.raises(SigningError, match=r"no secure connection to https://127\.0\.0\.1:\d+: unable to get"):
            [finding async for finding in Probe(client).findings()]
        assert server.requests == []


async def test_a_service_that_never_answers() -> None:
    """It is given up when the client's own time-out is over."""

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(hang) as server, SigningClient(server.origin, "t", timeout=0.2) as client:
        with pytest.raises(SigningError, match=r"GET /me: no answer came within 0\.2 s"):
            [finding async for finding in Probe(client).findings()]


async def test_an_answer_that_is_too_large() -> None:
    """It is not read to its end."""
    async with serving(canned({"/me": {"name": "x" * 5000}})) as server:
        small = Assumptions(max_answer_bytes=1000)
        async with SigningClient(server.origin, "t", assumptions=small) as client:
            with pytest.raises(SigningError, match="GET /me: the answer is larger than 1000 bytes"):
                [finding async for finding in Probe(client).findings()]


async def test_a_connection_that_breaks() -> None:
    """It is told, with nothing of aiohttp's errors, which hold the token."""
    async with answering(b"") as origin, SigningClient(origin, "t0ken") as client:
        with pytest.raises(SigningError, match=r"GET /me: the connection was closed before an answer came") as caught:
            [finding async for finding in Probe(client).findings()]
    assert caught.value.__context__ is None


async def test_a_failure_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `wire` tells of one: Python 3.11 stops measuring behind an exception that aiohttp raised."""

    async def send(*_: object, **__: object) -> wire.Failure:
        return wire.Failure(Outcome.UNSENT, "nobody is there")

    monkeypatch.setattr(wire, "send", send)
    async with SigningClient("http://127.0.0.1:1", "t0ken") as client:
        with pytest.raises(SigningError, match="GET /me: nobody is there"):
            [finding async for finding in Probe(client).findings()]
