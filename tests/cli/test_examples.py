"""The examples in the help of every command work as printed."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from signing_async.cli import app as cli
from signing_async.webhooks import Receiver, WebhookVerifier
from tests.cli.browser import agree
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service
from tests.cli.test_account import browse_with, free_port, register_app
from tests.webhooks.deliveries import SECRET
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
        if name == "archive":  # a group whose first argument may be an archive
            yield name, command.resolve_command(context, ["contracts/"])[1]
        elif not isinstance(command, click.Group):
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
    assert name != "archive" or re.search(r"\n  verify .*\n|\n  status .*\n", ran.out)


def test_no_option_takes_a_secret() -> None:
    """Every process on the machine can read arguments."""
    for command in (*ALL.values(), cli.group):
        for parameter in command.params:
            assert not re.search("password|access.?token|client.?secret", str(parameter.name))


@pytest.fixture
def prepared(sample_files: None, service: Service, run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Provide what the examples need: files, a signing, an app, a browser."""

    def prepare(command: str) -> None:
        empty = command in {"upload", "add-recipient"}
        signing = service.draft() if empty else service.draft("lease.pdf", to=RECIPIENTS, sent=command != "send")
        monkeypatch.setenv("SIGNING", signing)
        if command in {"watch", "download", "archive verify", "verify-sealed"}:
            service.call(service.sandbox.complete(signing))
        if command == "archive verify":
            assert run("archive", "contracts/").code == 0
        if command == "login":
            register_app(service, monkeypatch, f"http://127.0.0.1:{free_port()}/callback")
            browse_with(monkeypatch, agree)
        if command == "verify-sealed":
            assert run("download", signing).code == 0

    return prepare


# The demo and the sandbox have tests of their own.
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"demo", "sandbox", "webhook check"}))
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
