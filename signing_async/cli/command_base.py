"""What all commands share: common options, settings, the client, and types of options.

A command is a function or a coroutine function in a module of this folder, and is listed in `COMMANDS` of ``app.py`` or
belongs to a group::

    @command(changing=True)
    @click.argument("signing")
    async def send(state: State, signing: str) -> None:
        async with state.client() as client:
            await client.signings.send(signing)
        state.out.result({"id": signing, "sent": True}, f"Sent {signing}.")

A `SigningError` that it raises is printed and decides the exit code; a command that failed in part returns its exit
code. A coroutine must not read standard input: in an event loop, Ctrl-C does not interrupt the reading.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import logging
import math
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial, update_wrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from .._files import unusable
from ..errors import AuthError, ConfigurationError, InvalidRequest, OutcomeUnknown, WaitTimeout
from .exits import TERMINATED
from .output import Output

if TYPE_CHECKING:
    from ..client import SigningClient
    from ..models import Signing
    from ..settings import Settings
    from ..transport.operation import Attempt

T = TypeVar("T")


class State:
    """The values of the options that are not a command's own, and what commands derive from them."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments: tuple[str, ...] = tuple(arguments)
        self.config: str | None = None
        self.base_url: str | None = None
        self.timeout: str | None = None
        self.verbose = False
        self.json = False
        self.inbox: str | None = None
        self.table = "signing_events"
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
    async def client(self, on_attempt: Callable[[Attempt], None] | None = None) -> AsyncIterator[SigningClient]:
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
        log, handler = logging.getLogger("signing_async"), _LogHandler(self.out)

        def report(attempt: Attempt) -> None:
            if self.verbose:
                self.print_attempt(attempt)
            if on_attempt is not None:
                on_attempt(attempt)

        async with contextlib.AsyncExitStack() as exits:
            log.addHandler(handler)
            exits.callback(log.removeHandler, handler)
            if isinstance(auth, OAuth):
                await exits.enter_async_context(auth)
            client = SigningClient(settings.origin, auth, on_attempt=report, **settings.client_options())
            yield await exits.enter_async_context(client)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a command's coroutine like ``asyncio.run``, on uvloop if it is installed; SIGTERM cancels it too."""
        import asyncio

        async def until_terminated() -> T:
            task, terminated = asyncio.current_task(), asyncio.Event()
            assert task is not None
            cancel = task.cancel

            def stop() -> None:
                terminated.set()
                cancel()

            on_signal(signal.SIGTERM, stop)
            try:
                return await main
            except asyncio.CancelledError:
                if terminated.is_set():
                    raise click.exceptions.Exit(TERMINATED) from None
                raise

        factory: Callable[[], asyncio.AbstractEventLoop] | None = None
        with contextlib.suppress(ModuleNotFoundError):  # the extra `speed` is not installed
            from uvloop import new_event_loop

            factory = new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(until_terminated())

    def print_attempt(self, attempt: Attempt) -> None:
        import attrs

        status = "no response" if attempt.status is None else f"HTTP {attempt.status}"
        text = f"{attempt.operation}, attempt {attempt.attempt}: {status} in {attempt.seconds * 1000:.0f} ms"
        text += f" ({attempt.request_id})" if attempt.request_id else ""
        text += f" - {attempt.error}" if attempt.error else ""
        text += "" if attempt.delay is None else f"; retry in {attempt.delay:.1f} s"
        self.out.say(text, attempt={**attrs.asdict(attempt), "headers": dict(attempt.headers)})


_REPORTED = ("was not sent:", "whether package %s was sent:", "was abandoned:", "was not archived:")


class _LogHandler(logging.Handler):
    """Prints the package's warnings, except of items and unknown outcomes, which a command reports itself."""

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        is_unknown = any(isinstance(argument, OutcomeUnknown) for argument in record.args or ())
        if not is_unknown and not any(part in str(record.msg) for part in _REPORTED):
            self._out.warn(record.getMessage())


def on_signal(number: int, call: Callable[[], object]) -> None:
    """Call a function on each signal until the event loop is closed, if the event loop supports that."""
    import asyncio

    # Event loops on Windows, and outside the main thread, take no handlers: there the signal ends the process as usual.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        asyncio.get_running_loop().add_signal_handler(number, call)


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None, what: str, advice: str = "") -> AsyncIterator[None]:
    """Raise `WaitTimeout` if the block takes longer. Other timeouts pass through."""
    import asyncio

    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise WaitTimeout(f"{what} within {seconds:g} s{advice}") from None


def common_options() -> list[click.Parameter]:
    """Return the options that may stand before or after a command's name."""
    return [
        state_option("--config", metavar="FILE", help="Settings file.  [env: SIGNING_CONFIG]"),
        state_option("--base-url", metavar="URL", help="The tenant's origin.  [env: SIGNING_BASE_URL]"),
        state_option("--timeout", metavar="SECONDS", help="Limit of a call, with retries.  [env: SIGNING_TIMEOUT]"),
        state_option("-v", "--verbose", is_flag=True, help="Show every attempt of every call."),
        state_option("--json", is_flag=True, help="Print JSON, one object per line."),
    ]


