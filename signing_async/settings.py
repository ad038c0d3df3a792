"""Settings from the environment and from one TOML file, under the same names: ``SIGNING_BASE_URL`` is ``base_url``.

The environment overrides the file. ``SIGNING_CONFIG`` names the file; the default is ``config.toml`` in the user's
configuration folder (see `config_folder`), which need not exist. See `Settings` for the names.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import attrs

from . import _checks
from ._files import expand_user
from ._toml import did_you_mean, read_toml
from .assumptions import Assumptions
from .auth.oauth import OAuth
from .auth.token_stores import FileTokenStore
from .errors import ConfigurationError
from .telemetry import parse as parse_switch
from .transport import urls
from .transport.operation import Timeouts
from .transport.retry import RetryPolicy

__all__ = ["Settings", "config_folder", "holds_password"]

_SECRETS = frozenset({"access_token", "client_secret", "inbox_key", "webhook_secret"})
_URLS = ("broker", "inbox", "journal", "proxy")
_PASSWORD = re.compile(r"://[^@]*:[^@]*@|[?&](?:ssl)?password=", re.IGNORECASE)
_CREDENTIALS = ("access_token", "client_id", "client_secret", "redirect_uri", "token_file")
_TIMEOUTS = {"timeout": "call", "transfer_timeout": "transfer", "connect_timeout": "connect"}
_RETRY = ("max_attempts", "base_delay", "max_delay", "max_retry_after", "settle")


def _hide_url(place: Path | str | None) -> str:
    return "'...'" if isinstance(place, str) else repr(place)


@attrs.frozen(kw_only=True)
class Settings:
    """All settings; None if a setting is missing. ::

    settings = Settings.load()
    client = SigningClient(settings.origin, settings.auth(), timeout=settings.timeouts)
    """

    base_url: str | None = None
    access_token: str | None = attrs.field(default=None, repr=False)
    client_id: str | None = None
    client_secret: str | None = attrs.field(default=None, repr=False)
    redirect_uri: str | None = None
    token_file: Path | None = None
    webhook_secret: str | None = attrs.field(default=None, repr=False)
    journal: Path | str | None = attrs.field(default=None, repr=_hide_url)
    """A file, or a database URL, which may contain a password."""
    inbox: Path | str | None = attrs.field(default=None, repr=_hide_url)
    """A file, or a database URL, which may contain a password."""
    inbox_key: str | None = attrs.field(default=None, repr=False)
    """The key that decrypts the inbox."""
    broker: str | None = attrs.field(default=None, repr=False)
    """A broker URL, which may contain a password."""
    proxy: str | None = attrs.field(default=None, repr=False)
    """The URL of an HTTP proxy, which may contain a password; by default the environment's proxies are used."""
    timeouts: Timeouts = attrs.field(factory=Timeouts)
    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    assumptions: Assumptions = attrs.field(factory=Assumptions)
    telemetry: bool = True
    """Whether OpenTelemetry spans and metrics are made, if the process uses OpenTelemetry."""
    file: Path | None = None
    """The settings file, if there is one."""
    note: str = ""
    """Added to errors about missing settings."""

    @classmethod
    def load(cls, config: str | os.PathLike[str] | None = None, *, given: Mapping[str, str] | None = None) -> Self:
        """Read the settings. ``config`` overrides ``SIGNING_CONFIG``, and ``given`` overrides all other sources.

        Raise a `ConfigurationError` for an invalid setting. Its text names the source, and contains no secret.
        """
        path = _config_file(config)
        layers = [
            {name: _Given(name, text, f"--{name.replace('_', '-')}") for name, text in (given or {}).items()},
            {
                name: _Given(name, os.environ[_variable(name)], _variable(name))
                for name in _CONVERTERS
                if os.environ.get(_variable(name))
            },
            {} if path is None else _read_file(path),
        ]
        note = _drop_foreign_credentials(layers, path)
        chosen = {name: value for layer in reversed(layers) for name, value in layer.items()}
        values = {name: convert(chosen[name]) for name, convert in _CONVERTERS.items() if name in chosen}
        # A plain timeout also limits transfers, as the client's argument does.
        timeouts = {"transfer": values["timeout"]} if "timeout" in values else {}
        timeouts |= {field: values.pop(name) for name, field in _TIMEOUTS.items() if name in values}
        retry = {name: values.pop(name) for name in _RETRY if name in values}
        return cls(**values, timeouts=Timeouts(**timeouts), retry=RetryPolicy(**retry), file=path, note=note)

    @property
    def origin(self) -> str:
        """The tenant's origin. Raises a `ConfigurationError` if it is not set."""
        return self._required("base_url")

    @property
    def store(self) -> FileTokenStore:
        """The tenant's token store: ``token_file``, by default a file per tenant in the configuration folder."""
        return FileTokenStore(self.token_file or _default_token_file(self.origin))

    def auth(self) -> str | OAuth:
        """Return what `SigningClient` takes as ``auth``; raise a `ConfigurationError` that names a missing setting."""
        origin = self.origin
        if self.access_token is not None:
            return self.access_token
        if self.client_id is None:
            raise ConfigurationError(f"neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set{self.note}")
        for name in ("client_secret", "redirect_uri"):
            self._required(name)
        if self.token_file is None and not _exists(_default_token_file(origin)):
            raise ConfigurationError(f"SIGNING_TOKEN_FILE is not set, and there is no login at {origin}{self.note}")
        return self.oauth()

    def client_options(self) -> dict[str, Any]:
        """Return the other arguments of `SigningClient`."""
        return {
            "proxy": self.proxy,
            "retry": self.retry,
            "timeout": self.timeouts,
            "assumptions": self.assumptions,
            "telemetry": self.telemetry,
        }

    def oauth(self, redirect_uri: str | None = None) -> OAuth:
        """Return an `OAuth` for the registered app; ``redirect_uri`` overrides the setting."""
        return OAuth(
            self.origin,
            client_id=self._required("client_id"),
            client_secret=self._required("client_secret"),
            redirect_uri=redirect_uri or self._required("redirect_uri"),
            store=self.store,
            proxy=self.proxy,
            retry=self.retry,
            assumptions=self.assumptions,
        )

    def _required(self, name: str) -> str:
        value: str | None = getattr(self, name)
        if value is None:
            raise ConfigurationError(f"{_variable(name)} is not set{self.note}")
        return value


