"""`doctor`: its findings about services that respond in different ways, and the assumptions that it writes."""

from __future__ import annotations

import asyncio
import contextlib
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

from signing_async import (
    Assumptions,
    Attempt,
    AuthError,
    MemoryTokenStore,
    OAuth,
    RetryPolicy,
    SigningClient,
    SigningError,
)
from signing_async.cli.findings import Finding
from signing_async.cli.probing import Probe
from signing_async.sandbox import Profile, Sandbox
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service, running
from tests.cli.terminal import piped
from tests.pdfs import make_pdf
from tests.servers import answering, serving


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A sandbox with the test's profile and three signings, one of them completed."""
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
    """Return the names of all signings, in pages of one if the size can be limited."""

    async def work() -> list[str]:
        async with SigningClient(
            service.sandbox.base_url, service.sandbox.access_token(), assumptions=assumptions
        ) as client:
            return [signing.name async for signing in client.signings.list(limit=1)]

    return service.call(work())


def pending(service: Service, assumptions: Assumptions) -> int:
    """Return how many recipients of the completed signing are reminded."""

    async def work() -> int:
        async with SigningClient(
            service.sandbox.base_url, service.sandbox.access_token(), assumptions=assumptions
        ) as client:
            (signing,) = [one for one in service.sandbox.signings if one.name == "one"]
            return len(await client.recipients.remind_pending(signing.id))

    return service.call(work())


def checks(ran: Ran) -> dict[str, Any]:
    """Return the findings by the names of the checks."""
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
def test_written_assumptions_make_a_client_work(service: Service, run: Run, tmp_path: Path) -> None:
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
def test_default_assumptions_do_not_work_with_these_profiles(service: Service) -> None:
    """Otherwise the test above would prove nothing."""
    try:
        names = listed(service, Assumptions())
        works = sorted(names) == ["one", "three", "two"] and pending(service, Assumptions()) == 0
    except SigningError:
        works = False
    limit = service.sandbox.profile.limit_param != "limit"
    assert not works or limit


@pytest.mark.parametrize("service", [Profile(pagination="bare")], ids=["bare"], indirect=True)
def test_unlimitable_list_is_reported_and_changes_no_assumption(service: Service, run: Run) -> None:
    ran = run("doctor", "--json")
    found = checks(ran)
    assert found["page size"]["state"] == "warning"
    assert found["next page"]["state"] == "unknown"
    assert found["client"]["pages"] == 1


def test_help_example_runs_and_does_not_replace_its_file_without_force(run: Run, tmp_path: Path) -> None:
    _, _, example = run("doctor", "--help").out.partition("Example:\n")
    line = example.splitlines()[0].split()[1:]
    ran = run(*line)
    assert ran.code == 0
    assert "ok       token        works: Sandbox User" in ran.out
    assert f"SIGNING_ASSUMPTIONS={tmp_path}/tenant.toml" in ran.out
    text = (tmp_path / "tenant.toml").read_text()
    assert "# Observed: one item was requested, and one returned.\nlimit_param = " in text
    again = run(*line)
    assert (again.code, again.out) == (2, "")
    assert again.err == "Error: --output: tenant.toml exists: use --force to replace it\n"
    assert run(*line, "--force").code == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "tenant.toml"]


