"""The examples in the help of every command work as printed."""

from __future__ import annotations

import contextlib
import csv
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from signing_async import SigningClient
from signing_async.cli import app as cli
from signing_async.webhooks import Inbox, Receiver, WebhookVerifier
from tests.cli.browser import agree
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service
from tests.cli.test_account import SSH, free_port
from tests.pdfs import make_pdf
from tests.webhooks.deliveries import SECRET, event_body, hex_of
from tests.webhooks.servers import PATH, serve

RECIPIENTS = ("anna@example.com", "bo@example.com")


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its full name, including subcommands."""
    context = click.Context(cli.group, info_name="signing-async")
    for name in cli.group.list_commands(context):
        _, command, _ = cli.group.resolve_command(context, [name])
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", command.commands[inner]) for inner in sorted(command.commands))
        else:
            yield name, command


ALL = dict(commands())


def examples(command: click.Command) -> list[str]:
    """Return the example lines of the help."""
    found = re.search(r"\nExample:\n((?: {2,}\S.*\n)+)", inspect.cleandoc(command.help or "").replace("\b", "") + "\n")
    return [] if found is None else [line.strip() for line in found[1].splitlines()]


@pytest.mark.parametrize("name", sorted(ALL))
def test_help_of_every_command_has_an_example_its_options_and_the_common_options(name: str, run: Run) -> None:
    ran = run(*name.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"Usage: signing-async {name} " in ran.out
    assert "Example:" in ran.out
    assert examples(ALL[name])
    for option in ("--json", "--config FILE", "--base-url URL", "--timeout SECONDS", "--verbose"):
        assert option in ran.out
    assert all(line.startswith(f"signing-async {name}") for line in examples(ALL[name]))
    assert not re.search(r"\n  [A-Z]+\.*  ", ran.out)
    assert max(len(line) for line in ran.out.splitlines()) <= 110


def test_no_option_takes_a_secret() -> None:
    """Every process on the machine can read arguments."""
    for command in (*ALL.values(), cli.group):
        for parameter in command.params:
            assert not re.search("password|access.?token|client.?secret", str(parameter.name))


@pytest.fixture
def prepared(service: Service, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Provide what the examples need: files, a signing, an app, a browser."""
    monkeypatch.setattr("webbrowser.open", agree)
    monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", SECRET)
    body = event_body("evt_1")
    (tmp_path / "delivery.json").write_bytes(body)
    (tmp_path / "webhook-secret").write_text(SECRET)
    monkeypatch.setenv("SIGNATURE", hex_of(body))
    monkeypatch.setenv("SIGNING_INBOX", str(tmp_path / "inbox.db"))
    monkeypatch.setenv("EVENT", "evt_1")
    service.call(_received(tmp_path / "inbox.db", body))
    for name in ("lease", "inventory"):
        (tmp_path / f"{name}.pdf").write_bytes(make_pdf(text=name))
    with (tmp_path / "leases.csv").open("w", newline="") as file:
        columns = ("name", "language", "documents", "recipient1_email", "recipient1_order")
        csv.writer(file).writerows([columns, ("Lease", "EN", "lease.pdf", "anna@example.com", "1")])

    def prepare(command: str) -> None:
        empty = command in {"upload", "add-recipient"}
        signing = service.draft() if empty else service.draft("lease.pdf", to=RECIPIENTS, sent=command != "send")
        if command in {"watch", "download", "archive verify"}:
            service.call(service.sandbox.complete(signing))
        monkeypatch.setenv("SIGNING", signing)
        if command == "archive verify":
            assert run("archive", "contracts/").code == 0
        if command == "login":
            _register(service, monkeypatch)
        if command == "verify-sealed":
            service.call(_sealed(service, signing, tmp_path / "lease-signed.pdf"))

    return prepare


def _register(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register an app with a free port, where a browser can be opened."""
    monkeypatch.setenv("DISPLAY", ":0")
    for name in SSH:
        monkeypatch.delenv(name, raising=False)
    redirect_uri = f"http://127.0.0.1:{free_port()}/callback"
    app = service.do(service.sandbox.register_app, redirect_uri=redirect_uri)
    assert app.client_secret
    monkeypatch.setenv("SIGNING_CLIENT_ID", app.client_id)
    monkeypatch.setenv("SIGNING_CLIENT_SECRET", app.client_secret)
    monkeypatch.setenv("SIGNING_REDIRECT_URI", redirect_uri)


async def _received(path: Path, body: bytes) -> None:
    async with Inbox(path) as inbox:
        await inbox.add(WebhookVerifier(SECRET).parse(body, hex_of(body)), body)


async def _sealed(service: Service, signing: str, path: Path) -> None:
    await service.sandbox.complete(signing)
    async with SigningClient(service.sandbox.base_url, service.sandbox.access_token()) as client:
        (document,) = (await client.signings.get(signing)).documents
        await client.documents.download_signed(signing, document, path)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"sandbox", "webhook check"}))
def test_examples_of_every_command_work_as_printed(name: str, run: Run, prepared: Callable[[str], None]) -> None:
    prepared(name)
    for line in examples(ALL[name]):
        ran = run_line(line, run)
        assert ran.code == 0, f"{line}\n{ran.err}"


def run_line(line: str, run: Run) -> Ran:
    """Run a line like a shell does, with variables and redirections."""
    words = shlex.split(os.path.expandvars(line))[1:]
    with contextlib.ExitStack() as files, pytest.MonkeyPatch.context() as patched:
        for operator, stream in ((">", "stdout"), ("<", "stdin")):
            if operator in words:
                at = words.index(operator)
                file = files.enter_context(Path(words[at + 1]).open("w" if operator == ">" else "r"))
                patched.setattr(sys, stream, file)
                del words[at : at + 2]
        return run(*words)


def test_example_of_webhook_check_works(run: Run, prepared: Callable[[str], None]) -> None:
    receiver = Receiver(WebhookVerifier(SECRET), lambda event: None, body_timeout=1.0)
    (line,) = examples(ALL["webhook check"])
    with serve("aiohttp", receiver) as port:
        ran = run_line(line.replace("http://localhost:8000/webhooks", f"http://127.0.0.1:{port}{PATH}"), run)
    assert ran.code == 0, ran.out


def test_example_of_the_main_help_works(run: Run, service: Service) -> None:
    for line in examples(cli.group):
        assert run_line(line, run).code == 0
