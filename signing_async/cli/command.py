"""What commands share: the options that each of them has, the settings these lead to, the client, and what is read.

A command is written like this::

    @command()
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

`State.out` prints (see `Output`); a `SigningError` that comes out of the command is told in a sentence, or as JSON, and
becomes its exit code. A command whose work failed in part ends with ``state.end(code_of_all(errors, done=...))``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import AuthError, ConfigurationError
from .output import Output

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..settings import Settings
    from ..transport.call import Attempt

__all__ = ["Seconds", "State", "command", "common_options", "read_text"]

T = TypeVar("T")


class State:
    """What the common options of a command say, and what is made of them."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments: tuple[str, ...] = tuple(arguments)
        self.config: str | None = None
        self.base_url: str | None = None
        self.timeout: str | None = None
        self.verbose = False
        self.json = False

    @cached_property
    def out(self) -> Output:
        return Output(json=self.json)

    @cached_property
    def settings(self) -> Settings:
        """From the options, the environment and the configuration file, in this order."""
        from ..settings import Settings

        given = {"base_url": self.base_url, "timeout": self.timeout}
        return Settings.load(self.config, given={name: text for name, text in given.items() if text is not None})

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[SigningClient]:
        """A client of the settings, closed at the end, an `OAuth` with it."""
        from ..auth.oauth import OAuth
        from ..client import SigningClient

        settings = self.settings
        async with contextlib.AsyncExitStack() as exits:
            exits.enter_context(self._warnings())
            _check_login(settings)
            try:
                auth = settings.auth()
            except ConfigurationError as error:
                raise ConfigurationError(f"{error}; signing-async login asks for it") from None
            if isinstance(auth, OAuth):
                await exits.enter_async_context(auth)
            yield await exits.enter_async_context(
                SigningClient(
                    settings.origin,
                    auth,
                    retry=settings.retry,
                    timeout=settings.timeouts,
                    assumptions=settings.assumptions,
                    on_attempt=self._tell if self.verbose else None,
                )
            )

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a command's coroutine to its end, or until Ctrl-C."""
        from .running import run

        return run(main)

    def end(self, code: int) -> None:
        """End the command with this exit code; 0 goes on."""
        if code:
            raise click.exceptions.Exit(code)

    def _tell(self, attempt: Attempt) -> None:
        import attrs

        words = [f"{attempt.operation}, attempt {attempt.attempt}:"]
        words.append("no answer" if attempt.status is None else f"HTTP {attempt.status}")
        words.append(f"in {attempt.seconds * 1000:.0f} ms")
        if attempt.request_id:
            words.append(f"({attempt.request_id})")
        if attempt.error:
            words.append(f"- {attempt.error}")
        if attempt.delay is not None:
            words[-1] += f"; again in {attempt.delay:.1f} s"
        self.out.say(" ".join(words), attempt=attrs.asdict(attempt))

    @contextlib.contextmanager
    def _warnings(self) -> Iterator[None]:
        """While a client is open, the package's warnings are the command's."""
        handler = _Warnings(self.out)
        log = logging.getLogger("signing_async")
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


def _check_login(settings: Settings) -> None:
    if settings.access_token is None and settings.client_id is not None and not settings.store.path.exists():
        raise AuthError(f"nobody has logged in at {settings.origin}: run signing-async login")


class _Warnings(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        self._out.warn(record.getMessage())


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        setattr(context.ensure_object(State), str(parameter.name), value)


def common_options() -> list[click.Option]:
    """The options that may stand before a command's name as well as after it."""
    return [
        click.Option(["--config"], metavar="FILE", help="Settings file.  [env: SIGNING_CONFIG]", **_KEPT),
        click.Option(["--base-url"], metavar="URL", help="The tenant's origin.  [env: SIGNING_BASE_URL]", **_KEPT),
        click.Option(
            ["--timeout"],
            metavar="SECONDS",
            help="For a call and its repeats.  [env: SIGNING_TIMEOUT]",
            **_KEPT,
        ),
        click.Option(["-v", "--verbose"], is_flag=True, help="Show every attempt of every call.", **_KEPT),
        click.Option(["--json"], is_flag=True, help="Print JSON, one object a line.", **_KEPT),
    ]


_KEPT: dict[str, Any] = {"expose_value": False, "callback": _keep}


class _Command(click.Command):
    """A command with the common options, which its help lists apart."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._common = common_options()
        self.params = [*self.params, *self._common]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        common = {str(option.name) for option in self._common}
        # Newer versions of click have rows for arguments as well.
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        own = [(option.name, option.get_help_record(ctx)) for option in options]
        for title, among in (("Options", False), ("Common options", True)):
            with formatter.section(title):
                formatter.write_dl([row for name, row in own if row is not None and (name in common) is among])


def command(name: str | None = None) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function, which is given the `State` first."""

    def decorate(function: Callable[..., None]) -> click.Command:
        def called(*args: Any, **values: Any) -> None:
            function(click.get_current_context().ensure_object(State), *args, **values)

        return click.command(name, cls=_Command)(update_wrapper(called, function))

    return decorate


class Seconds(click.FloatRange):
    """A range of seconds; click's own lets through "nan", which is in none."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return seconds


def read_text(path: str, option: str) -> str:
    """The text of a file that an option names, - for standard input, with its line ends."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.BadParameter(f"{path} cannot be read: {reason}", param_hint=option) from None
