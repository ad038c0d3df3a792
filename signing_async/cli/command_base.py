"""What all commands share: common options, settings, the client, and the exit code.

A command is a function or a coroutine function in a module of this folder, and is listed in `COMMANDS` of ``app.py``::

    @command(changing=True)
    @click.argument("signing")
    async def send(state: State, signing: str) -> None:
        '''Send a draft.

        \b
        Example:
          signing-async send $SIGNING
        '''
        async with state.client() as client:
            await client.signings.send(signing)
        state.out.result({"id": signing, "sent": True}, f"Sent {signing}.")

`State.out` prints (see `Output`). A `SigningError` raised by the command is printed as a sentence or as JSON, and
decides the exit code. A command that failed in part calls ``state.end(code_of_all(errors, done=...))``.

A coroutine must not read standard input: in an event loop, Ctrl-C does not interrupt the reading.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .._files import unusable
from ..errors import AuthError, ConfigurationError, InvalidRequest, OutcomeUnknown
from .output import Output

if TYPE_CHECKING:
    from ..auth.oauth import OAuth
    from ..client import SigningClient
    from ..settings import Settings
    from ..transport.operation import Attempt

T = TypeVar("T")


class State:
    """The values of the common options, and what commands derive from them."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments: tuple[str, ...] = tuple(arguments)
        self.config: str | None = None
        self.base_url: str | None = None
        self.timeout: str | None = None
        self.verbose = False
        self.json = False
        self.on_attempt: Callable[[Attempt], None] | None = None
        """Called after each attempt of a client, besides what --verbose prints."""
        self.changing = False
        """Whether the command that runs changes something at the service."""

    @cached_property
    def out(self) -> Output:
        return Output(json=self.json)

    @cached_property
    def settings(self) -> Settings:
        """The settings from options, environment and settings file, in this order of precedence."""
        from ..settings import Settings

        given = {"base_url": self.base_url, "timeout": self.timeout}
        return Settings.load(self.config, given={name: text for name, text in given.items() if text is not None})

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[SigningClient]:
        """Open a client with these settings, and close it and its `OAuth` afterwards."""
        from ..auth.oauth import OAuth
        from ..client import SigningClient

        settings = self.settings
        if settings.access_token is None and settings.client_id is not None and not settings.store.path.exists():
            raise AuthError(f"not logged in at {settings.origin}: run signing-async login")
        try:
            auth = settings.auth()
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}: run signing-async login first") from None
        async with contextlib.AsyncExitStack() as exits:
            log, handler = logging.getLogger("signing_async"), _WarningHandler(self.out)
            log.addHandler(handler)
            exits.callback(log.removeHandler, handler)
            if isinstance(auth, OAuth):
                await exits.enter_async_context(auth)
            on_attempt = self._report_attempt if self.verbose or self.on_attempt else None
            client = SigningClient(settings.origin, auth, on_attempt=on_attempt, **settings.client_options())
            yield await exits.enter_async_context(client)

    def oauth(self, settings: Settings, redirect_uri: str | None = None) -> OAuth:
        """Return the `OAuth` of a login, which no client uses yet; ``redirect_uri`` overrides the setting."""
        oauth = settings.oauth(redirect_uri)
        if self.verbose:
            oauth.current.observer.on_attempt = self._print_attempt
        return oauth

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a command's coroutine until it ends or is interrupted."""
        try:
            from .running import run

            return run(main)
        finally:
            main.close()  # Ctrl-C may come before it starts

    def end(self, code: int) -> None:
        """Exit with this code; return if it is 0."""
        if code:
            raise click.exceptions.Exit(code)

    def _report_attempt(self, attempt: Attempt) -> None:
        if self.verbose:
            self._print_attempt(attempt)
        if self.on_attempt is not None:
            self.on_attempt(attempt)

    def _print_attempt(self, attempt: Attempt) -> None:
        import attrs

        status = "no response" if attempt.status is None else f"HTTP {attempt.status}"
        text = f"{attempt.operation}, attempt {attempt.attempt}: {status} in {attempt.seconds * 1000:.0f} ms"
        text += f" ({attempt.request_id})" if attempt.request_id else ""
        text += f" - {attempt.error}" if attempt.error else ""
        text += "" if attempt.delay is None else f"; retry in {attempt.delay:.1f} s"
        self.out.say(text, attempt=attrs.asdict(attempt))


