"""Settings: sources, precedence, errors, and credentials that stay with their tenant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from signing_async import (
    Assumptions,
    ConfigurationError,
    DecodeError,
    OAuth,
    RetryPolicy,
    ServerError,
    SigningClient,
    Timeouts,
)
from signing_async.sandbox import Sandbox
from signing_async.settings import Settings  # private: the command line's options are given to it

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
    """The path of the default settings file; nothing is set in the environment."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "signing-async" / "config.toml"
    path.parent.mkdir()
    return path


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names an app and its tenant."""
    monkeypatch.setenv("SIGNING_BASE_URL", "https://tenant.example.com")
    for name in ("CLIENT_ID", "CLIENT_SECRET", "REDIRECT_URI", "TOKEN_FILE"):
        monkeypatch.setenv(f"SIGNING_{name}", "http://127.0.0.1/")


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, "utf-8", "surrogateescape")
    path.chmod(mode)
    return path


def test_file_holds_every_setting_and_relative_paths_start_from_it(config: Path) -> None:
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
    write(config, 'assumptions = "tenant.toml"')
    write(config.parent / "tenant.toml", 'limit_param = "per_page"\nmax_pdf_bytes = 5', 0o644)
    assert Settings.load().assumptions == Assumptions(limit_param="per_page", max_pdf_bytes=5)
    assert Assumptions.from_file(config.parent / "tenant.toml").limit_param == "per_page"


def test_environment_overrides_the_file_unless_empty_and_given_settings_override_both(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
        "MAX_ATTEMPTS": "2",
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
    assert settings.timeouts == Timeouts(call=6.5, transfer=7.5, connect=2)
    assert (settings.retry.max_attempts, settings.retry.max_retry_after) == (2, 9)
    assert settings.assumptions == Assumptions(cursor_param="from")
    settings = Settings.load(given={"base_url": "https://b.example.com", "timeout": "3"})
    assert (settings.origin, settings.timeouts.call) == ("https://b.example.com", 3)


def test_settings_file_is_chosen_by_argument_then_variable_and_must_exist(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    with pytest.raises(ConfigurationError, match="cannot be read: embedded null byte"):
        Settings.load("config\0.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base_ulr = "x"', r"unknown setting 'base_ulr'; "),
        ("base_url = 5", r"^base_url in .*config.toml: must be a non-empty string, got 5$"),
        ('base_url = "http://a.example"', r"^base_url:? must be https .*'http://a.example' \(base_url in .*toml\)$"),
        ("timeout = []", r"^timeout in .*config.toml: must be a number, got \[\]$"),
        ("timeout = -1", r"-1 \(timeout in .*config.toml\)$"),
        ("[assumptions]\ncursor_parm = 'x'", r"'cursor_parm'; .*cursor_param"),
        ("[assumptions]\ncursor_param = 5", r"^assumptions in .*cursor_param.* 5$"),
        ("[assumptions.item_paths]\nx = 5", r"^assumptions in .*item_paths.* table"),
        ('assumptions = "none.toml"', r"none.toml cannot be read: No such file"),
        ("base_url", r"^\S+config.toml is not TOML: Expected '='"),
        ('client_id = "\udcff"', r"config.toml is not UTF-8$"),
    ],
)
def test_invalid_setting_in_file_is_an_error_with_file_name_and_value(text: str, said: str, config: Path) -> None:
    write(config, text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        Settings.load()
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_invalid_secret_is_not_shown(config: Path) -> None:
    write(config, f'inbox_key = ["{SECRET}"]')
    with pytest.raises(ConfigurationError, match=r"^inbox_key in .*: must be a non-empty string, got list$") as caught:
        Settings.load()
    assert SECRET not in repr(caught.value)
    for broken in (f'inbox_key = "{SECRET}', f"inbox_key = {SECRET}", f'inbox_key = "{SECRET}"\ninbox_key = 1'):
        write(config, broken)
        with pytest.raises(ConfigurationError, match="is not TOML") as caught:
            Settings.load()
        assert SECRET not in f"{caught.value!r} {caught.value.__context__!r} {caught.value.__cause__!r}"


def test_invalid_variable_or_option_is_an_error_with_its_name_and_value(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"^--timeout: must be a number, got 'x'$"):
        Settings.load(given={"timeout": "x"})
    for name, value, said in (
        ("BASE_URL", "x", r"'x' \(SIGNING_BASE_URL\)$"),
        ("TIMEOUT", "soon", r"^SIGNING_TIMEOUT: must be a number, got 'soon'$"),
        ("CONFIG", "none.toml", r"none.toml cannot be read"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(f"SIGNING_{name}", value)
            with pytest.raises(ConfigurationError, match=said):
                Settings.load()


def test_secrets_in_a_world_readable_file_are_refused(config: Path) -> None:
    """The owner's group may read it, and a file without secrets may be readable by all."""
    write(config, f'client_secret = "{SECRET}"\naccess_token = "{SECRET}"', 0o644)
    with pytest.raises(
        ConfigurationError, match=r"holds access_token and client_secret, .*\(mode 0644\): run chmod 600 "
    ) as caught:
        Settings.load()
    assert SECRET not in str(caught.value)
    config.chmod(0o640)
    assert Settings.load().client_secret == SECRET
    write(config, "timeout = 1", 0o644)
    assert Settings.load().timeouts == Timeouts(call=1, transfer=1)


