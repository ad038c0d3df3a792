"""What all commands share: common options, settings, the client, and types of options.

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
decides the exit code. A command that failed in part returns its exit code: ``return code_of_all(errors, done=...)``.

A coroutine must not read standard input: in an event loop, Ctrl-C does not interrupt the reading.
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
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .._files import sync_folder, unusable
from ..errors import AuthError, ConfigurationError, InvalidRequest, OutcomeUnknown
from .exits import TERMINATED
from .output import Output

if TYPE_CHECKING:
    from ..auth.oauth import OAuth
    from ..client import SigningClient
    from ..models import Signing
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
    async def client(self, note_attempt: Callable[[Attempt], None] | None = None) -> AsyncIterator[SigningClient]:
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

            def report(attempt: Attempt) -> None:
                if self.verbose:
                    self._print_attempt(attempt)
                if note_attempt is not None:
                    note_attempt(attempt)

            client = SigningClient(settings.origin, auth, on_attempt=report, **settings.client_options())
            yield await exits.enter_async_context(client)

    def oauth(self, settings: Settings, redirect_uri: str | None = None) -> OAuth:
        """Return the `OAuth` of a login, which no client uses yet; ``redirect_uri`` overrides the setting."""
        oauth = settings.oauth(redirect_uri)
        if self.verbose:
            oauth.current.observer.on_attempt = self._print_attempt
        return oauth

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a command's coroutine like ``asyncio.run``, on uvloop if it is installed; SIGTERM cancels it too."""
        import asyncio

        factory: Callable[[], asyncio.AbstractEventLoop] | None = None
        with contextlib.suppress(ModuleNotFoundError):  # the extra `speed` is not installed
            from uvloop import new_event_loop

            factory = new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_until_terminated(main))

    def _print_attempt(self, attempt: Attempt) -> None:
        import attrs

        status = "no response" if attempt.status is None else f"HTTP {attempt.status}"
        text = f"{attempt.operation}, attempt {attempt.attempt}: {status} in {attempt.seconds * 1000:.0f} ms"
        text += f" ({attempt.request_id})" if attempt.request_id else ""
        text += f" - {attempt.error}" if attempt.error else ""
        text += "" if attempt.delay is None else f"; retry in {attempt.delay:.1f} s"
        self.out.say(text, attempt=attrs.asdict(attempt))


_REPORTED = ("was not sent:", "was abandoned:", "was not archived:")


class _WarningHandler(logging.Handler):
    """Prints the package's warnings, except of items and unknown outcomes, which a command reports itself."""

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        is_unknown = any(isinstance(argument, OutcomeUnknown) for argument in record.args or ())
        if not is_unknown and not any(part in str(record.msg) for part in _REPORTED):
            self._out.warn(record.getMessage())


async def _until_terminated(main: Coroutine[Any, Any, T]) -> T:
    import asyncio

    work, terminated = asyncio.current_task(), asyncio.Event()
    assert work is not None
    cancel = work.cancel

    def stop() -> None:
        terminated.set()
        cancel()

    with on_signal(signal.SIGTERM, stop):
        try:
            return await main
        except asyncio.CancelledError:
            if terminated.is_set():
                raise click.exceptions.Exit(TERMINATED) from None
            raise


@contextlib.contextmanager
def on_signal(number: int, call: Callable[[], object]) -> Iterator[None]:
    """Call a function on each signal within the block, if the event loop supports that."""
    import asyncio

    loop = asyncio.get_running_loop()
    unsupported = (NotImplementedError, RuntimeError, ValueError)  # on Windows, or outside the main thread
    with contextlib.suppress(*unsupported):
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        with contextlib.suppress(*unsupported):
            loop.remove_signal_handler(number)


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
        def called(*args: Any, **values: Any) -> Any:
            state = click.get_current_context().ensure_object(State)
            state.changing = changing
            work = function(state, *args, **values)
            return state.run(work) if inspect.iscoroutine(work) else work

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

_SPAN = re.compile(r"(\d{1,6})(min|h|d|w)")
_UNITS = {"min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(text: str) -> timedelta:
    span = _SPAN.fullmatch(text)
    if span is None:
        raise click.BadParameter(f"must be a duration such as 90min, 12h, 7d or 2w, got {text!r}")
    return timedelta(**{_UNITS[span[2]]: int(span[1])})


def moment(text: str) -> datetime:
    try:
        return datetime.now(UTC) - duration(text)
    except (click.BadParameter, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"must be a duration such as 90min, 12h, 7d or 2w, or a date such as 2031-03-31, got {text!r}"
        ) from None


def duration_or_moment(text: str) -> timedelta | datetime:
    return duration(text) if _SPAN.fullmatch(text) else moment(text)


def name_pattern(text: str) -> Callable[[Signing], bool]:
    """Return a function that tells whether a signing's name matches the pattern, ignoring case."""
    found = re.compile(fnmatch.translate(text), re.IGNORECASE)
    return lambda signing: found.match(signing.name) is not None


NAME_HELP = "Only signings whose name matches, ignoring case: 'Lease *', '*2031*', ..."

FILE = click.Path(dir_okay=False, allow_dash=True)
"""The type of an option whose file a command reads; the shell completes its paths."""

journal_option: Callable[[Any], Any] = click.option(
    "--journal", metavar="PATH|URL", help="A file on a local disk, or postgresql://..."
)


def read_bytes(path: str) -> bytes:
    """Read a file, the value of an option or argument; - is standard input."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"could not read {path}: {error.strerror}") from None


def text_file(path: str) -> str:
    """Read a UTF-8 file, the value of an option; - is standard input. Newlines are kept."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise click.BadParameter(f"could not read {path}: not UTF-8") from None


def read_text(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Replace an option's path by the text of the file, before an event loop runs."""
    return None if path is None else text_file(path)


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
    folder = path.absolute().parent
    descriptor, name = tempfile.mkstemp(".part", f".{path.name}.", folder)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(OSError):  # not every file system has modes
            part.chmod(mode & 0o666)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(folder)
