"""`doctor`: its findings about services that respond in different ways, and the assumptions that it writes."""

from __future__ import annotations

import re
import ssl
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from signing_async import Assumptions, SigningClient
from signing_async.sandbox import Profile
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service, api_path, listening, running
from tests.cli.terminal import ROOT
from tests.pdfs import make_pdf


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A sandbox with the test's profile."""
    with running(seed=7, profile=getattr(request, "param", None) or Profile()) as started:
        yield started


@pytest.fixture
def signings(service: Service) -> None:
    """Create three signings, and complete one of them."""

    async def create() -> None:
        sandbox = service.sandbox
        known = Assumptions(record_paths=("data", "payload"))
        async with SigningClient(sandbox.base_url, sandbox.access_token(), assumptions=known) as client:
            made = [await client.signings.create(name=name, language="EN") for name in ("one", "two", "three")]
            await client.documents.upload(made[0], make_pdf(), "lease.pdf")
            await client.recipients.add(made[0], email="anna@example.com")
            await client.signings.send(made[0])
            await sandbox.complete(made[0].id)

    service.call(create())


def checks(ran: Ran) -> dict[str, Any]:
    """Return the findings by the names of the checks."""
    return {line["check"]: line for line in ran.lines if "check" in line}


PROFILES = {
    "default": Profile(),
    "laravel": Profile.laravel(),
    "rfc9457": Profile.rfc9457(),
    "numeric": Profile.numeric(),
    "has more, and other names": Profile(
        pagination="has_more",
        cursor_param="starting_after",
        limit_param="pageSize",
        items_field="entries",
        record_field="payload",
        recipient_completed_field="finished_on",
        request_id="header",
        request_id_header="X-Correlation-Id",
    ),
}


@pytest.mark.usefixtures("signings")
@pytest.mark.parametrize("service", PROFILES.values(), ids=PROFILES, indirect=True)
def test_written_assumptions_make_a_client_work(service: Service, run: Run, tmp_path: Path) -> None:
    """Every signing is listed once, page by page, and nobody who has signed is reminded."""
    ran = run("doctor", "--json", "--wrong-token")
    assert (ran.code, ran.err) == (0, ""), ran.out
    found = checks(ran)
    assert {name: one["state"] for name, one in found.items() if one["state"] not in ("ok", "unknown")} == {}
    assert found["client"]["pages"] == (1 if service.sandbox.profile.pagination == "bare" else 2)
    assumptions = Assumptions.from_file(tmp_path / "assumptions.toml")

    async def use() -> tuple[list[str], int]:
        sandbox = service.sandbox
        async with SigningClient(sandbox.base_url, sandbox.access_token(), assumptions=assumptions) as client:
            signings = [signing async for signing in client.signings.list(limit=1)]
            (completed,) = [signing for signing in signings if signing.name == "one"]
            return sorted(signing.name for signing in signings), len(await client.recipients.pending(completed))

    assert service.call(use()) == (["one", "three", "two"], 0)
    assert assumptions.expired_token_statuses == {401, service.sandbox.profile.expired_token_status}
    methods = {(one.method, one.operation) for one in service.do(lambda: service.sandbox.requests) if one.headers}
    setup = ("signings.create", "signings.send", "documents.upload", "recipients.add")
    assert all(method == "GET" for method, name in methods if name not in setup)


