"""Settings from the environment and from one TOML file, under the same names: ``SIGNING_BASE_URL`` is ``base_url``.

The environment wins over the file. The file is the one that ``SIGNING_CONFIG`` names, else ``config.toml`` in the
user's configuration folder (see `config_folder`), which need not exist. See `Settings` for the names.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import attrs

from ._toml import closest, read_toml
from .assumptions import Assumptions
from .auth.oauth import OAuth
from .auth.token_stores import FileTokenStore
from .errors import ConfigurationError
from .transport import wire
from .transport.call import Timeouts
from .transport.retry import RetryPolicy

__all__ = ["Settings", "config_folder", "holds_password"]

T = TypeVar("T")

_SECRETS = frozenset({"access_token", "client_secret", "webhook_secret"})
_PASSWORD = re.compile(r"://[^@]*:[^@]*@|[?&](?:ssl)?password=", re.IGNORECASE)
_OF_THE_TENANT = ("access_token", "client_id", "client_secret", "redirect_uri", "token_file")
_RETRY = ("max_attempts", "base_delay", "max_delay", "max_retry_after", "settle")
_TIMEOUTS = {"timeout": "call", "transfer_timeout": "transfer", "connect_timeout": "connect"}


@attrs.frozen(kw_only=True)
class Settings:
    """Every setting; None where it is not given. ::

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
    journal: Path | str | None = attrs.field(
        default=None, repr=lambda journal: "'...'" if isinstance(journal, str) else repr(journal)
    )
    """A file, or the URL of a database, which may hold a password."""
    broker: str | None = attrs.field(default=None, repr=False)
    """The URL of a broker, which may hold a password."""
    timeouts: Timeouts = attrs.field(factory=Timeouts)
    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    assumptions: Assumptions = attrs.field(factory=Assumptions)
    file: Path | None = None
    """The file that was read."""
    note: str = ""
    """What an error about a missing setting should add."""

    @classmethod
    def load(cls, config: str | os.PathLike[str] | None = None, *, given: Mapping[str, str] | None = None) -> Self:
        """Read them; ``config`` stands for ``SIGNING_CONFIG``, and what is ``given`` wins over all.

        A setting that cannot work is a `ConfigurationError` that says where it stands, and repeats no secret.
        """
        path = _config_file(config)
        content = {} if path is None else read_toml(path, secrets_in=_secrets_in)
        _check_names(content, path)
        layers = [
            {name: _Given(name, text, f"--{name.replace('_', '-')}") for name, text in (given or {}).items()},
            {name: _Given(name, text, _named(name)) for name in _READ if (text := os.environ.get(_named(name)))},
            {name: _Given(name, value, f"{name} in {path}", path) for name, value in content.items()},
        ]
        note = _withhold(layers, path)
        chosen = {name: value for layer in reversed(layers) for name, value in layer.items()}
        return cls(**_structured(chosen), file=path, note=note)

    @property
    def origin(self) -> str:
        """The tenant's origin; an error where it is not set."""
        return self._required("base_url")

    @property
    def store(self) -> FileTokenStore:
        """Where the tenant's token is kept: ``token_file``, else a file of its own in the configuration folder."""
        return FileTokenStore(self.token_file or _default_token_file(self.origin))

    def auth(self) -> str | OAuth:
        """What a client of these settings uses; an error that names what is missing."""
        origin = self.origin
        if self.access_token is not None:
            return self.access_token
        if self.client_id is None:
            raise ConfigurationError(f"neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set{self.note}")
        for name in ("client_secret", "redirect_uri"):
            self._required(name)
        if self.token_file is None and not _is_there(_default_token_file(origin)):
            raise ConfigurationError(f"SIGNING_TOKEN_FILE is not set, and nobody has logged in at {origin}{self.note}")
        return self.oauth()

    def oauth(self, redirect_uri: str | None = None) -> OAuth:
        """The app that is registered, with this redirect URI or its own."""
        return OAuth(
            self.origin,
            client_id=self._required("client_id"),
            client_secret=self._required("client_secret"),
            redirect_uri=redirect_uri or self._required("redirect_uri"),
            store=self.store,
            retry=self.retry,
            assumptions=self.assumptions,
        )

    def _required(self, name: str) -> str:
        value: str | None = getattr(self, name)
        if value is None:
            raise ConfigurationError(f"{_named(name)} is not set{self.note}")
        return value


@attrs.frozen
class _Given:
    """A setting as it was given, and where; ``file`` is the one that its relative paths start from."""

    name: str
    value: Any = attrs.field(repr=False)
    place: str
    file: Path | None = None

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise ConfigurationError(f"{self.place} must be a text that is not empty, not {self._shown()}")
        return self.value

    def path(self) -> Path:
        path = os.path.expanduser(self.text())  # noqa: PTH111  # pathlib's raises where there is no such user
        return Path(path) if self.file is None else self.file.parent / path

    def number(self) -> float:
        value = self.value
        try:
            number = float(value) if isinstance(value, str) and self.file is None else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigurationError(f"{self.place} must be a number, not {self._shown()}")
        return int(number) if float(number).is_integer() else number

    def assumptions(self) -> Assumptions:
        if isinstance(self.value, dict):
            return Assumptions.from_mapping(self.value, self.place)
        return Assumptions.from_file(self.path())

    def path_or_url(self) -> Path | str:
        return self.text() if "://" in self.text() else self.path()

    def _shown(self) -> str:
        # Of a secret not even a wrong value is shown.
        return type(self.value).__name__ if self.name in _SECRETS else repr(self.value)