class _WarningHandler(logging.Handler):
    """Prints the package's warnings, except of unknown outcomes, which a command reports itself."""

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if not any(isinstance(argument, OutcomeUnknown) for argument in record.args or ()):
            self._out.warn(record.getMessage())


def common_options() -> list[click.Option]:
    """Return the options that may stand before or after a command's name."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_set_on_state, **settings)

    return [
        option("--config", metavar="FILE", help="Settings file.  [env: SIGNING_CONFIG]"),
        option("--base-url", metavar="URL", help="The tenant's origin.  [env: SIGNING_BASE_URL]"),
        option("--timeout", metavar="SECONDS", help="Time limit of a call, with its retries.  [env: SIGNING_TIMEOUT]"),
        option("-v", "--verbose", is_flag=True, help="Show every attempt of every call."),
        option("--json", is_flag=True, help="Print JSON, one object per line."),
    ]


def _set_on_state(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        setattr(context.ensure_object(State), str(parameter.name), value)


class _Command(click.Command):
    """A command with the common options, listed separately in its help."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params = [*self.params, *common_options()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Newer versions of click also have help records for arguments.
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for title, is_common in (("Options", False), ("Common options", True)):
            among = [one for one in options if (one.callback is _set_on_state) is is_common]
            with formatter.section(title):
                formatter.write_dl([record for one in among if (record := one.get_help_record(ctx))])


def command(name: str | None = None, *, changing: bool = False) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function or a coroutine function into a command; its first argument is the `State`.

    ``changing``: the command changes something at the service. If it is interrupted, the message says that a request
    may have taken effect.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        def called(*args: Any, **values: Any) -> None:
            state = click.get_current_context().ensure_object(State)
            state.changing = changing
            work = function(state, *args, **values)
            if inspect.iscoroutine(work):
                state.run(work)

        return click.command(name, cls=_Command)(update_wrapper(called, function))

    return decorate


def shared_options(*options: Callable[[Any], Any]) -> Callable[[T], T]:
    """Return a decorator that adds these click options and arguments in the given order."""

    def decorate(function: T) -> T:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class _Seconds(click.FloatRange):
    """A range of seconds. Unlike `click.FloatRange`, it refuses "nan" and "inf"."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return seconds


Seconds: type[click.FloatRange] = _Seconds

FILE = click.Path(dir_okay=False, allow_dash=True)
"""The type of an option whose file a command reads; the shell completes its paths."""


def read_bytes(path: str, option: str | None = None) -> bytes:
    """Read a file, the value of an option or argument; - is standard input."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"could not read {path}: {error.strerror}", param_hint=option) from None


def text_file(path: str, option: str | None = None) -> str:
    """Read a UTF-8 file, the value of an option; - is standard input. Newlines are kept."""
    try:
        return read_bytes(path, option).decode()
    except UnicodeDecodeError:
        raise click.BadParameter(f"could not read {path}: not UTF-8", param_hint=option) from None


def refuse_password(option: str, text: str | None, advice: str) -> None:
    """Raise `InvalidRequest` if the argument is empty, perhaps from an unset variable, or a URL with a password."""
    from ..settings import holds_password

    if text == "":
        raise InvalidRequest(f"{option}: must not be empty")
    if text is not None and holds_password(text):
        raise InvalidRequest(f"{option}: every process on this machine can read a password in an argument; {advice}")


def make_folder(folder: Path, argument: str) -> None:
    """Create the folder that an argument names, unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(f"{argument}: could not create the folder {str(folder)!r}: {error.strerror}", error) from None