@attrs.frozen
class _Given:
    """One setting as given, and its source; relative paths start from the folder of ``file``."""

    name: str
    value: Any = attrs.field(repr=False)
    source: str
    file: Path | None = None

    def text(self) -> str:
        # Not `_checks.string`: a path may hold bytes that are not UTF-8.
        if not isinstance(self.value, str) or not self.value:
            raise ConfigurationError(f"{self.source}: must be a non-empty string, got {self._format_value()}")
        return self.value

    def path(self) -> Path:
        path = expand_user(self.text())
        return Path(path) if self.file is None else self.file.parent / path

    def number(self) -> float:
        number = self.value
        # Only values in the file have a type.
        if isinstance(number, str) and self.file is None:
            with contextlib.suppress(ValueError):
                number = float(number)
        if not _checks.is_number(number):
            raise ConfigurationError(f"{self.source}: must be a number, got {self._format_value()}")
        return int(number) if float(number).is_integer() else float(number)

    def field_of(self, record: type[Timeouts | RetryPolicy], field: str) -> float:
        number = self.number()
        options: Any = {field: number}
        with self._named():
            record(**options)
        return number

    def origin(self) -> str:
        text = self.text()
        with self._named():
            return urls.check_origin(text)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the source to the text of a `ConfigurationError` of the block."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} ({self.source})") from None

    def assumptions(self) -> Assumptions:
        if isinstance(self.value, dict):
            return Assumptions.from_mapping(self.value, self.source)
        return Assumptions.from_file(self.path())

    def path_or_url(self) -> Path | str:
        return self.text() if "://" in self.text() else self.path()

    def _format_value(self) -> str:
        # Even an invalid secret is not shown.
        return type(self.value).__name__ if self.name in _SECRETS else repr(self.value)