def state_option(*names: str, **settings: Any) -> click.Option:
    """Return an option whose value, if it is given, becomes an attribute of the `State`."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            setattr(context.ensure_object(State), str(parameter.name), value)

    return click.Option(names, expose_value=False, callback=keep, **settings)


def command(
    name: str | None = None,
    group: click.Group | None = None,
    *,
    changing: bool = False,
    params: Iterable[click.Parameter] = (),
) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a (coroutine) function into a command with further ``params``; its first argument is the `State`.

    ``changing``: the command changes something at the service. If it is interrupted, the message says that a request
    may have taken effect.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        def called(*args: Any, **values: Any) -> Any:
            state = click.get_current_context().ensure_object(State)
            state.changing = changing
            work = function(state, *args, **values)
            return state.run(work) if inspect.iscoroutine(work) else work

        made = click.command(name)(update_wrapper(called, function))
        made.params += [*params, *common_options()]
        if group is not None:
            group.add_command(made)
        return made

    return decorate


# Types of options


class _Seconds(click.FloatRange):
    """A range of finite seconds."""

    name = "number of seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return seconds


Seconds: type[click.FloatRange] = _Seconds


_SPAN = re.compile(r"(\d{1,4})(min|h|d|w)")
_UNITS = {"min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _span(text: str) -> timedelta:
    span = _SPAN.fullmatch(text)
    if span is None:
        raise click.BadParameter(f"must be a duration such as 90min, 12h, 7d or 2w, got {text!r}")
    return timedelta(**{_UNITS[span[2]]: int(span[1])})


def moment(text: str) -> datetime:
    if _SPAN.fullmatch(text):
        return datetime.now(UTC) - _span(text)
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        hint = "a duration such as 90min, 12h, 7d or 2w, or a date such as 2031-03-31"
        raise click.BadParameter(f"must be {hint}, got {text!r}") from None


def _span_or_moment(text: str) -> timedelta | datetime:
    return _span(text) if _SPAN.fullmatch(text) else moment(text)


def _name_pattern(text: str) -> Callable[[Signing], bool]:
    """Return a function that tells whether a signing's name matches the pattern, ignoring case."""
    found = re.compile(fnmatch.translate(text), re.IGNORECASE)
    return lambda signing: found.match(signing.name) is not None


_NAME_HELP = "Only signings whose name matches, ignoring case: 'Lease *', '*2031*', ..."
_LIMIT_HELP = "Stop after this many.  [default: 50; with --all: no limit]"

MOMENT: str = "90min|12h|7d|2w|DATE"
span_option: Callable[..., Callable[[Any], Any]] = partial(click.option, type=_span, metavar="90min|12h|7d|2w")
moment_option: Callable[..., Callable[[Any], Any]] = partial(click.option, type=moment, metavar=MOMENT)
since_option: Callable[..., Callable[[Any], Any]] = partial(click.option, type=_span_or_moment, metavar=MOMENT)
"""Like `moment_option`, but a duration stays one: it ends now, however long the command runs."""
name_option: Callable[..., Callable[[Any], Any]] = partial(
    click.option, "--name", type=_name_pattern, metavar="PATTERN", help=_NAME_HELP
)
journal_option: Callable[..., Callable[[Any], Any]] = partial(
    click.option, "--journal", metavar="PATH|URL", help="A local file, or postgresql://..."
)
concurrency_option: Callable[..., Callable[[Any], Any]] = partial(
    click.option, "--concurrency", show_default=True, type=click.IntRange(1, 64)
)
limit_option: Callable[..., Callable[[Any], Any]] = partial(
    click.option, "--limit", type=click.IntRange(1), help=_LIMIT_HELP
)

FILE = click.File("rb")
"""The type of an option whose file a command reads; - is standard input."""


# Files


def read_text(file: IO[bytes]) -> str:
    """Return the text of an option's file; read it before an event loop runs."""
    try:
        with file:
            return file.read().decode()
    except UnicodeDecodeError:
        raise click.BadParameter(f"{file.name} is not UTF-8") from None


def refuse_password(option: str, text: str | None, advice: str) -> None:
    """Raise `InvalidRequest` if the argument is empty, perhaps from an unset variable, or a URL with a password."""
    from ..settings import holds_password

    if text == "":
        raise InvalidRequest(f"{option}: must not be empty")
    if text is not None and holds_password(text):
        raise InvalidRequest(f"{option}: every process on this machine can read a password in an argument; {advice}")


def make_folder(folder: Path, argument: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(f"{argument}: could not create the folder {str(folder)!r}: {error.strerror}", error) from None


def replace_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file; if that fails, the older one stays as it was."""
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as folder:
        part = Path(folder, path.name)
        with part.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # not every file system has permissions
            part.chmod(mode & 0o666)
        part.replace(path)
