"""`login`, `logout` and `me`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import webbrowser
from typing import TYPE_CHECKING, Any

import attrs
import click

from ..errors import AuthError, ConfigurationError
from .command_base import Seconds, State, command, time_limit
from .output import on_one_line

if TYPE_CHECKING:
    from ..auth.oauth import AuthorizationRequest, OAuth
    from ..models import User
    from ..settings import Settings

_LOCK_TIMEOUT = 10.0
_PROMPTS = {
    "base_url": "The tenant's URL, such as https://tenant.example.com",
    "client_id": "The app's client id (register an app at {base_url}/developer/my-apps)",
    "client_secret": "The app's client secret",
    "redirect_uri": "The app's redirect URI, such as http://127.0.0.1:8000/callback",
}


@command()
async def me(state: State) -> None:
    """Show the logged-in user: a cheap way to check the settings.

    \b
    Example:
      signing-async me
    """
    async with state.client() as client:
        user = await client.me()
    facts = {**user.extra, "base_url": state.settings.origin, "id": user.id, "name": user.name, "email": user.email}
    state.out.result(facts, f"{_format_user(user)} at {state.settings.origin}")


def _format_user(user: User) -> str:
    text = " ".join(part for part in (user.name, user.email and f"<{user.email}>") if part)
    return on_one_line(text or user.id or "unknown user")


@command()
@click.option("--no-browser", is_flag=True, help="Read the callback URL from the terminal.")
@click.option("--wait", default=300.0, show_default=True, type=Seconds(0, min_open=True), help="For the browser.")
def login(state: State, no_browser: bool, wait: float) -> None:
    """Log in with the browser, and keep the token in a file that only you can read.

    Register the app at the tenant's /developer/my-apps, with a redirect URI such as http://127.0.0.1:8000/callback: the
    browser is redirected there, where this command listens. With --no-browser, or a redirect URI that is not on this
    machine, enter the URL of the page where the browser ends up, or the code in it, on the terminal or on standard
    input. Over SSH or without a display, the login URL is printed and no browser is opened.

    On a terminal, the command prompts for missing settings; the client secret is not shown. If there is no settings
    file yet, the answers are saved in one.

    \b
    Example:
      signing-async login
    """
    from .callback import is_loopback

    answers = _prompt_for_missing(state)
    settings = attrs.evolve(state.settings, **answers)
    # Fail before the user goes to the browser if the token file holds anything but a token: `save` would raise.
    state.run(settings.store.load())
    oauth = _oauth(state, settings)
    if not no_browser and is_loopback(oauth.redirect_uri):
        state.run(_login_with_browser(state, settings, oauth.redirect_uri, wait))
    else:
        request = oauth.authorization_request()
        state.out.say(f"Visit this URL in a browser, and allow access:\n  {request.url}", url=request.url)
        # Prompt before an event loop runs: inside one, Ctrl-C would not interrupt the prompt.
        if sys.stdin.isatty():
            url = click.prompt("The URL where the browser ended up (or the code in it)", err=True)
        else:
            url = sys.stdin.readline().strip()
        state.run(_exchange(state, settings, oauth, url, request))
    if answers:
        _save_answers(state, answers)


def _oauth(state: State, settings: Settings, redirect_uri: str | None = None) -> OAuth:
    oauth = settings.oauth(redirect_uri)
    if state.verbose:
        oauth.current.observer.on_attempt = state.print_attempt
    return oauth


async def _exchange(state: State, settings: Settings, oauth: OAuth, url: str, request: AuthorizationRequest) -> None:
    async with oauth:
        await oauth.exchange(url, request.state, request.code_verifier)
        await _report_login(state, settings, oauth)


def _prompt_for_missing(state: State) -> dict[str, Any]:
    settings = state.settings
    missing = [name for name in _PROMPTS if getattr(settings, name) is None]
    if missing and (state.json or not sys.stdin.isatty()):
        names = ", ".join(f"SIGNING_{name.upper()}" for name in missing)
        raise ConfigurationError(
            f"settings are missing and there is no prompt (no terminal, or --json): set {names}{settings.note}"
        )
    answers: dict[str, Any] = {}
    for name in missing:
        prompt = _PROMPTS[name].format(base_url=answers.get("base_url", settings.base_url))
        check = _check_origin if name == "base_url" else str.strip
        answers[name] = click.prompt(prompt, hide_input=name == "client_secret", err=True, value_proc=check)
    return answers


def _check_origin(answer: str) -> str:
    from ..transport import urls

    try:
        return urls.check_origin(answer.strip())
    except ConfigurationError as error:  # repeats the prompt
        raise click.UsageError(str(error)) from None


def _save_answers(state: State, answers: dict[str, Any]) -> None:
    from ..settings import config_folder

    folder, file = config_folder(), state.settings.file
    if file is not None or folder is None:
        state.out.warn(f"{', '.join(answers)} not saved: add them to {file or 'the environment'} to avoid the prompt")
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "config.toml"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(
        "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in answers.items()), "utf-8"
    )
    state.out.say(f"Settings saved in {path}.")


async def _login_with_browser(state: State, settings: Settings, redirect_uri: str, wait: float) -> None:
    from .callback import listen

    async with listen(redirect_uri) as callback, _oauth(state, settings, callback.redirect_uri) as oauth:
        request = oauth.authorization_request()
        state.out.say(f"Log in with your browser, on this machine:\n  {request.url}", url=request.url)
        # Without a display, `webbrowser` would start a text browser in this terminal.
        has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
        if os.environ.get("BROWSER") or (has_display and "SSH_CONNECTION" not in os.environ):
            # In a daemon thread: some browsers return only when they are closed.
            threading.Thread(target=webbrowser.open, args=(request.url,), daemon=True).start()
        else:
            state.out.say("No browser was opened. To log in with the browser of another machine: login --no-browser")

        async def exchange(query: str) -> str:
            await oauth.exchange(query, request.state, request.code_verifier)
            return f"The token for {settings.origin} is saved on your machine."

        advice = ": run login again with a longer --wait, or with --no-browser"
        async with time_limit(wait, "no callback from the browser", advice):
            await callback.wait(exchange)
        await _report_login(state, settings, oauth)


async def _report_login(state: State, settings: Settings, oauth: OAuth) -> None:
    from ..client import SigningClient

    async with SigningClient(settings.origin, oauth, timeout=settings.timeouts) as client:
        user = await client.me()
    path = str(settings.store.path)
    facts = {"base_url": oauth.origin, "name": user.name, "email": user.email, "token_file": path}
    state.out.result(facts, f"Logged in at {oauth.origin} as {_format_user(user)}; the token is in {path}")
    if settings.access_token is not None:
        state.out.warn("SIGNING_ACCESS_TOKEN is also set, and is used instead of the login")


@command()
async def logout(state: State) -> None:
    """Remove the token from this machine.

    The service is not told: its documentation shows no way to revoke a token. A copy of the token works until it
    expires; a process that uses the login fails at its next refresh.

    \b
    Example:
      signing-async logout
    """
    store, origin = state.settings.store, state.settings.origin
    was_logged_in = store.path.exists()
    if was_logged_in:
        try:
            # Hold the lock: otherwise a refresh in another process may save the token again.
            async with asyncio.timeout(_LOCK_TIMEOUT), store.lock():
                await store.load()  # raises if the file holds anything but a token
                store.path.unlink(missing_ok=True)
        except TimeoutError:
            raise AuthError(f"the token file {store.path} is in use: try again", transient=True) from None
    facts = {"base_url": origin, "token_file": str(store.path), "removed": was_logged_in}
    text = (
        f"Token removed: {store.path}; a copy works until it expires" if was_logged_in else f"Not logged in at {origin}"
    )
    state.out.result(facts, text)
    if state.settings.access_token is not None:
        state.out.warn("SIGNING_ACCESS_TOKEN is still set")
