"""What all commands share: common options, settings, the client, and the exit code.

A command is a function in a module of this folder, and is listed in `COMMANDS` of ``app.py``::

    @command(changing=True)
    @click.argument("signing")
    def send(state: State, signing: str) -> None:
        '''Send a draft.

        \\b
        Example:
          signing-async send $SIGNING
        '''
        state.run(_send(state, signing))

    async def _send(state: State, signing: str) -> None:
        async with state.client() as client:
            await client.signings.send(signing)
        state.out.result({"id": signing, "sent": True}, f"Sent {signing}.")

`State.out` prints (see `Output`). A `SigningError` raised by the command is printed as a sentence or as JSON, and
decides the exit code. A command that failed in part calls ``state.end(code_of_all(errors, done=...))``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .. import _checks
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
        self.changing = False
        """Whether the command that runs changes something at the service."""
        self.on_attempt: Callable[[Attempt], None] | None = None
        """Called with each attempt of the client's calls."""

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
        async with contextlib.AsyncExitStack() as exits:
            exits.enter_context(self._print_warnings())
            _check_login(settings)
            try:
                auth = settings.auth()
            except ConfigurationError as error:
                raise ConfigurationError(f"{error}: run signing-async login first") from None
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

        parts = [f"{attempt.operation}, attempt {attempt.attempt}:"]
        parts.append("no response" if attempt.status is None else f"HTTP {attempt.status}")
        parts.append(f"in {attempt.seconds * 1000:.0f} ms")
        if attempt.request_id:
            parts.append(f"({attempt.request_id})")
        if attempt.error:
            parts.append(f"- {attempt.error}")
        if attempt.delay is not None:
            parts[-1] += f"; retry in {attempt.delay:.1f} s"
        self.out.say(" ".join(parts), attempt=attrs.asdict(attempt))

    @contextlib.contextmanager
    def _print_warnings(self) -> Iterator[None]:
        """Print the package's warnings while a client is open."""
        handler = _WarningHandler(self.out)
        log = logging.getLogger("signing_async")
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


def _check_login(settings: Settings) -> None:
    if settings.access_token is None and settings.client_id is not None and not settings.store.path.exists():
        raise AuthError(f"not logged in at {settings.origin}: run signing-async login")


class _WarningHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        # The command reports an unknown outcome as its error.
        if not any(isinstance(argument, OutcomeUnknown) for argument in record.args or ()):
            self._out.warn(record.getMessage())


def _set_on_state(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        setattr(context.ensure_object(State), str(parameter.name), value)


def common_options() -> list[click.Option]:
    """Return the options that may stand before or after a command's name."""
    return [
        click.Option(["--config"], metavar="FILE", help="Settings file.  [env: SIGNING_CONFIG]", **_STATE_OPTION),
        click.Option(
            ["--base-url"], metavar="URL", help="The tenant's origin.  [env: SIGNING_BASE_URL]", **_STATE_OPTION
        ),
        click.Option(
            ["--timeout"],
            metavar="SECONDS",
            help="Time limit of a call, with its retries.  [env: SIGNING_TIMEOUT]",
            **_STATE_OPTION,
        ),
        click.Option(["-v", "--verbose"], is_flag=True, help="Show every attempt of every call.", **_STATE_OPTION),
        click.Option(["--json"], is_flag=True, help="Print JSON, one object per line.", **_STATE_OPTION),
    ]


_STATE_OPTION: dict[str, Any] = {"expose_value": False, "callback": _set_on_state}


class _Command(click.Command):
    """A command with the common options, listed separately in its help."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._common = common_options()
        self.params = [*self.params, *self._common]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        common = {str(option.name) for option in self._common}
        # Newer versions of click also have help records for arguments.
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        own = [(option.name, option.get_help_record(ctx)) for option in options]
        for title, among in (("Options", False), ("Common options", True)):
            with formatter.section(title):
                formatter.write_dl([row for name, row in own if row is not None and (name in common) is among])


def command(name: str | None = None, *, changing: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """Turn a function into a command; its first argument is the `State`.

    ``changing``: the command changes something at the service. If it is interrupted, the message says that a request
    may have taken effect.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        def called(*args: Any, **values: Any) -> None:
            state = click.get_current_context().ensure_object(State)
            state.changing = changing
            function(state, *args, **values)

        return click.command(name, cls=_Command)(update_wrapper(called, function))

    return decorate


class _Seconds(click.FloatRange):
    """A range of seconds. Unlike `click.FloatRange`, it refuses "nan" and "inf"."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not _checks.is_number(seconds):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return seconds


Seconds: type[click.FloatRange] = _Seconds


def refuse_password(option: str, text: str | None, advice: str) -> None:
    """Raise `InvalidRequest` if the argument is a URL with a password."""
    from ..settings import holds_password

    if text is not None and holds_password(text):
        raise InvalidRequest(f"{option}: every process on this machine can read a password in an argument; {advice}")


def make_folder(folder: Path, argument: str) -> None:
    """Create the folder that an argument names, unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(f"{argument}: could not create the folder {str(folder)!r}: {error.strerror}", error) from None


def read_bytes(path: str, argument: str) -> bytes:
    """Read the file that an argument names; - is standard input."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"could not read {path}: {error.strerror}", param_hint=argument) from None


def read_text(path: str, option: str) -> str:
    """Read the text file that an option names; - is standard input. Newlines are kept."""
    try:
        return read_bytes(path, option).decode()
    except UnicodeDecodeError:
        raise click.BadParameter(f"could not read {path}: not UTF-8", param_hint=option) from None
