"""`login`, `logout` and `me`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import aiohttp
import pytest

from signing_async import FileTokenStore, SigningClient, Token
from signing_async.cli.callback import listen  # a real browser would race the login
from tests.cli.browser import agree
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service
from tests.cli.terminal import Terminal, screen

BROWSER = f"{sys.executable} {Path(__file__).parent / 'browser.py'} %s"


@pytest.fixture
def app(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> dict[str, str]:
    """Register an app with a redirect URI on this machine, and set it in the environment without an access token."""
    return register_app(service, monkeypatch, f"http://127.0.0.1:{unused_tcp_port}/callback")


def register_app(service: Service, monkeypatch: pytest.MonkeyPatch, redirect_uri: str) -> dict[str, str]:
    """Register an app and set it in the environment."""
    made = service.do(service.sandbox.register_app, redirect_uri=redirect_uri)
    environment = {
        "SIGNING_CLIENT_ID": made.client_id,
        "SIGNING_CLIENT_SECRET": made.client_secret or "",
        "SIGNING_REDIRECT_URI": redirect_uri,
    }
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pages where a browser ended up that allows access."""
    return browse_with(monkeypatch, agree)


def browse_with(monkeypatch: pytest.MonkeyPatch, visit: Callable[[str], str]) -> list[str]:
    """Replace the browser: it calls ``visit`` with the URL it is opened with. Return what that returned."""
    ended: list[str] = []

    def open_browser(address: str) -> bool:
        ended.append(visit(address))
        return True

    monkeypatch.setattr("webbrowser.open", open_browser)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return ended


def test_login_saves_token_that_commands_and_from_env_use_and_shows_no_secret(
    run: Run, app: dict[str, str], service: Service, pages: list[str]
) -> None:
    origin, user = service.sandbox.base_url, "Sandbox User <user@sandbox.example>"
    ran = run("login", "--json", "-v")
    told = [json.loads(line) for line in ran.err.splitlines()]
    assert told[0]["url"].startswith(f"{origin}/oauth/authorize?")
    assert (told[1]["attempt"]["operation"], told[1]["attempt"]["status"]) == ("oauth.exchange", 200)
    (facts,) = ran.lines
    assert (facts["email"], facts["base_url"]) == ("user@sandbox.example", origin)
    token_file = Path(facts["token_file"])
    assert (token_file.parent.name, stat.S_IMODE(token_file.stat().st_mode)) == ("tokens", 0o600)
    token = json.loads(token_file.read_text())
    again = run("login")
    assert again.out == f"Logged in at {origin} as {user}; the token is in {token_file}\n"
    assert all("You are logged in" in page for page in pages)
    service.do(lambda: service.sandbox.clock.advance(days=1))
    refreshed = run("me", "-v")
    assert refreshed.out == f"{user} at {origin}\n"
    assert "oauth.refresh, attempt 1: HTTP 200 in " in refreshed.err
    shown = "".join((*pages, *(text for each in (ran, again, refreshed) for text in (each.out, each.err))))
    for secret in (token["access_token"], token["refresh_token"], app["SIGNING_CLIENT_SECRET"]):
        assert secret not in shown

    async def ask() -> str | None:
        async with SigningClient.from_env() as client:
            return (await client.me()).email

    assert asyncio.run(ask()) == "user@sandbox.example"


