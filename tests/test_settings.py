"""Settings: the environment, one file, which of them wins, and what is said of a setting that cannot work."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from signing_async import Assumptions, AuthError, ConfigurationError, FileTokenStore, OAuth, SigningClient, Timeouts
from signing_async.sandbox import Sandbox
from signing_async.settings import Settings, config_folder

SECRET = "hunter2-of-the-tests"
ALL = f"""
base_url = "https://tenant.example.com/"
access_token = "{SECRET}-access"
client_id = "app"
client_secret = "{SECRET}-client"
redirect_uri = "http://127.0.0.1:8000/callback"
token_file = "token.json"
webhook_secret = "{SECRET}-webhook"
journal = "~/journal.db"
timeout = 5
transfer_timeout = 7.5
connect_timeout = 2
max_attempts = 3
base_delay = 0.25
max_delay = 4
max_retry_after = 9

[assumptions]
cursor_param = "after"
item_paths = ["rows"]
expired_token_statuses = [401, 419]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the settings file is looked for; nothing is in the environment."""
    for name in [name for name in os.environ if name.startswith("SIGNING_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "signing-async" / "config.toml"
    path.parent.mkdir()
    return path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """A file of that mode."""
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


def test_without_anything_there_are_the_defaults(config: Path) -> None:
    """No file is needed."""
    assert Settings.load() == Settings()


def test_every_setting_of_a_file(config: Path) -> None:
    """Under its name; a relative path starts at the file, wherever the program runs."""
    write(config, ALL)
    settings = Settings.load()
    assert settings.file == config
    assert settings.origin == "https://tenant.example.com"
    assert settings.auth() == f"{SECRET}-access"
    assert (settings.client_id, settings.client_secret) == ("app", f"{SECRET}-client")
    assert settings.token_file == config.parent / "token.json"
    assert settings.journal == Path("~/journal.db").expanduser()
    assert settings.webhook_secret == f"{SECRET}-webhook"
    assert settings.timeouts == Timeouts(call=5, transfer=7.5, connect=2)
    assert settings.retry.max_attempts == 3
    assert (settings.retry.base_delay, settings.retry.max_delay, settings.retry.max_retry_after) == (0.25, 4, 9)
    assert settings.assumptions == Assumptions(
        cursor_param="after", item_paths="rows", expired_token_statuses=[401, 419]
    )
    assert SECRET not in repr(settings)


def test_every_setting_of_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same names; all of it wins over the file, and what is empty does not count."""
    write(config, ALL)
    assumed = write(tmp_path / "assumptions.toml", 'cursor_param = "from"')
    values = {
        "BASE_URL": "https://tenant.example.com:443",
        "ACCESS_TOKEN": "other",
        "CLIENT_ID": "2",
        "CLIENT_SECRET": "3",
        "REDIRECT_URI": "http://127.0.0.1/",
        "TOKEN_FILE": "there.json",
        "WEBHOOK_SECRET": "4",
        "JOURNAL": "j.db",
        "TIMEOUT": "6.5",
        "TRANSFER_TIMEOUT": "8",
        "CONNECT_TIMEOUT": "1",
        "MAX_ATTEMPTS": "2",
        "BASE_DELAY": "1",
        "MAX_DELAY": "2",
        "MAX_RETRY_AFTER": "",
        "ASSUMPTIONS": str(assumed),
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SIGNING_{name}", value)
    settings = Settings.load()
    assert settings.auth() == "other"
    assert settings.origin == "https://tenant.example.com"
    assert (settings.client_id, settings.client_secret, settings.webhook_secret) == ("2", "3", "4")
    assert (settings.token_file, settings.journal) == (Path("there.json"), Path("j.db"))
    assert settings.timeouts == Timeouts(call=6.5, transfer=8, connect=1)
    assert (settings.retry.max_attempts, settings.retry.max_retry_after) == (2, 9)
    assert settings.assumptions == Assumptions(cursor_param="from")


def test_what_is_given_wins_over_all(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is named as it was given."""
    write(config, 'base_url = "https://a.example.com"\ntimeout = 1')
    monkeypatch.setenv("SIGNING_TIMEOUT", "2")
    settings = Settings.load(given={"base_url": "https://b.example.com", "timeout": "3"})
    assert (settings.origin, settings.timeouts.call) == ("https://b.example.com", 3)
    with pytest.raises(ConfigurationError, match=r"^--timeout must be a number, not 'x'$"):
        Settings.load(given={"timeout": "x"})


def test_a_plain_timeout_is_for_transfers_too(config: Path) -> None:
    """As the client's own argument is."""
    write(config, "timeout = 5")
    assert Settings.load().timeouts == Timeouts(call=5, transfer=5)


def test_assumptions_in_a_file_of_their_own(config: Path) -> None:
    """The settings file may name it, relative to itself."""
    write(config, 'assumptions = "tenant.toml"')
    write(config.parent / "tenant.toml", 'limit_param = "per_page"\nmax_pdf_bytes = 5', 0o644)
    assert Settings.load().assumptions == Assumptions(limit_param="per_page", max_pdf_bytes=5)
    assert Assumptions.from_file(config.parent / "tenant.toml").limit_param == "per_page"


def test_the_file_that_is_named(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the variable, or by the caller, who wins; it must be there then."""
    write(config, 'client_id = "usual"')
    named = write(tmp_path / "named.toml", 'client_id = "named"')
    given = write(tmp_path / "given.toml", 'client_id = "given"')
    assert Settings.load().client_id == "usual"
    monkeypatch.setenv("SIGNING_CONFIG", str(named))
    assert Settings.load().client_id == "named"
    assert Settings.load(given).client_id == "given"
    monkeypatch.chdir(tmp_path)
    assert Settings.load("given.toml").file == given
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        Settings.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base_ulr = "x"', r"there is no setting 'base_ulr'; did you mean 'base_url'\?$"),
        ("xyzzy = 1", r"there is no setting 'xyzzy'$"),
        ("base_url = 5", r"^base_url in .*config.toml must be a text that is not empty, not 5$"),
        ('base_url = ""', r"^base_url in .*config.toml must be a text that is not empty, not ''$"),
        ('base_url = "http://example.com"', r"^base_url must be https .*'http://example.com' \(base_url in .*toml\)$"),
        ('timeout = "5"', r"^timeout in .*config.toml must be a number, not '5'$"),
        ("timeout = true", r"^timeout in .*config.toml must be a number, not True$"),
        ("timeout = nan", r"^timeout in .*config.toml must be a number, not nan$"),
        ("timeout = -1", r"^timeout: call must be seconds above 0, not -1 \(timeout in .*config.toml\)$"),
        ("transfer_timeout = 0", r"transfer must be seconds above 0, not 0 \(transfer_timeout in"),
        ("max_attempts = 0", r"max_attempts must be a whole number from 1, not 0 \(max_attempts in"),
        ("max_attempts = 1.5", r"max_attempts must be a whole number from 1, not 1.5 \(max_attempts in"),
        ("max_delay = -1", r"max_delay must be seconds, 0 or more, not -1 \(max_delay in"),
        ("token_file = 1", r"^token_file in .*config.toml must be a text"),
        ("assumptions = 1", r"^assumptions in .*config.toml must be a text that is not empty, not 1$"),
        (
            "[assumptions]\ncursor_parm = 'x'",
            r": unknown assumption 'cursor_parm'; did you mean 'cursor_param'",
        ),
        ("[assumptions]\ncursor_param = 5", r"^assumptions in .*: cursor_param: must be a non-empty string, got 5$"),
        ("[assumptions.item_paths]\nx = 5", r"^assumptions in .*: item_paths: must not be a table$"),
        ('assumptions = "none.toml"', r"none.toml cannot be read: No such file"),
        ("base_url", r"^\S+config.toml is not TOML: Expected '='"),
        ("timeout = 1\ntimeout = 2", r"is not TOML"),
    ],
)
def test_a_file_that_cannot_work(text: str, said: str, config: Path) -> None:
    """The error names the file, the setting and the value."""
    write(config, text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        Settings.load()
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BASE_URL", "x", r"not 'x' \(SIGNING_BASE_URL\)$"),
        ("TIMEOUT", "soon", r"^SIGNING_TIMEOUT must be a number, not 'soon'$"),
        ("MAX_ATTEMPTS", "inf", r"^SIGNING_MAX_ATTEMPTS must be a number, not 'inf'$"),
        ("ASSUMPTIONS", "none.toml", r"^none.toml cannot be read"),
        ("CONFIG", "none.toml", r"none.toml cannot be read"),
        ("CONFIG", "/", r"^/ cannot be read: Is a directory$"),
    ],
)
def test_a_variable_that_cannot_work(
    name: str, value: str, said: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same."""
    monkeypatch.setenv(f"SIGNING_{name}", value)
    with pytest.raises(ConfigurationError, match=said):
        Settings.load()


@pytest.mark.parametrize("name", ["access_token", "client_secret", "webhook_secret"])
def test_a_wrong_secret_is_not_repeated(name: str, config: Path) -> None:
    """Its kind is enough; nor does a file that is no TOML give away what is in it."""
    write(config, f'{name} = ["{SECRET}"]')
    with pytest.raises(ConfigurationError, match=rf"^{name} in .* not list$") as caught:
        Settings.load()
    assert SECRET not in repr(caught.value)
    for broken in (f'{name} = "{SECRET}', f"{name} = {SECRET}", f'{name} = "{SECRET}"\n{name} = 1'):
        write(config, broken)
        with pytest.raises(ConfigurationError, match="is not TOML") as caught:
            Settings.load()
        assert SECRET not in f"{caught.value!r} {caught.value.__context__!r} {caught.value.__cause__!r}"


def test_a_file_of_another_encoding(config: Path) -> None:
    """Is said to be one."""
    config.write_bytes(b'client_id = "\xff"')
    with pytest.raises(ConfigurationError, match=r"config.toml is not UTF-8$"):
        Settings.load()


def test_a_name_of_a_file_that_is_empty(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a variable which is not set, --config "$CONFIG": another file is not taken for it."""
    write(config, "timeout = 7")
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        Settings.load("")
    monkeypatch.setenv("SIGNING_CONFIG", "")
    assert Settings.load().timeouts.call == 7


def test_a_secret_that_everybody_may_read_is_refused(config: Path) -> None:
    """With what to do about it; the owner's group may read it, and a file without secrets is nobody's business."""
    write(config, f'client_secret = "{SECRET}"\naccess_token = "{SECRET}"', 0o644)
    with pytest.raises(
        ConfigurationError, match=r"holds access_token and client_secret, .*\(mode 0644\): run chmod 600 "
    ) as caught:
        Settings.load()
    assert SECRET not in str(caught.value)
    config.chmod(0o640)
    assert Settings.load().client_secret == SECRET
    write(config, "timeout = 1", 0o644)
    assert Settings.load().timeouts.call == 1


def test_a_broker(config: Path) -> None:
    """Its URL is kept out of texts, and a file in which it has a password is kept from others."""
    url = f"redis://user:{SECRET}@host/0"
    write(config, f'broker = "{url}"')
    settings = Settings.load()
    assert settings.broker == url
    assert SECRET not in repr(settings)
    write(config, f'broker = "{url}"', 0o644)
    with pytest.raises(ConfigurationError, match="holds broker, and everybody"):
        Settings.load()
    write(config, 'broker = "redis://host/0"', 0o644)
    assert Settings.load().broker == "redis://host/0"


def test_a_journal_in_a_database(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its URL is kept as it is, and is a secret where it holds a password."""
    url = f"postgresql://user:{SECRET}@host/database"
    write(config, f'journal = "{url}"')
    settings = Settings.load()
    assert settings.journal == url
    assert SECRET not in repr(settings)
    config.chmod(0o644)
    with pytest.raises(ConfigurationError, match="holds journal, and everybody"):
        Settings.load()
    write(config, f'journal = "postgresql://host/database?password={SECRET}"', 0o644)
    with pytest.raises(ConfigurationError, match="holds journal, and everybody"):
        Settings.load()
    write(config, 'journal = "postgresql://user@host:5432/database"', 0o644)
    assert Settings.load().journal == "postgresql://user@host:5432/database"
    write(config, 'journal = "postgresql://host/database"', 0o644)
    assert Settings.load().journal == "postgresql://host/database"
    write(config, 'journal = "a&password=b.journal"', 0o644)
    assert Settings.load().journal == config.parent / "a&password=b.journal"
    monkeypatch.setenv("SIGNING_JOURNAL", "j.db")
    assert "j.db" in repr(Settings.load())


def test_modes_mean_nothing_on_windows(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There every file seems to be readable."""
    write(config, f'client_secret = "{SECRET}"', 0o644)
    monkeypatch.setattr(sys, "platform", "win32")
    assert Settings.load(config).client_secret == SECRET


def test_a_files_secrets_go_to_its_tenant_alone(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names another tenant does not mean these; the error says what was left out, and why."""
    write(config, ALL)
    monkeypatch.setenv("SIGNING_BASE_URL", "https://other.example.com")
    settings = Settings.load()
    for name in ("access_token", "client_id", "client_secret", "redirect_uri", "token_file"):
        assert getattr(settings, name) is None
    assert settings.timeouts.call == 5
    said = (
        r"neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set \(the access_token, client_id, client_secret,"
        r" redirect_uri, token_file in .*config.toml belong to https://tenant.example.com/\)$"
    )
    with pytest.raises(ConfigurationError, match=said):
        settings.auth()
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "mine")
    assert Settings.load().auth() == "mine"
    write(config, 'base_url = "https://tenant.example.com"')
    assert Settings.load().note == ""


@pytest.mark.parametrize(
    ("file", "environment", "said"),
    [
        ("", "https://a.example.com", "in the environment belong to https://a.example.com"),
        ('base_url = "https://a.example.com"', None, "in the environment belong to https://a.example.com"),
        ('base_url = "https://b.example.com"', "https://a.example.com", "in the environment belong to https://a"),
    ],
    ids=["environment", "file", "environment before file"],
)
def test_credentials_in_the_environment_go_to_their_tenant_alone(
    file: str, environment: str | None, said: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever names another tenant with --base-url does not send it the token of the environment's."""
    write(config, file)
    if environment is not None:
        monkeypatch.setenv("SIGNING_BASE_URL", environment)
    for name in ("access_token", "client_id", "client_secret", "redirect_uri", "token_file"):
        monkeypatch.setenv(f"SIGNING_{name.upper()}", SECRET)
    assert Settings.load().auth() == SECRET
    assert Settings.load(given={"base_url": "https://A.example.com:443/"}).auth() == SECRET
    settings = Settings.load(given={"base_url": "https://b.example.com"})
    names = "SIGNING_ACCESS_TOKEN, SIGNING_CLIENT_ID, SIGNING_CLIENT_SECRET, SIGNING_REDIRECT_URI, SIGNING_TOKEN_FILE"
    with pytest.raises(ConfigurationError, match=rf"is set \(the {names} {said}") as caught:
        settings.auth()
    assert SECRET not in str(caught.value)


def test_files_credentials_belong_to_the_environments_tenant(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that names no tenant completes the environment; another tenant does not get what is in it."""
    write(config, f'access_token = "{SECRET}"')
    assert Settings.load(given={"base_url": "https://b.example.com"}).auth() == SECRET
    monkeypatch.setenv("SIGNING_BASE_URL", "https://a.example.com")
    assert Settings.load().auth() == SECRET
    with pytest.raises(
        ConfigurationError, match=r"the access_token in .*config.toml belong to https://a\.example\.com"
    ):
        Settings.load(given={"base_url": "https://b.example.com"}).auth()


async def test_token_file_of_another_tenant_is_refused(
    sandbox: Sandbox, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGNING_TOKEN_FILE names one that another tenant issued: it is not sent, and not written over."""
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    values = {
        "BASE_URL": sandbox.base_url,
        "CLIENT_ID": app.client_id,
        "CLIENT_SECRET": app.client_secret,
        "REDIRECT_URI": app.redirect_uri,
        "TOKEN_FILE": str(tmp_path / "token.json"),
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SIGNING_{name}", str(value))
    async with Settings.load().oauth() as oauth:
        await oauth.exchange(sandbox.authorize(app))
    kept = (tmp_path / "token.json").read_bytes()
    async with Sandbox(seed=8) as other:
        monkeypatch.setenv("SIGNING_BASE_URL", other.base_url)
        async with SigningClient.from_env() as client:
            with pytest.raises(
                AuthError, match=f"the stored token is for {sandbox.base_url}, not for {other.base_url}"
            ):
                await client.me()
            auth = client._shared.auth
            assert isinstance(auth, OAuth)
            with pytest.raises(AuthError, match="the stored token is for"):
                await auth.refresh(rejected="another")
        assert other.requests_of("me") == other.requests_of("oauth.token") == []
    assert (tmp_path / "token.json").read_bytes() == kept


def test_one_way_to_log_in_is_not_mixed_with_another(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An app in the environment is meant, even where the file holds an access token."""
    write(config, f'access_token = "{SECRET}"\nbase_url = "https://tenant.example.com"')
    for name in ("CLIENT_ID", "CLIENT_SECRET", "REDIRECT_URI"):
        monkeypatch.setenv(f"SIGNING_{name}", "http://127.0.0.1/")
    monkeypatch.setenv("SIGNING_TOKEN_FILE", str(config.parent / "token.json"))
    assert isinstance(Settings.load().auth(), OAuth)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("BASE_URL", "SIGNING_BASE_URL is not set"),
        ("CLIENT_ID", "neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set"),
        ("CLIENT_SECRET", "SIGNING_CLIENT_SECRET is not set"),
        ("REDIRECT_URI", "SIGNING_REDIRECT_URI is not set"),
        ("TOKEN_FILE", "SIGNING_TOKEN_FILE is not set, and nobody has logged in at https://tenant.example.com"),
    ],
)
def test_what_is_missing_is_named(missing: str, said: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variable."""
    values = {
        "BASE_URL": "https://tenant.example.com",
        "CLIENT_ID": "app",
        "CLIENT_SECRET": SECRET,
        "REDIRECT_URI": "http://127.0.0.1/",
        "TOKEN_FILE": "token.json",
    }
    for name in values.keys() - {missing}:
        monkeypatch.setenv(f"SIGNING_{name}", values[name])
    with pytest.raises(ConfigurationError, match=f"^{re.escape(said)}$"):
        SigningClient.from_env()


async def test_from_env_by_a_file_alone(sandbox: Sandbox, config: Path) -> None:
    """All settings reach the client; options of the caller's win."""
    write(
        config,
        f'base_url = "{sandbox.base_url}"\naccess_token = "{sandbox.access_token()}"\nmax_attempts = 1\ntimeout = 3',
    )
    async with SigningClient.from_env() as client:
        assert (await client.me()).email
        options = client._transport.options
        assert (options.retry.max_attempts, options.timeouts.call) == (1, 3)
    async with SigningClient.from_env(timeout=9, assumptions=Assumptions(limit_param="n")) as client:
        assert client._transport.options.timeouts.call == 9
        assert client._transport.options.assumptions.limit_param == "n"


async def test_the_token_of_a_login_is_found(sandbox: Sandbox, config: Path) -> None:
    """In the configuration folder, in a file of the tenant's own."""
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    text = (
        f'client_id = "{app.client_id}"\nclient_secret = "{app.client_secret}"\nredirect_uri = "{app.redirect_uri}"\n'
    )
    write(config, f'{text}base_url = "{sandbox.base_url}"')
    settings = Settings.load()
    with pytest.raises(ConfigurationError, match="nobody has logged in"):
        settings.auth()
    async with settings.oauth() as oauth:
        await oauth.exchange(sandbox.authorize(app))
    expected = sandbox.base_url.removeprefix("http://").replace(":", "_") + ".json"
    assert settings.store.path == config.parent / "tokens" / expected
    async with SigningClient.from_env() as client:
        assert (await client.me()).email
    assert Settings(base_url="https://b.example.com").store.path.name == "b.example.com.json"


@pytest.mark.parametrize(
    ("platform", "environment", "folder"),
    [
        ("linux", {"XDG_CONFIG_HOME": "/xdg"}, "/xdg/signing-async"),
        ("linux", {"XDG_CONFIG_HOME": "not/absolute"}, "{home}/.config/signing-async"),
        ("linux", {}, "{home}/.config/signing-async"),
        ("darwin", {}, "{home}/Library/Application Support/signing-async"),
        ("darwin", {"XDG_CONFIG_HOME": "/xdg"}, "/xdg/signing-async"),
        ("win32", {"APPDATA": "/Roaming"}, "/Roaming/signing-async"),
        ("win32", {}, "{home}/AppData/Roaming/signing-async"),
    ],
)
def test_the_users_configuration_folder(
    platform: str, environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where each system keeps such things."""
    for name in ("XDG_CONFIG_HOME", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert config_folder() == Path(folder.format(home=tmp_path))


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """There is no file to look for; only a token has nowhere to be."""

    def nobody(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "expanduser", nobody)
    assert config_folder() is None
    assert Settings.load() == Settings()
    with pytest.raises(ConfigurationError, match="there is no home folder to keep a token in"):
        _ = Settings(base_url="https://a.example.com").store


def test_a_folder_that_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if it were not there, such as the home of root for a service that is somebody else."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + 300 * "x")  # as good as closed, and to root too
    settings = Settings.load(given={"base_url": "https://a.example.com", "client_id": "c", "client_secret": "s"})
    with pytest.raises(ConfigurationError, match="SIGNING_REDIRECT_URI is not set"):
        settings.auth()
    with pytest.raises(ConfigurationError, match="SIGNING_TOKEN_FILE is not set, and nobody has logged in at"):
        attrs.evolve(settings, redirect_uri="https://app.example.com/callback").auth()


def test_a_path_that_cannot_be_one() -> None:
    """It is refused as one that leads nowhere."""
    with pytest.raises(ConfigurationError, match="cannot be read: embedded null byte"):
        Settings.load("config\0.toml")


def test_a_home_of_nobody(config: Path) -> None:
    """A path that begins with the home of somebody unknown is a name like any other."""
    write(config, 'token_file = "~nobody-of-this-name/x"')
    assert Settings.load().token_file == config.parent / "~nobody-of-this-name/x"


def test_the_reader_of_toml_is_loaded_when_there_is_something_to_read() -> None:
    """Importing the client costs nothing of it."""
    script = "import sys, signing_async.client; print('tomllib' in sys.modules, 'difflib' in sys.modules)"
    # What measures the tests reads TOML itself.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "False False\n"


def test_the_store_is_the_file_that_is_named(config: Path, tmp_path: Path) -> None:
    """With the token that is in it."""

    async def kept() -> Any:
        return await FileTokenStore(tmp_path / "x.json").load()

    assert asyncio.run(kept()) is None
    assert Settings(base_url="https://a.example.com", token_file=tmp_path / "x.json").store.path == tmp_path / "x.json"