_READ: dict[str, Callable[[_Given], Any]] = {
    **dict.fromkeys(
        ("base_url", "access_token", "client_id", "client_secret", "redirect_uri", "webhook_secret", "broker"),
        _Given.text,
    ),
    "token_file": _Given.path,
    "journal": _Given.path_or_url,
    **dict.fromkeys((*_TIMEOUTS, *_RETRY), _Given.number),
    "assumptions": _Given.assumptions,
}


def config_folder() -> Path | None:
    """The user's configuration folder of this package; None where the user has no home.

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
    """One for each tenant: a token of one is never sent to another."""
    folder = config_folder()
    if folder is None:
        raise ConfigurationError("SIGNING_TOKEN_FILE is not set, and there is no home folder to keep a token in")
    parts = urlsplit(wire.check_origin(origin))
    return folder / "tokens" / f"{parts.netloc.replace(':', '_')}.json"


def _named(name: str) -> str:
    return f"SIGNING_{name.upper()}"


def _config_file(config: str | os.PathLike[str] | None) -> Path | None:
    named = (os.environ.get("SIGNING_CONFIG") or None) if config is None else config
    if named is not None:
        return Path.cwd() / os.path.expanduser(named)  # noqa: PTH111  # pathlib's raises where there is no such user
    folder = config_folder()
    usual = None if folder is None else folder / "config.toml"
    return usual if usual is not None and _is_there(usual) else None


def _is_there(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110  # pathlib's raises where it may not look


def _secrets_in(content: Mapping[str, Any]) -> list[str]:
    """The names of the file's secrets; the URL of a database or a broker is one where it holds a password."""
    return [
        name
        for name, value in content.items()
        if name in _SECRETS or (name in ("journal", "broker") and holds_password(str(value)))
    ]


def holds_password(url: str) -> bool:
    """Whether the URL of a database or a broker seems to hold a password; of no path that is said."""
    return _PASSWORD.search(url) is not None and "://" in url


def _check_names(content: Mapping[str, object], path: Path | None) -> None:
    for name in content:
        if name not in _READ:
            raise ConfigurationError(f"{path}: there is no setting {name!r}{closest(name, _READ)}")


def _withhold(layers: list[dict[str, _Given]], path: Path | None) -> str:
    """Drop the credentials of other tenants, and return what an error about missing ones should add.

    Credentials belong to the tenant of their own layer; if it names none, to that of the next layer below, else above.
    Whoever names another tenant, with ``--base-url`` for example, does not want them sent there. And whoever names
    one way to log in does not mean the other.
    """
    *above, file = layers
    chosen = _base_url(layers)
    notes = []
    for index, (layer, where) in enumerate(zip(layers, ("the arguments", "the environment", path), strict=True)):
        own = _base_url((*layers[index:], *reversed(layers[:index])))
        if chosen is not None and own is not None and _origin(own) != _origin(chosen):
            held = [given for name in _OF_THE_TENANT if (given := layer.pop(name, None)) is not None]
            names = ", ".join(given.name if given.file else given.place for given in held)
            notes += [f"the {names} in {where} belong to {own.value}"] if held else []
    if any("client_id" in layer for layer in above):
        file.pop("access_token", None)
    return f" ({'; '.join(notes)})" if notes else ""


def _base_url(layers: Iterable[dict[str, _Given]]) -> _Given | None:
    return next((layer["base_url"] for layer in layers if "base_url" in layer), None)


def _origin(given: _Given) -> str:
    return _placed(partial(wire.check_origin, given.text()), given)


def _structured(chosen: Mapping[str, _Given]) -> dict[str, Any]:
    values = {name: _READ[name](given) for name, given in chosen.items()}
    if "base_url" in chosen:
        values["base_url"] = _origin(chosen["base_url"])
    # A plain timeout bounds transfers too, as the client's own argument does.
    if "timeout" in values and "transfer_timeout" not in values:
        chosen = {**chosen, "transfer_timeout": chosen["timeout"]}
        values["transfer_timeout"] = values["timeout"]
    timeouts, retry = Timeouts(), RetryPolicy()
    for name, field in _TIMEOUTS.items():
        if name in values:
            value = values.pop(name)
            timeouts = _placed(partial(attrs.evolve, timeouts, **{field: value}), chosen[name])
    for name in _RETRY:
        if name in values:
            value = values.pop(name)
            retry = _placed(partial(attrs.evolve, retry, **{name: value}), chosen[name])
    return {**values, "timeouts": timeouts, "retry": retry}


def _placed(make: Callable[[], T], given: _Given) -> T:
    """What is made of a setting; an error says where that stands."""
    try:
        return make()
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} ({given.place})") from None
