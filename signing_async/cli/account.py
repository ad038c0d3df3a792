"""`login`, `logout` and `me`: who is logged in, and how that comes about."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import webbrowser
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import click

from ..errors import AuthError, ConfigurationError, WaitTimeout
from .command import Seconds, State, command
from .output import on_one_line

if TYPE_CHECKING:
    from ..auth.oauth import AuthorizationRequest, OAuth
    from ..models import User
    from ..settings import Settings

_PATIENCE = 30.0
_ASKED = {
    "base_url": ("The tenant's address, such as https://tenant.example.com", False),
    "client_id": ("The app's client id (register one at {base_url}/developer/my-apps)", False),
    "client_secret": ("The app's client secret", True),
    "redirect_uri": ("The app's redirect URI, such as http://127.0.0.1:8000/callback", False),
}


@command()
def me(state: State) -> None:
    """Show who is logged in: a cheap way to check that all is set up.

    \b
    Example:
      signing-async me
    """
    state.run(_me(state))


async def _me(state: State) -> None:
    async with state.client() as client:
        user = await client.me()
    facts = {**user.extra, "base_url": state.settings.origin, "id": user.id, "name": user.name, "email": user.email}
    state.out.result(facts, f"{_named(user)} at {state.settings.origin}")


def _named(user: User) -> str:
    named = " ".join(part for part in (user.name, user.email and f"<{user.email}>") if part)
    return on_one_line(named or user.id or "somebody")


@command()
@click.option("--no-browser", is_flag=True, help="Take the callback's address from the terminal.")
@click.option(
    "--wait", default=300.0, show_default=True, type=Seconds(0, min_open=True), help="How long the browser has."
)
def login(state: State, no_browser: bool, wait: float) -> None:
    """Log in with the browser, and keep the token in a file that only you may read.

    The app is registered at the tenant's /developer/my-apps, with a redirect URI such as
    http://127.0.0.1:8000/callback: the browser is sent back there, and this command listens there meanwhile. With
    --no-browser, or a redirect URI that is not on this machine, you give it the address that the browser ended at, or
    the code in it, on the terminal or as a line of standard input.

    What is not set is asked for on a terminal; the client secret without showing it. Where there is no settings file
    yet, the answers are kept in one.

    \b
    Example:
      signing-async login
    """
    from .callback import is_loopback

    settings, answers = _complete(state)
    oauth = settings.oauth()
    # A file that is no token is not written over, and that is said before anybody goes to a browser.
    state.run(settings.store.load())
    if no_browser or not is_loopback(oauth.redirect_uri):
        # Asked before there is an event loop, which Ctrl-C could not get past.
        request = oauth.authorization_request(pkce=settings.assumptions.pkce)
        state.out.say(f"Go to this address with a browser, and agree:\n  {request.url}", url=request.url)
        state.run(_by_hand(state, settings, oauth, _answer(), request))
    else:
        state.run(_by_browser(state, settings, oauth, wait))
    if answers:
        _keep(state, settings, answers)


def _complete(state: State) -> tuple[Settings, dict[str, Any]]:
    """The settings, with what had to be asked for."""
    settings = state.settings
    missing = [name for name in _ASKED if getattr(settings, name) is None]
    if not missing:
        return settings, {}
    if not sys.stdin.isatty() or state.json:
        names = ", ".join(f"SIGNING_{name.upper()}" for name in missing)
        raise ConfigurationError(f"to log in without a terminal to ask at, set {names}{settings.note}")
    answers: dict[str, Any] = {}
    for name in missing:
        words, hidden = _ASKED[name]
        words = words.format(base_url=answers.get("base_url", settings.base_url))
        answers[name] = click.prompt(words, hide_input=hidden, err=True, value_proc=partial(_checked, name))
    return attrs.evolve(settings, **answers), answers


def _checked(name: str, answer: str) -> str:
    """An answer that may work; any other is asked for again, before all the rest is."""
    from ..transport import wire
    from .callback import is_loopback

    answer = answer.strip()
    if not answer:
        raise click.UsageError("that is nothing")
    try:
        if name == "base_url":
            return wire.check_origin(answer)
        if name == "redirect_uri":
            is_loopback(answer)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    return answer


def _keep(state: State, settings: Settings, answers: dict[str, Any]) -> None:
    """Keep what was asked for in a settings file, where there is none yet."""
    from ..settings import config_folder

    folder = config_folder()
    path = None if folder is None else folder / "config.toml"
    lines = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in answers.items())
    if settings.file is not None or path is None:
        names = ", ".join(answers)
        state.out.warn(f"{names} will be asked for again: put them into {settings.file or 'the environment'}")
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(lines, "utf-8")
    state.out.say(f"The settings were kept in {path}.")


def _answer() -> str:
    """What the user gives for the callback."""
    if sys.stdin.isatty():
        words = "The address that the browser ended at (or the code in it)"
        return str(click.prompt(words, err=True))
    return sys.stdin.readline().strip()


async def _by_hand(state: State, settings: Settings, oauth: OAuth, answer: str, request: AuthorizationRequest) -> None:
    async with oauth:
        await oauth.exchange(answer, request.state, request.code_verifier)
        await _tell(state, settings, oauth)


async def _by_browser(state: State, settings: Settings, oauth: OAuth, wait: float) -> None:
    from .callback import listening

    async with listening(oauth.redirect_uri) as callback:
        if callback.redirect_uri != oauth.redirect_uri:
            oauth = settings.oauth(callback.redirect_uri)
        async with oauth:
            request = oauth.authorization_request(pkce=settings.assumptions.pkce)

            async def finish(query: str) -> str:
                await oauth.exchange(query, request.state, request.code_verifier)
                return f"The token for {settings.origin} is kept on your machine."

            state.out.say(f"Your browser opens. Should it not, go to:\n  {request.url}", url=request.url)
            # A thread that nobody waits for: some browsers return only when they are closed.
            threading.Thread(target=webbrowser.open, args=(request.url,), daemon=True).start()
            try:
                async with asyncio.timeout(wait):
                    await callback.wait(finish)
            except TimeoutError:
                raise WaitTimeout(f"the browser did not come back within {wait:g} s") from None
            await _tell(state, settings, oauth)


async def _tell(state: State, settings: Settings, oauth: OAuth) -> None:
    """Who is logged in now; asking for it also shows that the token works."""
    from ..client import SigningClient

    async with SigningClient(settings.origin, oauth, timeout=settings.timeouts) as client:
        user = await client.me()
    path = str(settings.store.path)
    facts = {"base_url": oauth.origin, "name": user.name, "email": user.email, "token_file": path}
    state.out.result(facts, f"Logged in at {oauth.origin} as {_named(user)}; the token is in {path}")
    if settings.access_token is not None:
        state.out.warn("an access token is set as well (SIGNING_ACCESS_TOKEN): it is used instead of the login")


@command()
def logout(state: State) -> None:
    """Remove the token from this machine.

    The service is not told: its documentation shows no way to revoke a token. A copy of it works until it expires, and
    a process that uses the login ends with an error at its next refresh.

    \b
    Example:
      signing-async logout
    """
    state.run(_logout(state))


async def _logout(state: State) -> None:
    store, origin = state.settings.store, state.settings.origin
    there = store.path.exists()
    if there:
        try:
            # A refresh that is under way in another process would bring it back.
            async with asyncio.timeout(_PATIENCE), store.lock():
                await store.load()  # an error where it is no token
                store.path.unlink(missing_ok=True)
        except TimeoutError:
            raise AuthError(f"the token file {store.path} is in use; try again") from None
    facts = {"base_url": origin, "token_file": str(store.path), "removed": there}
    state.out.result(facts, f"The token was removed: {store.path}" if there else f"Nobody was logged in at {origin}")
    if there:
        state.out.say("The service was not told: a copy of the token, should there be one, works until it expires.")
    if state.settings.access_token is not None:
        state.out.warn("an access token is still set (SIGNING_ACCESS_TOKEN)")