def test_check_only_writes_no_file(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", "--check-only")
    assert (ran.code, list(tmp_path.iterdir())) == (0, [])


def test_next_command_uses_the_written_assumptions(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("doctor")
    monkeypatch.setenv("SIGNING_ASSUMPTIONS", str(tmp_path / "assumptions.toml"))
    assert run("doctor", "--check-only").code == 0
    assert run("list").code == 0


def test_unwritable_output_is_an_error_with_option_path_and_reason(run: Run) -> None:
    ran = run("doctor", "--output", "none/tenant.toml")
    assert ran.code == 2
    assert "Error: --output: 'none/tenant.toml' cannot be written: No such file or directory\n" in ran.err
    for folder in ("", ".", "/"):
        ran = run("doctor", "--force", "--output", folder)
        assert (ran.code, ran.err) == (2, f"Error: --output: {str(Path(folder))!r} is a folder\n")


def test_full_disk_leaves_no_partial_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    ran = run("doctor")
    assert ran.code == 1
    assert "'assumptions.toml' cannot be written: No space left on device" in ran.err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("service", [Profile.numeric(), Profile()], ids=["numeric", "default"], indirect=True)
def test_rejected_token_is_exit_code_4_and_its_status_is_learned_with_one_request(
    service: Service, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_wrong_token_is_sent_only_on_request(service: Service, run: Run) -> None:
    run("doctor", "--check-only")
    assert sum(one.status == 401 for one in service.sandbox.requests_of("me")) == 1
    run("doctor", "--check-only", "--wrong-token")
    assert sum(one.status == 401 for one in service.sandbox.requests_of("me")) == 3


def test_429_is_retried_and_reported(service: Service, run: Run) -> None:
    service.do(service.sandbox.faults.add, "signings.list", "429", times=2, retry_after=0)
    service.do(service.sandbox.faults.add, "me", "429", times=1, retry_after=None)
    ran = run("doctor", "--json", "--check-only")
    assert ran.code == 0
    told = checks(ran)["rate limit"]
    assert (told["state"], told["message"]) == (
        "warning",
        "3 requests were rejected with 429; no header reports the limit",
    )
    service.do(service.sandbox.faults.add, "signings.list", "429", times=None, retry_after=0)
    ran = run("doctor", "--json", "--check-only")
    assert (ran.code, checks(ran)["list"]["state"]) == (1, "failed")


def test_unreachable_tenant_is_one_error_and_no_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNING_BASE_URL", "http://127.0.0.1:1")
    ran = run("doctor")
    assert ran.code == 1
    assert "Error: GET /me: " in ran.err
    assert not Path("assumptions.toml").exists()


# Services that the sandbox does not simulate


Answers = dict[str, Any]


def canned(answers: Answers) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Respond by path and query: with JSON, or with a given response; 404 for anything else."""

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
    """Return the findings about a service with these responses."""
    async with (
        serving(canned(answers)) as server,
        SigningClient(server.origin, "t0ken", retry=RetryPolicy.none()) as client,
    ):
        probe = Probe(client)
        yield {finding.check: finding async for finding in probe.findings()}, probe


def learned(probe: Probe) -> dict[str, Any]:
    return {**dict.fromkeys(one.name for one in probe.learned._values), **probe.learned.values}


def _signings(*ids: str) -> list[dict[str, Any]]:
    return [{"id": one, "name": one} for one in ids]


async def test_unknown_names_are_found_by_their_content() -> None:
    def page(request: web.Request) -> web.Response:
        size, after = int(request.query.get("size", "3")), request.query.get("start")
        ids = [one for one in ("c", "b", "a") if after is None or one < after][:size]
        answer = {"meta": {"paging": {"nextToken": ids[-1] if ids[-1] != "a" else None, "prevToken": "x"}}}
        return web.json_response({**answer, "body": {"rows": _signings(*ids)}, "links": []})

    async with probed({"/me": {}, "/signings": page, "/signings/c": {"thing": {"id": "c"}}}) as (found, probe):
        assert found["next page"].message == "the cursor in meta.paging.nextToken is sent back as 'start'"
        assert found["record"].message == "a signing is in thing"
        assert found["client"].state == "ok"
        assert (learned(probe)["limit_param"], learned(probe)["cursor_param"]) == ("size", "start")
        assert learned(probe)["item_paths"][0] == "body.rows"
        assert learned(probe)["next_paths"][0] == "meta.paging.nextToken"
        assert learned(probe)["record_paths"][0] == "thing"
        assert found["token"].message == "works: GET /me succeeds"
        assert found["no token"].state == "warning"
        assert found["timestamps"].state == found["recipients"].state == found["request id"].state == "unknown"


async def test_unknown_has_more_flag_is_found() -> None:
    def page(request: web.Request) -> web.Response:
        ids = [one for one in ("1", "2", "3") if one > request.query.get("after", "0")][
            : int(request.query.get("limit", 3))
        ]
        return web.json_response({"data": _signings(*ids), "info": {"moreToCome": ids[-1] != "3"}})

    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert (
            found["next page"].message == "the cursor in info.moreToCome and the last item's id is sent back as 'after'"
        )
        assert learned(probe)["has_more_paths"][0] == "info.moreToCome"
        assert found["client"].state == "ok"


async def test_cursor_that_no_parameter_takes_is_a_failure() -> None:
    page = {"data": _signings("1"), "next_cursor": "x"}
    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert found["next page"].state == "failed"
        assert learned(probe)["cursor_param"] is None
        assert "the service returned the cursor 'x' a second time" in found["client"].message
    numbers = iter(range(1, 10_000))
    odd = lambda _: web.json_response({"data": _signings("1"), "next_cursor": f"c{next(numbers)}"})  # noqa: E731  # short
    async with probed({"/me": {}, "/signings": odd}) as (found, probe):
        assert found["client"].message == "page 2 of a list repeats earlier signings"


async def test_member_name_cannot_inject_lines_into_the_file() -> None:
    page = {"data": _signings("1", "2"), "next\nmax_pdf_bytes = 1\n#\x1b[2J": "x"}
    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert "max_pdf_bytes" in found["next page"].message
        text = probe.learned.to_toml("https://tenant.example.com")
    assert "# A page has a cursor in next max_pdf_bytes = 1 # [2J, but no known parameter" in text
    assert "max_pdf_bytes" not in tomllib.loads(text)


async def test_growing_list_is_not_taken_for_an_effect_of_the_cursor() -> None:
    """Other items come for every parameter, but also without one."""
    numbers = iter(range(10_000))

    def page(request: web.Request) -> web.Response:
        at = next(numbers) // 2 * 2
        return web.json_response({"data": _signings(f"n{at}"), "next_cursor": "x"})

    async with probed({"/me": {}, "/signings": page}) as (found, _):
        assert found["next page"].state == "failed"


async def test_malformed_responses_are_reported_and_the_other_checks_run() -> None:
    broken: Answers = {
        "/me": {"data": {"name": "Anna"}},
        "/signings": web.json_response({"signings": None}, status=500),
    }
    async with probed(broken) as (found, _):
        assert found["list"].message == "no list in the response to GET /signings (HTTP 500)"
        assert "next page" not in found
        assert "client" not in found
        assert found["token"].message == "works: Anna"
    odd: Answers = {
        "/me": [],
        "/signings": [{"id": 5, "updated_at": "soon"}, 7, {"id": 6}],
        "/signings/5": {"a": {"b": 1}},
    }
    odd["/signings/5/recipients"] = [{"email": "a", "signed_at": None, "signed": True}, 3]
    odd["/signings/00000000-0000-0000-0000-000000000000"] = lambda _: web.Response(text="oh", status=500)
    async with probed(odd) as (found, probe):
        assert found["record"].message == "no id in the response for a signing"
        assert found["timestamps"].message == "cannot be read: 'soon'"
        assert (found["recipients"].state, found["errors"].state) == ("ok", "warning")
        assert found["page size"].state == "warning"
        assert learned(probe)["recipient_done_fields"] == ["completed_at", "signed_at"]
    odd["/signings"] = [{"name": "x", "updated_at": 1_700_000_000}, {"id": "6"}]
    odd["/signings/6/recipients"] = {"people": [{"approvedOn": None}]}
    async with probed(odd) as (found, probe):
        assert found["record"].message == "a signing cannot be read: HTTP 500"
        assert found["timestamps"].message.startswith("numbers since 1970, such as 1700000000")
        assert found["recipients"].state == "warning"
        assert learned(probe)["item_paths"][0] == "people"


async def test_list_without_records_is_reported() -> None:
    for answer in (["a", "b"], {"data": ["a", "b"], "has_more": True}):
        async with probed({"/me": {}, "/signings": answer}) as (found, _):
            assert found["list"].message.startswith("0 signings on the first page")
            assert found["client"].state == "failed"


async def test_error_response_is_not_taken_for_a_page() -> None:
    answers = iter([_signings("1", "2"), _signings("1")])

    def page(request: web.Request) -> web.Response:
        failure = {"error": {"next_steps": "call us"}}
        found = next(answers, failure)
        return web.json_response(found, status=500 if found is failure else 200)

    async with probed({"/me": {}, "/signings": page}) as (found, probe):
        assert found["page size"].message == "the parameter is 'limit'"
        assert found["next page"].message == "the first page has no cursor"
        assert found["client"].state == "failed"
        assert "next_paths" not in learned(probe)


async def test_has_more_without_item_ids_is_a_failure() -> None:
    page = {"data": [{"name": "x"}], "has_more": True}
    async with probed({"/me": {}, "/signings": page}) as (found, _):
        assert found["next page"].state == "failed"


async def test_clock_skew_is_a_failure_and_rate_limit_headers_are_reported() -> None:
    def me(request: web.Request) -> web.Response:
        headers = {"Date": format_datetime(datetime.now(UTC) - timedelta(minutes=5)), "X-RateLimit-Limit": "100"}
        return web.json_response({"name": request.headers.get("Authorization", "nobody")}, headers=headers)

    async with probed({"/me": me, "/signings": []}) as (found, _):
        assert found["clock"].state == "failed"
        assert re.match(r"this machine's clock is \d+ s ahead of the service's", found["clock"].message)
        assert found["rate limit"].message == "reported in X-RateLimit-Limit"
        assert "t0ken" not in found["token"].message
        assert found["page size"].state == "unknown"
    async with probed({"/me": lambda _: web.json_response({}, headers={"Date": "noon"}), "/signings": []}) as (
        found,
        _,
    ):
        assert found["clock"].state == "unknown"
    late = format_datetime(datetime.now(UTC) + timedelta(minutes=5))
    async with probed({"/me": lambda _: web.json_response({}, headers={"Date": late}), "/signings": []}) as (found, _):
        assert "s behind the service's" in found["clock"].message


async def test_first_page_without_cursor_is_reported() -> None:
    def page(request: web.Request) -> web.Response:
        return web.json_response(_signings("a", "b")[: int(request.query.get("limit", 9))])

    async with probed({"/me": {}, "/signings": page}) as (found, _):
        assert found["next page"].message == "the first page has no cursor"


async def test_accepted_wrong_token_teaches_nothing() -> None:
    async with serving(canned({"/me": {}, "/signings": []})) as server, SigningClient(server.origin, "t") as client:
        probe = Probe(client, wrong_token=True)
        found = {finding.check: finding async for finding in probe.findings()}
    assert found["wrong token"].state == "warning"
    assert "expired_token_statuses" not in learned(probe)


OTHER_STATUSES = (404, 405, 408, 409, 413, 421, 425, 429, 431, 503)


@pytest.mark.parametrize(
    ("status", "learns"), [(400, True), (401, True), (403, True), *((other, False) for other in OTHER_STATUSES)]
)
async def test_wrong_token_teaches_a_rejection_and_no_other_status(status: int, learns: bool) -> None:
    def me(request: web.Request) -> web.Response:
        status_of_token = 200 if request.headers.get("Authorization") == "Bearer t" else status
        return web.json_response({}, status=status_of_token, headers={"Retry-After": "0"})

    async with serving(canned({"/me": me, "/signings": []})) as server, SigningClient(server.origin, "t") as client:
        probe = Probe(client, wrong_token=True)
        found = {finding.check: finding async for finding in probe.findings()}
    assert (found["wrong token"].state, found["wrong token"].facts) == (
        "ok" if learns else "warning",
        {"status": status},
    )
    assert ("expired_token_statuses" in learned(probe)) is learns
    assert found["no token"].state == ("warning" if status in (408, 429, 503) else "ok")


@pytest.mark.parametrize(("status", "words"), [(403, "--wrong-token checks that"), (401, "HTTP 401 without a token")])
async def test_status_without_token_suggests_the_wrong_token_check_unless_401(status: int, words: str) -> None:
    def me(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if "Authorization" in request.headers else status)

    async with probed({"/me": me, "/signings": []}) as (found, _):
        assert words in found["no token"].message


@pytest.mark.parametrize("status", [404, 405, 431])
async def test_other_refusal_of_me_is_not_learned_as_a_rejected_token(status: int) -> None:
    async with probed({"/me": lambda _: web.Response(status=status)}) as (found, probe):
        assert (found["token"].state, learned(probe)) == ("failed", {})


async def test_5xx_is_a_failing_service_and_not_a_rejected_token() -> None:
    async with probed({"/me": lambda _: web.Response(status=503)}) as (found, probe):
        assert "token" not in found
        assert (found["service"].state, learned(probe)) == ("failed", {})


async def test_rejected_token_is_refreshed_once(sandbox: Sandbox) -> None:
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
    """Return a function that makes a server's TLS context, with a certificate valid for so many days."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    def make(days: int) -> ssl.SSLContext:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days)).configure_cert(context)
        return context

    return make


@pytest.mark.parametrize(("days", "state"), [(90, "ok"), (9, "WARNING")])
async def test_certificate_validity_is_reported(days: int, state: str, tls: Callable[[int], ssl.SSLContext]) -> None:
    async with serving(canned({"/me": {}, "/signings": []}), ssl=tls(days)) as server:
        async with SigningClient(server.origin, "t") as client:
            finding = await Probe(client)._certificate()
        assert (finding.facts["days_left"], finding.state) == (days - 1, state.lower())
        if state == "ok":
            named = {"SIGNING_BASE_URL": server.origin, "SIGNING_ACCESS_TOKEN": "t"}
            ran = await asyncio.to_thread(lambda: piped("doctor", "--check-only", environment=named))
            assert ran.stdout.startswith("ok       https        TLSv1.3; the certificate is valid for 89 more days\n")


async def test_untrusted_certificate_is_an_error_and_nothing_is_sent(
    tls: Callable[[int], ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tls(90)
    monkeypatch.delenv("SSL_CERT_FILE")
    async with serving(canned({}), ssl=context) as server, SigningClient(server.origin, "t") as client:
        with pytest.raises(
            SigningError, match=r"no secure connection to https://127\.0\.0\.1:\d+: unable to get"
        ) as caught:
            [finding async for finding in Probe(client).findings()]
        assert caught.value.fatal
        assert server.requests == []


async def test_probe_without_response_ends_at_the_clients_timeout() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(hang) as server, SigningClient(server.origin, "t", timeout=0.2) as client:
        with pytest.raises(SigningError, match=r"GET /me: no .* 0\.2 s"):
            [finding async for finding in Probe(client).findings()]


async def test_oversized_response_is_an_error() -> None:
    async with serving(canned({"/me": {"name": "x" * 5000}})) as server:
        small = Assumptions(max_answer_bytes=1000)
        async with SigningClient(server.origin, "t", assumptions=small) as client:
            with pytest.raises(SigningError, match=r"GET /me: .* larger than 1000 bytes"):
                [finding async for finding in Probe(client).findings()]


async def test_broken_connection_is_an_error_without_the_token() -> None:
    async with answering(b"") as origin, SigningClient(origin, "t0ken") as client:
        with pytest.raises(SigningError, match=r"GET /me: the connection was closed before") as caught:
            [finding async for finding in Probe(client).findings()]
    assert caught.value.__context__ is None


@pytest.mark.parametrize("status", [None, 503], ids=["broken connection", "503"])
async def test_failed_probe_is_not_retried(status: int | None) -> None:
    """A failure is a finding; only a 429 is retried."""

    async def fail(request: web.Request) -> web.StreamResponse:
        if status is None:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 200)

    attempts: list[Attempt] = []
    async with serving(fail) as server, SigningClient(server.origin, "t", on_attempt=attempts.append) as client:
        with contextlib.suppress(SigningError):
            async for _ in Probe(client).findings():
                pass
    assert [attempt.status for attempt in attempts] == [status]
