"""`login`, `logout` and `me`."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import aiohttp
import pytest

from signing_async import FileTokenStore, OAuth, SigningClient, Token
from signing_async.cli import account
from signing_async.cli.callback import listen  # a real browser would race the login
from tests.cli.browser import agree
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import Terminal

SSH = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
BROWSER = f"{sys.executable} {Path(__file__).parent / 'browser.py'} %s"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until(done: Callable[[], object]) -> None:
    """Wait for something that happens in a thread."""
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def app(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Register an app with a redirect URI on this machine, and set it in the environment without an access token."""
    return register_app(service, monkeypatch, f"http://127.0.0.1:{free_port()}/callback")


def register_app(service: Service, monkeypatch: pytest.MonkeyPatch, redirect_uri: str) -> dict[str, str]:
    """Register an app and set it in the environment."""
    made = service.do(service.sandbox.register_app, redirect_uri=redirect_uri)
    assert made.client_secret
    environment = {
        "SIGNING_CLIENT_ID": made.client_id,
        "SIGNING_CLIENT_SECRET": made.client_secret,
        "SIGNING_REDIRECT_URI": redirect_uri,
    }
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
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
    for name in SSH:
        monkeypatch.delenv(name, raising=False)
    return ended


def test_login_saves_token_that_commands_and_from_env_use(
    run: Run, app: dict[str, str], service: Service, pages: list[str]
) -> None:
    ran = run("login")
    assert ran.code == 0, ran.err
    origin = service.sandbox.base_url
    assert ran.out.startswith(f"Logged in at {origin} as Sandbox User <user@sandbox.example>; the token is in ")
    (kept,) = Path(os.environ["XDG_CONFIG_HOME"]).rglob("*.json")
    assert str(kept) in ran.out
    assert (kept.parent.name, stat.S_IMODE(kept.stat().st_mode)) == ("tokens", 0o600)
    assert "You are logged in" in pages[0]
    assert run("me").out == f"Sandbox User <user@sandbox.example> at {origin}\n"

    async def ask() -> str | None:
        async with SigningClient.from_env() as client:
            return (await client.me()).email

    assert asyncio.run(ask()) == "user@sandbox.example"
    assert app["SIGNING_CLIENT_SECRET"] not in f"{ran.out}{ran.err}{pages[0]}"


def test_login_shows_no_secret_with_json_and_verbose_nor_does_a_refresh(
    run: Run, app: dict[str, str], service: Service, pages: list[str]
) -> None:
    ran = run("login", "--json", "-v")
    told = [json.loads(line) for line in ran.err.splitlines()]
    assert told[0]["url"].startswith(f"{service.sandbox.base_url}/oauth/authorize?")
    assert (told[1]["attempt"]["operation"], told[1]["attempt"]["status"]) == ("oauth.exchange", 200)
    (facts,) = ran.lines
    token = json.loads(Path(facts["token_file"]).read_text())
    assert (facts["email"], facts["base_url"]) == ("user@sandbox.example", service.sandbox.base_url)
    service.do(lambda: service.sandbox.clock.advance(days=1))
    refreshed = run("me", "-v")
    assert "oauth.refresh, attempt 1: HTTP 200 in " in refreshed.err
    for secret in (token["access_token"], token["refresh_token"], app["SIGNING_CLIENT_SECRET"]):
        assert secret not in ran.out + ran.err + refreshed.err