@pytest.mark.usefixtures("signings")
@pytest.mark.parametrize("service", [Profile(limit_param="per_page")], ids=["per_page"], indirect=True)
def test_sample_in_the_guide_is_written(run: Run, tmp_path: Path) -> None:
    ran = run("doctor")
    assert (ran.code, "ok       token        works: Sandbox User" in ran.out) == (0, True)
    assert f"SIGNING_ASSUMPTIONS={tmp_path}/assumptions.toml" in ran.out
    guide = (ROOT / "signing_async/settings.md").read_text("utf-8")
    (sample,) = re.findall(r"writes `assumptions.toml`.*?^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert sample in (tmp_path / "assumptions.toml").read_text()
    ran = run("doctor", "--output", "none/tenant.toml")
    assert ran.code == 2
    assert "Error: --output: 'none/tenant.toml' cannot be written: No such file or directory\n" in ran.err
    assert list(tmp_path.iterdir()) == [tmp_path / "assumptions.toml"]


# Services that the sandbox does not simulate

Responses = dict[str, Any]
Examine = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def examine(run: Run, tmp_path: Path) -> Examine:
    """Return a function that runs the command against a service with the given responses, by their paths."""

    def examine(responses: Responses, *options: str, tls: ssl.SSLContext | None = None) -> Any:
        def respond(request: web.Request) -> Any:
            found = responses.get(api_path(request))
            return found(request) if callable(found) else found

        with listening(respond, ssl=tls) as server:
            ran = run("doctor", "--json", "--force", *options, SIGNING_BASE_URL=server.origin)
        assert len(server.requests) > 1 or ran.code
        path = tmp_path / "assumptions.toml"
        return (checks(ran) or ran.error), tomllib.loads(path.read_text()) if path.exists() else {}

    return examine


def pages(wrap: Callable[[list[dict[str, Any]], bool], Any], limit: str = "limit", cursor: str = "after") -> Any:
    """Serve three signings page by page; ``wrap`` makes a page of its records, and whether more follow."""

    def page(request: web.Request) -> Any:
        left = [one for one in "abc" if one > request.query.get(cursor, "")]
        shown = left[: int(request.query.get(limit, 99))]
        return wrap([{"id": one, "name": one} for one in shown], len(left) > len(shown))

    return page


def hidden(items: list[dict[str, Any]], more: bool) -> Any:
    token = items[-1]["id"] if more else None
    return {"meta": {"paging": {"nextToken": token, "prevToken": "x"}}, "body": {"rows": items}, "links": []}


TWO = [{"id": "a", "name": "a"}, {"id": "b", "name": "b"}]
NO_CURSOR = "the first page has no cursor, or holds all signings"
LEARNED: dict[str, tuple[Responses, str, dict[str, Any]]] = {
    "unknown names": (
        {"/signings": pages(hidden, "size", "start"), "/signings/a": {"thing": {"id": "a"}}},
        "the cursor in meta.paging.nextToken is sent back as 'start'",
        {"limit_param": "size", "cursor_param": "start", "item_paths": "body.rows"}
        | {"next_paths": "meta.paging.nextToken", "record_paths": "thing"},
    ),
    "an unknown flag, and another list beside the records": (
        {"/signings": pages(lambda items, more: {"data": ["x"], "rows": items, "info": {"moreToCome": more}})},
        "the cursor in info.moreToCome and the last item's id is sent back as 'after'",
        {"item_paths": "rows", "has_more_paths": "info.moreToCome"},
    ),
    "a name that would inject a line": ({"/signings": {"data": TWO, "next\nmax_pdf_bytes = 1\n#": "x"}}, NO_CURSOR, {}),
    "a cursor that no parameter takes": (
        {"/signings": {"data": [], "has_more": True}},
        "a page has a cursor in has_more and the last item's id, but no known parameter takes it",
        {},
    ),
}


@pytest.mark.parametrize(("responses", "words", "firsts"), LEARNED.values(), ids=LEARNED)
def test_list_conventions_are_found_by_their_effect(
    responses: Responses, words: str, firsts: dict[str, Any], examine: Examine
) -> None:
    found, values = examine({"/me": {}, **responses})
    assert found["next page"]["message"] == words
    assert {name: values[name] if isinstance(values[name], str) else values[name][0] for name in firsts} == firsts
    assert found["token"]["message"] == "works: GET /me succeeds"
    assert "max_pdf_bytes" not in values
    if firsts:
        assert (found["client"]["state"], found["client"]["pages"]) == ("ok", 2)


def test_growing_or_repeating_list_is_a_failure(examine: Examine) -> None:
    """A growing list has other items for every parameter, but also without one."""
    numbers = iter(range(10_000))

    def growing(_: object) -> Any:
        return {"data": [{"id": f"n{next(numbers) // 2 * 2}", "name": "n"}], "next_cursor": "x"}

    def repeating(_: object) -> Any:
        return {"data": TWO[:1], "next_cursor": f"c{next(numbers)}"}

    found, values = examine({"/me": {}, "/signings": growing})
    assert (found["next page"]["state"], "cursor_param" in values) == ("failed", False)
    found, _ = examine({"/me": {}, "/signings": repeating})
    assert found["client"]["message"] == "page 2 of a list repeats earlier signings"


def test_malformed_responses_are_reported_and_the_other_checks_run(examine: Examine) -> None:
    for broken in (b"{", None):
        found, _ = examine({"/me": {"data": {"name": "Anna"}}, "/signings": broken})
        assert found["list"]["message"].startswith("no list in the response to GET /signings (HTTP ")
        assert found["token"]["message"] == "works: Anna"
        assert "errors" in found
    odd: Responses = {"/me": [], "/signings": [{"id": 5, "updated_at": "soon"}, 7, {"id": 6}]}
    found, _ = examine(odd | {"/signings/5": {"a": {"b": 1}}, "/signings/5/recipients": [{"signed_at": None}, 3]})
    assert found["record"]["message"] == "no id in the response for a signing"
    assert (found["recipients"]["state"], found["page size"]["state"]) == ("ok", "unknown")
    assert found["client"]["state"] == "failed"


def test_field_of_finished_recipients_that_is_always_empty_is_chosen_by_its_name(examine: Examine) -> None:
    people = {"people": [{"email": "anna@example.com", "ApprovedOn": None, "signed": True}]}
    responses: Responses = {
        "/me": {},
        "/signings": {"data": TWO, "links": {"next": "/2"}},
        "/signings/a/recipients": people,
    }
    found, values = examine(responses)
    assert (found["recipients"]["state"], found["recipients"]["field"]) == ("warning", "ApprovedOn")
    assert (values["item_paths"][0], values["recipient_done_fields"][0]) == ("people", "ApprovedOn")
    found, values = examine({**responses, "/signings/a/recipients": [{"signed_at": "2031-03-31"}]})
    assert (found["recipients"]["state"], values["recipient_done_fields"]) == ("ok", ["signed_at", "completed_at"])
    found, values = examine({**responses, "/signings/a/recipients": [{"email": "anna@example.com"}]})
    assert (found["recipients"]["state"], "recipient_done_fields" in values) == ("unknown", False)


def test_clock_skew_is_a_failure(examine: Examine) -> None:
    now, minutes = datetime.now(UTC), timedelta(minutes=5)
    for date, words in (
        (format_datetime(now - minutes), " s ahead of the service's"),
        (format_datetime(now + minutes), " s behind the service's"),
        ("noon", "no Date header in the response"),
    ):
        me = lambda _, date=date: web.json_response({}, headers={"Date": date})  # noqa: E731  # short
        found, _ = examine({"/me": me, "/signings": []})
        assert words in found["clock"]["message"]


@pytest.mark.parametrize(
    ("options", "status", "check", "code", "learned"),
    [
        (["--wrong-token"], 400, "wrong token", 0, {400, 401}),
        (["--wrong-token"], 429, "wrong token", 0, None),
        ([], 403, "token", 4, {401, 403}),
        ([], 404, "token", 4, None),
        ([], 503, "service", 1, None),
    ],
)
def test_status_of_a_rejected_token_is_learned_and_no_other(
    options: list[str], status: int, check: str, code: int, learned: set[int] | None, run: Run, tmp_path: Path
) -> None:
    """A token is sent once if it is rejected."""

    def respond(request: web.Request) -> Any:
        is_refused = not options or "not-a-token" in request.headers["Authorization"]
        if api_path(request) == "/me" and is_refused:
            return web.json_response({}, status=status, headers={"Retry-After": "0"})
        return []

    with listening(respond) as server:
        ran = run("doctor", "--json", *options, SIGNING_BASE_URL=server.origin)
    found = checks(ran)
    assert (ran.code, found[check]["status"]) == (code, status)
    assert found[check]["state"] == ("failed" if code else "ok" if learned else "warning")
    assert options or list(found) == ["https", "clock", check]
    assert code != 4 or len(server.requests) == 1
    values = tomllib.loads((tmp_path / "assumptions.toml").read_text())
    assert set(values.get("expired_token_statuses", [])) == (learned or set())


def test_certificate_is_checked_before_anything_is_sent(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for days, state in ((90, "ok"), (9, "warning"), (90, None)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        expires = datetime.now(UTC) + timedelta(days=days)
        authority.issue_cert("127.0.0.1", not_after=expires).configure_cert(context)
        if state is None:
            monkeypatch.delenv("SSL_CERT_FILE")
        found, _ = examine({"/me": {}, "/signings": []}, tls=context)
        if state is None:
            assert re.match(r"no secure connection to https://127\.0\.0\.1:\d+: unable to get", found["message"])
        else:
            assert (found["https"]["days_left"], found["https"]["state"]) == (days - 1, state)