@pytest.mark.parametrize("name", ["journal", "broker"])
def test_database_url_is_hidden_and_a_secret_if_it_has_a_password(name: str, config: Path) -> None:
    url = f"postgresql://user:{SECRET}@host/database"
    write(config, f'{name} = "{url}"')
    settings = Settings.load()
    assert getattr(settings, name) == url
    assert SECRET not in repr(settings)
    for readable in (url, f"postgresql://host/database?password={SECRET}"):
        write(config, f'{name} = "{readable}"', 0o644)
        with pytest.raises(ConfigurationError, match=f"holds {name}, and everybody"):
            Settings.load()
    write(config, f'{name} = "postgresql://user@host:5432/database"', 0o644)
    assert getattr(Settings.load(), name) == "postgresql://user@host:5432/database"


def test_credentials_of_the_file_are_not_sent_to_another_tenant(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(config, ALL)
    monkeypatch.setenv("SIGNING_BASE_URL", "https://other.example.com")
    settings = Settings.load()
    for name in ("access_token", "client_id", "client_secret", "redirect_uri", "token_file"):
        assert getattr(settings, name) is None
    assert settings.timeouts.call == 5
    said = (
        r"neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set \(not used: access_token in .*, client_id in .*,"
        r" token_file in .*config.toml, which belong to https://tenant.example.com\)$"
    )
    with pytest.raises(ConfigurationError, match=said):
        settings.auth()
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "mine")
    assert Settings.load().auth() == "mine"
    monkeypatch.setenv("SIGNING_CLIENT_ID", "of the other")
    settings = Settings.load(given={"base_url": "https://tenant.example.com"})
    assert (settings.auth(), settings.client_id) == (f"{SECRET}-access", "app")


@pytest.mark.parametrize(
    ("file", "environment"),
    [(None, "a"), ("a", None), ("b", "a")],
    ids=["environment", "file", "environment before file"],
)
def test_credentials_of_the_environment_are_not_sent_to_another_tenant(
    file: str | None, environment: str | None, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(config, "" if file is None else f'base_url = "https://{file}.example.com"')
    if environment is not None:
        monkeypatch.setenv("SIGNING_BASE_URL", f"https://{environment}.example.com")
    for name in ("access_token", "client_id", "client_secret", "redirect_uri", "token_file"):
        monkeypatch.setenv(f"SIGNING_{name.upper()}", SECRET)
    assert Settings.load().auth() == SECRET
    assert Settings.load(given={"base_url": "https://A.example.com:443/"}).auth() == SECRET
    said = (
        r"is set \(not used: SIGNING_ACCESS_TOKEN, .*, SIGNING_TOKEN_FILE, which belong to https://a\.example\.com\)$"
    )
    with pytest.raises(ConfigurationError, match=said) as caught:
        Settings.load(given={"base_url": "https://b.example.com"}).auth()
    assert SECRET not in str(caught.value)


@pytest.mark.usefixtures("app")
def test_app_in_the_environment_overrides_access_token_in_the_file(config: Path) -> None:
    write(config, f'access_token = "{SECRET}"\nbase_url = "https://tenant.example.com"')
    assert isinstance(Settings.load().auth(), OAuth)


@pytest.mark.usefixtures("config", "app")
@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("BASE_URL", "SIGNING_BASE_URL is not set"),
        ("CLIENT_ID", "neither SIGNING_ACCESS_TOKEN nor SIGNING_CLIENT_ID is set"),
        ("CLIENT_SECRET", "SIGNING_CLIENT_SECRET is not set"),
        ("REDIRECT_URI", "SIGNING_REDIRECT_URI is not set"),
        ("TOKEN_FILE", "SIGNING_TOKEN_FILE is not set, and there is no login at https://tenant.example.com"),
    ],
)
def test_missing_setting_is_named_by_its_variable(missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"SIGNING_{missing}")
    with pytest.raises(ConfigurationError, match=f"^{re.escape(said)}$"):
        SigningClient.from_env()


async def test_from_env_takes_all_settings_from_the_file_and_options_override_them(
    sandbox: Sandbox, config: Path
) -> None:
    write(config, f'base_url = "{sandbox.base_url}"\naccess_token = "{sandbox.access_token()}"\nmax_attempts = 1')
    async with SigningClient.from_env() as client:
        sandbox.faults.add("me", "503", times=2)
        with pytest.raises(ServerError):
            await client.me()
    elsewhere = Assumptions(item_paths="elsewhere")
    async with SigningClient.from_env(retry=RetryPolicy(base_delay=0.01), assumptions=elsewhere) as client:
        assert (await client.me()).email
        with pytest.raises(DecodeError):
            await client.signings.list()
    assert len(sandbox.requests_of("me")) == 3


async def test_default_token_file_is_one_per_tenant(sandbox: Sandbox, config: Path) -> None:
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:1/cb")
    known = {"client_id": app.client_id, "client_secret": app.client_secret, "redirect_uri": app.redirect_uri}
    known["base_url"] = sandbox.base_url
    write(config, "\n".join(f'{name} = "{value}"' for name, value in known.items()))
    settings = Settings.load()
    with pytest.raises(ConfigurationError, match="there is no login at"):
        settings.auth()
    async with settings.oauth() as oauth:
        await oauth.exchange(sandbox.authorize(app))
    expected = sandbox.base_url.removeprefix("http://").replace(":", "_") + ".json"
    assert settings.store.path == config.parent / "tokens" / expected
    async with SigningClient.from_env() as client:
        assert (await client.me()).email
    assert Settings(base_url="https://b.example.com").store.path.name == "b.example.com.json"


def test_without_home_folder_only_a_token_file_is_an_error(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    def nobody(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "expanduser", nobody)
    assert Settings.load() == Settings()
    with pytest.raises(ConfigurationError, match="there is no home folder for a token file"):
        _ = Settings(base_url="https://a.example.com").store