def test_callback_pages_are_not_stored_run_nothing_and_send_no_referrer(
    run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []

    def visit(address: str) -> str:
        state = address.split("state=")[1]
        for query in ("code=x&state=forged", "", f"code=x&state={state}"):
            try:
                with urllib.request.urlopen(f"{app['SIGNING_REDIRECT_URI']}?{query}") as response:
                    answers.append(response)
            except urllib.error.HTTPError as error:
                error.text = error.read().decode()  # type: ignore[attr-defined]  # kept for the test
                answers.append(error)
        return ""

    browse_with(monkeypatch, visit)
    ran = run("login")
    assert ran.code == 4
    assert "Error: " in ran.err
    wait_until(lambda: len(answers) == 3)
    forged, empty, wrong = answers
    for answer in answers:
        assert answer.status == 400
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "does not belong to the current login" in forged.text == empty.text
    assert "Not logged in" in wrong.text


def test_login_without_callback_is_exit_code_5_after_the_wait(
    run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    browse_with(monkeypatch, lambda address: "")
    ran = run("login", "--wait", "0.2")
    advice = "run login again with a longer --wait, or with --no-browser"
    assert (ran.code, ran.err.splitlines()[-1]) == (5, f"Error: no callback from the browser within 0.2 s: {advice}")
    assert "/oauth/authorize?" in ran.err


def test_occupied_port_is_an_error_that_suggests_no_browser(run: Run, app: dict[str, str]) -> None:
    port = int(app["SIGNING_REDIRECT_URI"].split(":")[2].split("/")[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        ran = run("login")
    assert ran.code == 2
    assert f"cannot listen at http://127.0.0.1:{port}/callback: " in ran.err
    assert "--no-browser" in ran.err


def test_login_without_browser_prompts_for_callback_url_and_checks_its_state(
    run: Run, app: dict[str, str], service: Service, tmp_path: Path
) -> None:
    terminal = Terminal("login", "--no-browser")
    terminal.wait_for("or the code in it")
    screen = terminal._seen.decode()
    address = next(word for word in screen.split() if word.startswith(service.sandbox.base_url))
    state = address.split("state=")[1]
    made = next(one for one in service.do(lambda: service.sandbox.apps) if one.client_id in address)
    query = urlencode({"code": service.do(service.sandbox.authorize, made), "state": state})
    terminal.type(f"{app['SIGNING_REDIRECT_URI']}?{query}\r")
    ended = terminal.end()
    assert ended.code == 0, ended.text
    assert "Logged in at" in ended.text


def test_login_with_remote_redirect_uri_reads_code_from_stdin_and_refuses_forged_state(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_app(service, monkeypatch, "https://app.example.com/callback")
    (made,) = service.do(lambda: service.sandbox.apps)
    code = service.do(service.sandbox.authorize, made)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{code}\n"))
    ran = run("login")
    assert (ran.code, ran.out[:9]) == (0, "Logged in")
    monkeypatch.setattr(sys, "stdin", io.StringIO("https://app.example.com/callback?code=x&state=forged\n"))
    ran = run("login")
    assert ran.code == 4
    assert "state does not match" in ran.err


def test_missing_settings_are_prompted_for_and_saved_without_showing_the_secret(
    service: Service, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    redirect_uri = f"http://127.0.0.1:{free_port()}/callback"
    app = register_app(service, monkeypatch, redirect_uri)
    for name in ("SIGNING_BASE_URL", *app):
        monkeypatch.delenv(name)
    terminal = Terminal("login", environment={"BROWSER": BROWSER})
    for words, answer in (
        ("The tenant's URL", "tenant.example.com"),
        ("must be an origin such as https://tenant.example.com", f"{service.sandbox.base_url}/ "),
        ("client id", app["SIGNING_CLIENT_ID"]),
        ("client secret", app["SIGNING_CLIENT_SECRET"]),
        ("redirect URI", redirect_uri),
    ):
        terminal.wait_for(words)
        terminal.type(f"{answer}\r")
    screen = terminal.end()
    assert screen.code == 0, screen.text
    assert "Logged in at" in screen.text
    assert app["SIGNING_CLIENT_SECRET"] not in screen.text
    kept = tmp_path / "config" / "signing-async" / "config.toml"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert f'base_url = "{service.sandbox.base_url}"\n' in kept.read_text()
    assert run("me").code == 0


def test_missing_settings_without_terminal_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    ran = run("login")
    names = "SIGNING_CLIENT_ID, SIGNING_CLIENT_SECRET, SIGNING_REDIRECT_URI"
    assert (ran.code, ran.err) == (
        2,
        f"Error: settings are missing and there is no prompt (no terminal, or --json): set {names}\n",
    )
    ran = run("list")
    words = "neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set: run signing-async login first"
    assert (ran.code, ran.err) == (2, f"Error: {words}\n")


def test_logout_removes_the_token_and_says_that_the_service_was_not_told(
    run: Run, app: dict[str, str], service: Service, pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("SIGNING_ACCESS_TOKEN", service.do(service.sandbox.access_token))
        assert "is used instead of the login" in run("login").err
        ran = run("logout")
        assert "is still set" in ran.err
    assert ran.out.startswith("Token removed: ")
    assert "a copy works until it expires" in ran.out
    assert list(Path(os.environ["XDG_CONFIG_HOME"]).rglob("*.json")) == []
    ran = run("me")
    assert ran.code == 4
    assert ran.err == f"Error: not logged in at {service.sandbox.base_url}: run signing-async login\n"
    assert run("logout", "--json").lines[0]["removed"] is False
    assert run("logout").out == f"Not logged in at {service.sandbox.base_url}\n"


def test_token_file_with_other_content_is_neither_overwritten_nor_removed(
    run: Run, app: dict[str, str], pages: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No browser is opened either."""
    (tmp_path / "lease.pdf").write_bytes(b"%PDF-1.7 and so on")
    monkeypatch.setenv("SIGNING_TOKEN_FILE", str(tmp_path / "lease.pdf"))
    for command in ("login", "logout"):
        ran = run(command)
        assert (ran.code, ran.out) == (4, "")
        assert "lease.pdf holds no token; it was not changed" in ran.err
    assert (tmp_path / "lease.pdf").read_bytes() == b"%PDF-1.7 and so on"
    assert pages == []


def test_me_shows_the_user_and_hides_a_rejected_token(
    run: Run, monkeypatch: pytest.MonkeyPatch, service: Service
) -> None:
    (facts,) = run("me", "--json").lines
    assert (facts["email"], facts["base_url"]) == ("user@sandbox.example", service.sandbox.base_url)
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "wrong-token-of-the-test")
    ran = run("me")
    assert ran.code == 4
    assert "wrong-token-of-the-test" not in ran.err
    assert ran.err.endswith(". Replace SIGNING_ACCESS_TOKEN, or unset it and run: signing-async login\n")


def test_rejected_login_says_how_to_log_in(
    run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIGNING_TOKEN_FILE", str(tmp_path / "token.json"))
    for refresh_token in ("old", None):
        asyncio.run(FileTokenStore(tmp_path / "token.json").save(Token("old", refresh_token)))
        ran = run("me")
        assert (ran.code, ran.err.count("o log in, run: signing-async login\n")) == (4, 1)
        assert run("me", "--json").error["message"].endswith("o log in, run: signing-async login")


def test_logout_fails_when_the_token_file_stays_locked(
    run: Run, app: dict[str, str], pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("login")
    monkeypatch.setattr(account, "_LOCK_TIMEOUT", 0.2)
    (kept,) = Path(os.environ["XDG_CONFIG_HOME"]).rglob("*.json")

    async def hold() -> None:
        async with FileTokenStore(kept).lock():
            ran = await asyncio.to_thread(run, "logout")
            assert ran.code == 1
            assert "is in use: try again" in ran.err

    asyncio.run(hold())
    assert kept.exists()


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
    "request_line",
    [
        "GET /callback HTTP/1.1",
        "GET /callback?error=access_denied&state= HTTP/1.1",
        "GET /callback HTTP/1.1\r\nbad header",
    ],
)
def test_request_without_the_state_is_refused_silently_and_does_not_end_the_login(
    request_line: str, run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any program on this machine, and any page in a browser, may send one."""
    statuses: list[bytes] = []

    def visit(address: str) -> str:
        port = urlsplit(app["SIGNING_REDIRECT_URI"]).port or 0
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(f"{request_line}\r\nHost: a b\r\n\r\n".encode())
            statuses.append(connection.recv(4096).split()[1])
        return agree(address)

    browse_with(monkeypatch, visit)
    ran = run("login")
    assert (ran.code, statuses) == (0, [b"400"]), ran.err
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("environment", "platform", "opened"),
    [
        ({"DISPLAY": ":0"}, "linux", True),
        ({}, "linux", False),
        ({}, "darwin", True),
        ({"SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, "darwin", False),
        ({"BROWSER": "firefox", "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, "linux", True),
    ],
)
def test_login_opens_no_browser_over_ssh_or_without_display(
    environment: dict[str, str],
    platform: str,
    opened: bool,
    run: Run,
    app: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It prints the URL instead; a browser named by $BROWSER is opened anywhere."""
    visited = browse_with(monkeypatch, lambda address: "")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(account.sys, "platform", platform)  # type: ignore[attr-defined]  # the module's sys
    ran = run("login", "--wait", "0.2")
    assert ran.code == 5
    assert "\n  http://127.0.0.1:" in ran.err
    if opened:
        wait_until(lambda: visited)
    else:
        assert visited == []


def test_login_whose_token_endpoint_hangs_is_not_taken_for_one_without_callback(
    run: Run, app: dict[str, str], service: Service, pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OAuth.__init__.__kwdefaults__, "timeout", 0.5)
    service.sandbox.faults.add("oauth.token", "hang", times=None)
    ran = run("login", "--wait", "60")
    assert ran.code == 1
    assert "oauth.exchange: " in ran.err
    assert "no callback" not in ran.err


def test_answers_are_not_written_into_an_existing_settings_file(
    run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SIGNING_REDIRECT_URI")
    file = tmp_path / "config" / "signing-async" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("")
    terminal = Terminal("login", environment={"BROWSER": BROWSER})
    terminal.wait_for("redirect URI")
    terminal.type(f"{app['SIGNING_REDIRECT_URI']}\r")
    screen = terminal.end()
    assert (screen.code, "Warning: redirect_uri not saved: add them to" in screen.text) == (0, True)
    assert file.read_text() == ""


def test_redirect_uri_that_is_no_url_is_refused(run: Run, app: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNING_REDIRECT_URI", "http://127.0.0.1:x/callback")
    ran = run("login")
    assert (ran.code, "redirect_uri" in ran.err) == (2, True)