def test_requests_without_the_state_are_refused_silently_and_a_refused_code_ends_the_login(
    run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any program on this machine, and any page in a browser, may send a request without the state."""
    address, responses = urlsplit(app["SIGNING_REDIRECT_URI"]), []

    def visit(url: str) -> str:
        lines = [f"GET /callback{query} HTTP/1.1" for query in ("", "?code=x&state=forged", "?error=denied&state=")]
        lines += [
            "GET /callback HTTP/1.1\r\nbad header",
            f"GET /callback?code=x&state={url.split('state=')[1]} HTTP/1.1",
        ]
        for line in lines:
            with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as connection:
                connection.sendall(f"{line}\r\nHost: a b\r\nConnection: close\r\n\r\n".encode())
                responses.append(connection.makefile("rb").read())
        return url

    visited = browse_with(monkeypatch, visit)
    ran = run("login")
    assert (ran.code, "Error: " in ran.err) == (4, True)
    end = time.monotonic() + 30
    while not visited:  # the browser is a thread
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [response.split()[1] for response in responses] == [b"400"] * 5
    for response in responses[:3]:
        assert b"This request does not belong to the current login." in response
        for header in (b"Cache-Control: no-store", b"Referrer-Policy: no-referrer", b"default-src 'none'"):
            assert header in response
    assert b"Not logged in" in responses[4]
    assert b"This request does not belong" not in responses[4]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in warnings if record.name.startswith("signing_async")]


def test_redirect_uri_that_cannot_be_listened_at_is_an_error(run: Run, app: dict[str, str]) -> None:
    port = urlsplit(app["SIGNING_REDIRECT_URI"]).port
    with socket.create_server(("127.0.0.1", port or 0)):
        ran = run("login")
    assert (ran.code, "--no-browser" in ran.err) == (2, True)
    assert f"cannot listen at http://127.0.0.1:{port}/callback: " in ran.err
    ran = run("login", SIGNING_REDIRECT_URI="http://127.0.0.1:x/callback")
    assert (ran.code, "redirect_uri" in ran.err) == (2, True)


def test_login_with_remote_redirect_uri_reads_code_from_stdin_and_refuses_forged_state(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_app(service, monkeypatch, "https://app.example.com/callback")
    (made,) = service.do(lambda: service.sandbox.apps)
    code = service.do(service.sandbox.authorize, made)
    ran = run("login", stdin=f"{code}\n".encode())
    assert (ran.code, ran.out[:9]) == (0, "Logged in")
    ran = run("login", stdin=b"https://app.example.com/callback?code=x&state=forged\n")
    assert ran.code == 4
    assert "state does not match" in ran.err
    code = service.do(service.sandbox.authorize, made)
    ran = run("login", stdin=f"{code}\n".encode(), SIGNING_CLIENT_SECRET="mistaken-secret")
    assert ran.code == 4
    assert ran.err.endswith(". Check SIGNING_CLIENT_ID and SIGNING_CLIENT_SECRET, or the settings file\n")


def test_missing_settings_and_the_callback_url_are_prompted_for_and_saved_without_showing_the_secret(
    service: Service, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    redirect_uri = "http://127.0.0.1:8000/callback"
    app = register_app(service, monkeypatch, redirect_uri)
    for name in ("SIGNING_BASE_URL", *app):
        monkeypatch.delenv(name)
    terminal = Terminal("login", "--no-browser")
    for words, answer in (
        ("The tenant's URL", "tenant.example.com"),
        ("must be an origin such as https://tenant.example.com", f"{service.sandbox.base_url}/ "),
        ("client id", app["SIGNING_CLIENT_ID"]),
        ("client secret", app["SIGNING_CLIENT_SECRET"]),
        ("redirect URI", redirect_uri),
    ):
        terminal.wait_for(words)
        terminal.type(f"{answer}\r")
    terminal.wait_for("or the code in it")
    state = terminal.text.split("state=")[1].split()[0]
    (made,) = service.do(lambda: service.sandbox.apps)
    query = urlencode({"code": service.do(service.sandbox.authorize, made), "state": state})
    terminal.type(f"{redirect_uri}?{query}\r")
    ended = terminal.end()
    assert (ended.code, "Logged in at" in ended.text) == (0, True), ended.text
    assert app["SIGNING_CLIENT_SECRET"] not in ended.text
    kept = tmp_path / "config" / "signing-async" / "config.toml"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert f'base_url = "{service.sandbox.base_url}"\n' in kept.read_text()
    assert run("me").code == 0


def test_missing_settings_without_terminal_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    ran = run("login")
    words = "set SIGNING_CLIENT_ID, SIGNING_CLIENT_SECRET, SIGNING_REDIRECT_URI\n"
    assert (ran.code, ran.err) == (
        2,
        f"Error: settings are missing and there is no prompt (no terminal, or --json): {words}",
    )
    ran = run("list")
    words = "neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set: run signing-async login first"
    assert (ran.code, ran.err) == (2, f"Error: {words}\n")


def test_logout_removes_the_token_and_says_that_the_service_was_not_told(
    run: Run, app: dict[str, str], service: Service, pages: list[str]
) -> None:
    given = {"SIGNING_ACCESS_TOKEN": service.do(service.sandbox.access_token)}
    assert "is used instead of the login" in run("login", **given).err
    ran = run("logout", **given)
    assert ran.out.startswith("Token removed: ")
    assert ran.out.endswith("; a copy works until it expires\n")
    assert "is still set" in ran.err
    assert list(Path(os.environ["XDG_CONFIG_HOME"]).rglob("*.json")) == []
    ran = run("me")
    assert (ran.code, ran.err) == (4, f"Error: not logged in at {service.sandbox.base_url}: run signing-async login\n")
    assert run("logout", "--json").lines[0]["removed"] is False
    assert run("logout").out == f"Not logged in at {service.sandbox.base_url}\n"


def test_token_file_with_other_content_is_neither_overwritten_nor_removed(
    run: Run, app: dict[str, str], pages: list[str]
) -> None:
    """No browser is opened either."""
    Path("lease.pdf").write_bytes(b"%PDF-1.7 and so on")
    for command in ("login", "logout"):
        ran = run(command, SIGNING_TOKEN_FILE=str(Path("lease.pdf").absolute()))
        assert (ran.code, ran.out) == (4, "")
        assert "lease.pdf holds no token; it was not changed" in ran.err
    assert Path("lease.pdf").read_bytes() == b"%PDF-1.7 and so on"
    assert pages == []


def test_me_shows_the_user_and_what_to_do_about_a_rejected_token(
    run: Run, app: dict[str, str], service: Service, tmp_path: Path
) -> None:
    (facts,) = run("me", "--json", SIGNING_ACCESS_TOKEN=service.do(service.sandbox.access_token)).lines
    assert (facts["email"], facts["base_url"]) == ("user@sandbox.example", service.sandbox.base_url)
    ran = run("me", SIGNING_ACCESS_TOKEN="wrong-token-of-the-test")
    assert (ran.code, "wrong-token-of-the-test" in ran.err) == (4, False)
    assert ran.err.endswith(". Replace the access token of the settings, or remove it and run: signing-async login\n")
    for refresh_token in ("old", None):
        asyncio.run(FileTokenStore(tmp_path / "token.json").save(Token("old", refresh_token)))
        ran = run("me", "--json", SIGNING_TOKEN_FILE=str(tmp_path / "token.json"))
        assert (ran.code, ran.error["message"].endswith("o log in, run: signing-async login")) == (4, True)


def test_logout_fails_when_the_token_file_stays_locked(
    run: Run, app: dict[str, str], pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("login")
    monkeypatch.setattr("signing_async.cli.account._LOCK_TIMEOUT", 0.2)
    (kept,) = Path(os.environ["XDG_CONFIG_HOME"]).rglob("*.json")

    async def log_out() -> Ran:
        async with FileTokenStore(kept).lock():
            return await asyncio.to_thread(run, "logout")

    ran = asyncio.run(log_out())
    assert (ran.code, "is in use: try again" in ran.err, kept.exists()) == (1, True, True)


async def test_callback_listens_on_a_free_port_and_refuses_requests_after_the_login() -> None:
    async def exchange(query: str) -> str:
        return "saved"

    async with listen("http://127.0.0.1/callback") as callback, aiohttp.ClientSession() as session:
        login = asyncio.create_task(callback.wait(exchange))
        for status, words in ((200, "You are logged in"), (410, "This login is over")):
            async with session.get(callback.redirect_uri) as response:
                assert (response.status, words in await response.text()) == (status, True)
        await login


@pytest.mark.parametrize(
    ("display", "connection", "platform"), [("", "", "linux"), (":0", "192.0.2.1 1 192.0.2.2 22", "darwin")]
)
def test_login_over_ssh_or_without_display_prints_the_url_and_waits_for_the_callback(
    display: str, connection: str, platform: str, run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    visited = browse_with(monkeypatch, lambda address: "")
    monkeypatch.setattr("sys.platform", platform)
    ran = run("login", "--wait", "0.2", DISPLAY=display, WAYLAND_DISPLAY="", BROWSER="", SSH_CONNECTION=connection)
    advice = "run login again with a longer --wait, or with --no-browser"
    assert (ran.code, ran.err.splitlines()[-1]) == (5, f"Error: no callback from the browser within 0.2 s: {advice}")
    assert re.search(r"\n  http://127\.0\.0\.1:\d+/oauth/authorize\?.*\nNo browser was opened\.", ran.err)
    assert visited == []


def test_answers_are_not_written_into_an_existing_settings_file(
    app: dict[str, str], pages: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SIGNING_REDIRECT_URI")
    file = tmp_path / "config" / "signing-async" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("")
    ended = screen("login", typed=f"{app['SIGNING_REDIRECT_URI']}\n")
    assert (ended.code, "Warning: redirect_uri not saved: add them to" in ended.text) == (0, True)
    assert file.read_text() == ""