def config_folder() -> Path | None:
    """Return this package's folder in the user's configuration; None if the user has no home folder.

    ``$XDG_CONFIG_HOME/signing-async``, by default in ``~/.config``, on macOS in ``~/Library/Application Support``; on
    Windows ``%APPDATA%\\signing-async``.
    """
    home = Path("~").expanduser
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("APPDATA") or home() / "AppData/Roaming")
        elif Path(os.environ.get("XDG_CONFIG_HOME", "")).is_absolute():
            base = Path(os.environ["XDG_CONFIG_HOME"])
        elif sys.platform == "darwin":
            base = home() / "Library/Application Support"
        else:
            base = home() / ".config"
    except RuntimeError:
        return None
    return base / "signing-async"


def _default_token_file(origin: str) -> Path:
    # One file per tenant: a token is never sent to another tenant.
    folder = config_folder()
    if folder is None:
        raise ConfigurationError("SIGNING_TOKEN_FILE is not set, and there is no home folder for a token file")
    parts = urlsplit(urls.check_origin(origin))
    return folder / "tokens" / f"{parts.netloc.replace(':', '_')}.json"


def _variable(name: str) -> str:
    return f"SIGNING_{name.upper()}"


def _config_file(config: str | os.PathLike[str] | None) -> Path | None:
    named = (os.environ.get("SIGNING_CONFIG") or None) if config is None else config
    if named is not None:
        return Path.cwd() / expand_user(os.fspath(named))
    folder = config_folder()
    default = None if folder is None else folder / "config.toml"
    return default if default is not None and _exists(default) else None


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110  # pathlib's raises if a folder on the way is not accessible


def _secrets_in(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the secrets in the file, including URLs with a password."""
    return [name for name in content if name in _SECRETS or (name in _URLS and holds_password(str(content[name])))]


def holds_password(url: str) -> bool:
    """Return whether the URL of a database or a broker seems to contain a password. A path never does."""
    return _PASSWORD.search(url) is not None and "://" in url


def _read_file(path: Path) -> dict[str, _Given]:
    given = {
        name: _Given(name, value, f"{name} in {path}", path)
        for name, value in read_toml(path, secrets_in=_secrets_in).items()
    }
    for name in given:
        if name not in _CONVERTERS:
            raise ConfigurationError(f"{path}: unknown setting {name!r}{did_you_mean(name, _CONVERTERS)}")
    return given


def _drop_foreign_credentials(layers: list[dict[str, _Given]], path: Path | None) -> str:
    """Drop the credentials of other tenants; return a note for errors about missing ones.

    The credentials of a layer belong to the tenant that the layer names; if it names none, to that of the next layer
    below, or else above. If another tenant is selected, by ``--base-url`` for example, they must not be sent to it. A
    client id in a layer above the file means that the file's access token is not wanted.
    """
    *above, file = layers
    chosen = _base_url(layers)
    notes = []
    for index, (layer, where) in enumerate(zip(layers, ("the arguments", "the environment", path), strict=True)):
        own = _base_url((*layers[index:], *reversed(layers[:index])))
        if chosen is not None and own is not None and own.origin() != chosen.origin():
            dropped = [given for name in _CREDENTIALS if (given := layer.pop(name, None)) is not None]
            names = ", ".join(given.name if given.file else given.source for given in dropped)
            notes += [f"not used: {names} in {where}, which belong to {own.value}"] if dropped else []
    if any("client_id" in layer for layer in above):
        file.pop("access_token", None)
    return f" ({'; '.join(notes)})" if notes else ""


def _base_url(layers: Iterable[dict[str, _Given]]) -> _Given | None:
    return next((layer["base_url"] for layer in layers if "base_url" in layer), None)


# The secrets last: they are in no variable when an error is raised.
_CONVERTERS: dict[str, Callable[[_Given], Any]] = {
    "base_url": _Given.origin,
    **{name: partial(_Given.field_of, record=Timeouts, field=field) for name, field in _TIMEOUTS.items()},
    **{name: partial(_Given.field_of, record=RetryPolicy, field=name) for name in _RETRY},
    **dict.fromkeys(("client_id", "redirect_uri"), _Given.text),
    "token_file": _Given.path,
    "assumptions": _Given.assumptions,
    "telemetry": lambda given: parse_switch(given.value, given.source),
    **dict.fromkeys(("journal", "inbox"), _Given.path_or_url),
    **dict.fromkeys(("broker", "proxy", "access_token", "client_secret", "inbox_key", "webhook_secret"), _Given.text),
}
