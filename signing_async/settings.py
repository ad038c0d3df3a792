"""Settings from the environment and from one TOML file, under the same names: ``SIGNING_BASE_URL`` is ``base_url``.

The environment overrides the file. ``SIGNING_CONFIG`` names the file; the default is ``config.toml`` in the user's
configuration folder (see `config_folder`), which need not exist. See `Settings` for the names.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
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

T = TypeVar("T")

_SECRETS = frozenset({"access_token", "client_secret", "inbox_key", "webhook_secret"})
_URLS = ("broker", "inbox", "journal", "proxy")
_PASSWORD = re.compile(r"://[^@]*:[^@]*@|[?&](?:ssl)?password=", re.IGNORECASE)
_CREDENTIALS = ("access_token", "client_id", "client_secret", "redirect_uri", "token_file")
_TIMEOUTS = {"timeout": "call", "transfer_timeout": "transfer", "connect_timeout": "connect"}
_RETRY = ("max_attempts", "base_delay", "max_delay", "max_retry_after", "settle")


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
    # URLs may contain a password.
    journal: Path | str | None = attrs.field(default=None, repr=False)
    inbox: Path | str | None = attrs.field(default=None, repr=False)
    inbox_key: str | None = attrs.field(default=None, repr=False)
    broker: str | None = attrs.field(default=None, repr=False)
    proxy: str | None = attrs.field(default=None, repr=False)
    timeouts: Timeouts = attrs.field(factory=Timeouts)
    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    assumptions: Assumptions = attrs.field(factory=Assumptions)
    telemetry: bool = True
    file: Path | None = None
    note: str = ""
    """Added to errors about missing settings."""

    @classmethod
    def load(cls, config: str | os.PathLike[str] | None = None, *, given: Mapping[str, str] | None = None) -> Self:
        """Read the settings. ``config`` overrides ``SIGNING_CONFIG``, and ``given`` overrides all other sources.

        Raise a `ConfigurationError` for an invalid setting. Its text names the source, and contains no secret.
        """
        path = _config_file(config)
        layers = (
            {} if path is None else _read_file(path),
            {
                # The value is in no local variable: tracebacks show them.
                name: _Given(name, _variable(name), os.environ[_variable(name)])
                for name in _CONVERTERS
                if os.environ.get(_variable(name))
            },
            {name: _Given(name, f"--{name.replace('_', '-')}", text) for name, text in (given or {}).items()},
        )
        chosen, note = _merge(layers)
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
        """Return the access token or the `OAuth`; raise a `ConfigurationError` that names a missing setting."""
        origin = self.origin
        if self.access_token is not None:
            return self.access_token
        if self.client_id is None:
            raise ConfigurationError(f"neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set{self.note}")
        oauth = self.oauth()
        if self.token_file is None and not _exists(self.store.path):
            raise ConfigurationError(f"SIGNING_TOKEN_FILE is not set, and there is no login at {origin}{self.note}")
        return oauth

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
    """One setting as given, and its source; relative paths start from ``folder``."""

    name: str
    source: str
    value: Any = attrs.field(repr=False)
    folder: Path = Path()

    def text(self) -> str:
        # Not `_checks.string`: a path may hold bytes that are not UTF-8.
        if not isinstance(self.value, str) or not self.value:
            is_secret = self.value != "" and self.name in (*_SECRETS, *_URLS)
            shown = type(self.value).__name__ if is_secret else repr(self.value)
            raise ConfigurationError(f"{self.source}: must be a non-empty string, got {shown}")
        return self.value

    def path(self) -> Path:
        return self.folder / expand_user(self.text())

    def path_or_url(self) -> Path | str:
        return self.text() if "://" in self.text() else self.path()

    def number_for(self, record: type[Timeouts | RetryPolicy], field: str) -> float:
        number = self.value
        with contextlib.suppress(ValueError):
            number = float(number) if isinstance(number, str) else number
        if not _checks.is_number(number):
            raise ConfigurationError(f"{self.source}: must be a number, got {self.value!r}")
        number = int(number) if number == int(number) else number
        self.checked(lambda: record(**{field: number}))
        return number

    def origin(self) -> str:
        text = self.text()
        return self.checked(lambda: urls.check_origin(text))

    def checked(self, check: Callable[[], T]) -> T:
        """Return the result; add the source to the text of a `ConfigurationError`."""
        try:
            return check()
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} ({self.source})") from None

    def assumptions(self) -> Assumptions:
        if isinstance(self.value, dict):
            return Assumptions.from_mapping(self.value, self.source)
        return Assumptions.from_file(self.path())


def config_folder() -> Path | None:
    """Return this package's folder in the user's configuration; None if the user has no home folder.

    ``$XDG_CONFIG_HOME/signing-async``, by default in ``~/.config``, on macOS in ``~/Library/Application Support``; on
    Windows ``%APPDATA%\\signing-async``.
    """
    configured = os.environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    default = {"win32": "~/AppData/Roaming", "darwin": "~/Library/Application Support"}.get(sys.platform, "~/.config")
    base = Path(configured if Path(configured).is_absolute() else expand_user(default))
    return base / "signing-async" if base.is_absolute() else None


def _default_token_file(origin: str) -> Path:
    # One file per tenant: a token is never sent to another tenant.
    folder = config_folder()
    if folder is None:
        raise ConfigurationError("SIGNING_TOKEN_FILE is not set, and there is no home folder for a token file")
    return folder / "tokens" / f"{urlsplit(origin).netloc.replace(':', '_')}.json"


def _variable(name: str) -> str:
    return f"SIGNING_{name.upper()}"


def _config_file(config: str | os.PathLike[str] | None) -> Path | None:
    named = (os.environ.get("SIGNING_CONFIG") or None) if config is None else config
    if named is not None:
        return Path.cwd() / expand_user(os.fspath(named))
    folder = config_folder()
    return folder / "config.toml" if folder is not None and _exists(folder / "config.toml") else None


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110  # pathlib's raises if a folder on the way is not accessible


def holds_password(url: str) -> bool:
    """Return whether the URL of a database or a broker seems to contain a password. A path never does."""
    return _PASSWORD.search(url) is not None and "://" in url


def _read_file(path: Path) -> dict[str, _Given]:
    def secrets_in(content: Mapping[str, Any]) -> list[str]:
        return [name for name in content if name in _SECRETS or (name in _URLS and holds_password(str(content[name])))]

    content = read_toml(path, secrets_in=secrets_in)
    for name in content:
        if name not in _CONVERTERS:
            raise ConfigurationError(f"{path}: unknown setting {name!r}{did_you_mean(name, _CONVERTERS)}")
    return {name: _Given(name, f"{name} in {path}", value, path.parent) for name, value in content.items()}


def _merge(layers: Sequence[dict[str, _Given]]) -> tuple[dict[str, _Given], str]:
    """Return the settings, each from its last layer, and a note for errors about missing ones.

    The credentials of a layer belong to the tenant that it names, or else the nearest layer below, or else above. If
    another tenant is chosen, they must not be sent there. If a layer has an app, an access token below it is unwanted.
    """
    tenants = [layer["base_url"] for layer in layers if "base_url" in layer]
    merged: dict[str, _Given] = {}
    note = ""
    for layer in layers:
        own = layer.get("base_url") or merged.get("base_url") or next(iter(tenants), None)
        if own is not None and own.origin() != tenants[-1].origin():
            dropped = [layer.pop(name).source for name in _CREDENTIALS if name in layer]
            note += f" (not used: {', '.join(dropped)}, which belong to {own.origin()})" if dropped else ""
        if "client_id" in layer:
            merged.pop("access_token", None)
        merged |= layer
    return merged, note


# The secrets last: they are in no variable when an error is raised.
_CONVERTERS: dict[str, Callable[[_Given], Any]] = {
    "base_url": _Given.origin,
    **{name: partial(_Given.number_for, record=Timeouts, field=field) for name, field in _TIMEOUTS.items()},
    **{name: partial(_Given.number_for, record=RetryPolicy, field=name) for name in _RETRY},
    **dict.fromkeys(("client_id", "redirect_uri"), _Given.text),
    "token_file": _Given.path,
    "assumptions": _Given.assumptions,
    "telemetry": lambda given: parse_switch(given.value, given.source),
    **dict.fromkeys(("journal", "inbox"), _Given.path_or_url),
    **dict.fromkeys(("broker", "proxy", "access_token", "client_secret", "inbox_key", "webhook_secret"), _Given.text),
}
