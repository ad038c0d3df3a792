"""`doctor`: its findings about services that respond in different ways, and the assumptions that it writes."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from aiohttp import web

from signing_async import Assumptions, RetryPolicy, SigningClient, SigningError
from signing_async.cli.doctor import Examination, Finding
from signing_async.sandbox import Profile
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service, running
from tests.cli.terminal import ROOT, piped
from tests.pdfs import make_pdf
from tests.servers import serving


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


def used(service: Service, assumptions: Assumptions) -> tuple[list[str], int]:
    """Return the names of all signings, page by page, and how many recipients of the completed one are pending."""

    async def work() -> tuple[list[str], int]:
        sandbox = service.sandbox
        async with SigningClient(sandbox.base_url, sandbox.access_token(), assumptions=assumptions) as client:
            signings = [signing async for signing in client.signings.list(limit=1)]
            (completed,) = [signing for signing in signings if signing.name == "one"]
            return sorted(signing.name for signing in signings), len(await client.recipients.pending(completed))

    return service.call(work())


def checks(ran: Ran) -> dict[str, Any]:
    """Return the findings by the names of the checks."""
    return {line["check"]: line for line in ran.lines if "check" in line}


PROFILES = {
    "default": Profile(),
    "laravel": Profile.laravel(),
    "rfc9457": Profile.rfc9457(),
    "numeric": Profile.numeric(),
    "a cursor at the top": Profile(pagination="top_cursor", cursor_param="after", limit_param="pageSize"),
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
    assert used(service, assumptions) == (["one", "three", "two"], 0)
    assert assumptions.expired_token_statuses == {401, service.sandbox.profile.expired_token_status}
    methods = {(one.method, one.operation) for one in service.do(lambda: service.sandbox.requests) if one.headers}
    assert all(method == "GET" for method, name in methods if name not in _SETUP)


_SETUP = ("signings.create", "signings.send", "documents.upload", "recipients.add")


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


@pytest.mark.parametrize("service", [Profile(limit_param="per_page")], ids=["per_page"], indirect=True)
def test_sample_in_the_guide_is_written(run: Run, tmp_path: Path) -> None:
    assert run("doctor").code == 0
    guide = (ROOT / "signing_async/settings.md").read_text("utf-8")
    (sample,) = re.findall(r"writes `assumptions.toml`.*?^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert sample in (tmp_path / "assumptions.toml").read_text()


def test_unwritable_output_is_an_error_with_option_path_and_reason_and_keeps_the_older_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("doctor", "--output", "none/tenant.toml")
    assert ran.code == 2
    assert "Error: --output: 'none/tenant.toml' cannot be written: No such file or directory\n" in ran.err

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "assumptions.toml").write_text("older")
    monkeypatch.setattr("os.fsync", fail)
    ran = run("doctor", "--force")
    assert ran.code == 1
    assert "'assumptions.toml' cannot be written: No space left on device" in ran.err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("assumptions.toml", "older")]


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


# Services that the sandbox does not simulate


Answers = dict[str, Any]
NO_SUCH = "00000000-0000-0000-0000-000000000000"


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


async def examine(answers: Answers, *, wrong: bool = False) -> tuple[dict[str, Finding], dict[str, Any], str]:
    """Return the findings about a service with these responses, the learned values, and the written file."""
    async with (
        serving(canned(answers)) as server,
        SigningClient(server.origin, "t0ken") as client,
        SigningClient(server.origin, "wrong", retry=RetryPolicy.none()) as other,
    ):
        made = Examination(client)
        found = {finding.check: finding async for finding in made.findings(other if wrong else None)}
        return found, made.values, made.to_toml("https://tenant.example.com")


def _signings(*ids: str) -> list[dict[str, Any]]:
    return [{"id": one, "name": one} for one in ids]


def pages(
    ids: tuple[str, ...], wrap: Callable[[list[dict[str, Any]], bool], Any], limit: str = "limit", cursor: str = "after"
) -> Callable[[web.Request], web.Response]:
    """Serve a list of ids page by page; ``wrap`` makes the page of its records, and whether more follow."""

    def page(request: web.Request) -> web.Response:
        left = [one for one in ids if one > request.query.get(cursor, "")]
        shown = left[: int(request.query.get(limit, 99))]
        return web.json_response(wrap([{"id": one, "name": one} for one in shown], len(left) > len(shown)))

    return page


def hidden(items: list[dict[str, Any]], more: bool) -> Any:
    token = items[-1]["id"] if more else None
    return {"meta": {"paging": {"nextToken": token, "prevToken": "x"}}, "body": {"rows": items}, "links": []}


ABC = ("a", "b", "c")
TWO = [{"id": "a", "name": "a"}, {"id": "b", "name": "b"}]
LEARNED: dict[str, tuple[Answers, str, dict[str, Any]]] = {
    "unknown names": (
        {"/me": {}, "/signings": pages(ABC, hidden, "size", "start"), "/signings/a": {"thing": {"id": "a"}}},
        "the cursor in meta.paging.nextToken is sent back as 'start'",
        {"limit_param": "size", "cursor_param": "start", "item_paths": "body.rows"}
        | {"next_paths": "meta.paging.nextToken", "record_paths": "thing"},
    ),
    "an unknown flag": (
        {"/signings": pages(ABC, lambda items, more: {"data": items, "info": {"moreToCome": more}})},
        "the cursor in info.moreToCome and the last item's id is sent back as 'after'",
        {"has_more_paths": "info.moreToCome"},
    ),
    "a list without cursors": (
        {"/signings": pages(ABC, lambda items, more: items)},
        "the first page has no cursor",
        {},
    ),
    "a link header": (
        {"/signings": lambda _: web.json_response(TWO, headers={"Link": '<https://x.test/?p=2>; rel="next"'})},
        "its URL is in the Link header",
        {},
    ),
    "a URL": ({"/signings": {"data": TWO, "links": {"next": "https://x.test/2"}}}, "its URL is in links.next", {}),
    "one signing": ({"/signings": TWO[:1]}, "there are not enough signings for a second page", {}),
    "a cursor that no parameter takes": (
        {"/signings": {"data": ["a", "b"], "has_more": True}},
        "a page has a cursor in has_more and the last item's id, but no known parameter takes it",
        {},
    ),
}


@pytest.mark.parametrize(("answers", "words", "firsts"), LEARNED.values(), ids=LEARNED)
async def test_list_conventions_are_found_by_their_effect(answers: Answers, words: str, firsts: dict[str, Any]) -> None:
    found, values, text = await examine({"/me": {}, **answers})
    assert found["next page"].message == words
    assert {name: values[name] if isinstance(values[name], str) else values[name][0] for name in firsts} == firsts
    assert found["token"].message == "works: GET /me succeeds"
    assert tomllib.loads(text) == values
    if firsts:
        assert (found["client"].state, found["client"].facts) == ("ok", {"pages": 2})


async def test_member_name_cannot_inject_lines_into_the_file() -> None:
    page = {"data": TWO, "next\nmax_pdf_bytes = 1\n#\x1b[2J": "x"}
    found, _, text = await examine({"/me": {}, "/signings": page})
    assert found["next page"].state == "unknown"
    assert "max_pdf_bytes" not in text


async def test_growing_or_repeating_list_is_a_failure() -> None:
    """A growing list has other items for every parameter, but also without one."""
    numbers = iter(range(10_000))

    def page(request: web.Request) -> web.Response:
        at = next(numbers) // 2 * 2
        return web.json_response({"data": [{"id": f"n{at}", "name": "n"}], "next_cursor": "x"})

    found, values, _ = await examine({"/me": {}, "/signings": page})
    assert (found["next page"].state, "cursor_param" in values) == ("failed", False)
    odd = lambda _: web.json_response({"data": TWO[:1], "next_cursor": f"c{next(numbers)}"})  # noqa: E731  # short
    found, _, _ = await examine({"/me": {}, "/signings": odd})
    assert found["client"].message == "page 2 of a list repeats earlier signings"


async def test_malformed_responses_are_reported_and_the_other_checks_run() -> None:
    for broken in (web.Response(text="{", content_type="application/json"), web.Response(status=404)):
        found, _, _ = await examine({"/me": {"data": {"name": "Anna t0ken"}}, "/signings": broken})
        assert found["list"].message == f"no list in the response to GET /signings (HTTP {broken.status})"
        assert not {"next page", "client"} & set(found)
        assert found["token"].message.startswith("works: Anna ")
        assert "t0ken" not in found["token"].message
    odd: Answers = {"/me": [], "/signings": [{"id": 5, "updated_at": "soon"}, 7, {"id": 6}]}
    odd |= {"/signings/5": {"a": {"b": 1}}, f"/signings/{NO_SUCH}": {}}
    odd["/signings/5/recipients"] = [{"email": "a", "signed_at": None, "signed": True}, 3]
    found, values, _ = await examine(odd)
    assert found["record"].message == "no id in the response for a signing"
    assert (found["recipients"].state, found["errors"].state) == ("ok", "warning")
    assert found["page size"].state == "warning"
    assert found["client"].state == "failed"
    assert values["recipient_done_fields"] == ["signed_at", "completed_at"]
    odd["/signings"] = [{"name": "x"}, {"id": "6"}]
    odd["/signings/6/recipients"] = {"people": [{"more": {"signed_at": 1}, "ApprovedOn": None}]}
    odd[f"/signings/{NO_SUCH}"] = lambda _: web.Response(status=500)
    found, values, _ = await examine(odd)
    assert found["record"].message == "a signing cannot be read: HTTP 500"
    assert (found["recipients"].state, found["errors"].state) == ("warning", "warning")
    assert (values["item_paths"][0], values["recipient_done_fields"][0]) == ("people", "ApprovedOn")


async def test_clock_skew_is_a_failure() -> None:
    async def clock(date: str) -> Finding:
        me = lambda _: web.json_response({}, headers={"Date": date})  # noqa: E731  # short
        found, _, _ = await examine({"/me": me, "/signings": []})
        assert found["page size"].state == found["next page"].state == "unknown"
        return found["clock"]

    now, minutes = datetime.now(UTC), timedelta(minutes=5)
    assert re.match(
        r"this machine's clock is \d+ s ahead of the service's", (await clock(format_datetime(now - minutes))).message
    )
    assert "s behind the service's" in (await clock(format_datetime(now + minutes))).message
    assert (await clock("noon")).state == "unknown"


@pytest.mark.parametrize(("status", "learns"), [(400, True), (200, False), (429, False)])
async def test_wrong_token_teaches_a_rejection_and_no_other_status(status: int, learns: bool) -> None:
    def me(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.headers["Authorization"] == "Bearer t0ken" else status)

    found, values, _ = await examine({"/me": me, "/signings": []}, wrong=True)
    assert (found["wrong token"].state, found["wrong token"].facts) == (
        "ok" if learns else "warning",
        {"status": status},
    )
    assert values.get("expired_token_statuses") == (sorted({401, status}) if learns else None)


@pytest.mark.parametrize(("status", "check"), [(404, "token"), (429, "service"), (503, "service")])
async def test_other_refusal_of_me_is_not_learned_as_a_rejected_token(status: int, check: str) -> None:
    found, values, _ = await examine({"/me": lambda _: web.Response(status=status, headers={"Retry-After": "0"})})
    assert (list(found), found[check].state, values) == (["https", "clock", check], "failed", {})


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
            finding = await anext(Examination(client).findings())
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
            [finding async for finding in Examination(client).findings()]
        assert caught.value.fatal
        assert server.requests == []


async def test_clock_is_not_judged_by_the_time_that_retries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to the last of several requests is later than the first request."""
    me = lambda _: web.json_response({}, headers={"Date": format_datetime(datetime.now(UTC))})  # noqa: E731  # short
    seconds = iter((time.time() - 40, time.time()))
    monkeypatch.setattr("signing_async.cli.doctor.time", SimpleNamespace(time=lambda: next(seconds)))
    found, _, _ = await examine({"/me": me, "/signings": []})
    assert found["clock"].state == "ok"
