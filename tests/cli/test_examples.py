"""The examples in the help of every command, and the console samples of the README and the guides, work as printed."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from signing_async.cli import app as cli
from signing_async.webhooks import Inbox, Receiver, WebhookVerifier
from tests.cli.browser import agree
from tests.cli.conftest import Ran, Run
from tests.cli.service import Service
from tests.cli.terminal import ROOT
from tests.cli.test_account import browse_with, register_app
from tests.pdfs import make_pdf
from tests.sealed.pdfs import sandbox_authority, sealed_by_sandbox
from tests.webhooks.deliveries import SECRET, event_body, hex_of
from tests.webhooks.servers import PATH, serve


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


def test_help_of_every_command_has_an_example_its_options_and_the_common_options(run: Run) -> None:
    for name, command in ALL.items():
        ran = run(*name.split(), "--help")
        assert (ran.code, ran.err) == (0, "")
        assert f"Usage: signing-async {name} " in ran.out
        assert "Example:" in ran.out
        assert examples(command)
        for option in ("--json", "--config FILE", "--base-url URL", "--timeout SECONDS", "--verbose"):
            assert option in ran.out
        assert all(line.startswith(f"signing-async {name}") for line in examples(command))
        assert not re.search(r"\n  [A-Z]+\.*  ", ran.out), name
        assert max(len(line) for line in ran.out.splitlines()) <= 110
        assert name != "archive" or re.search(r"\n  verify .*\n|\n  status .*\n", ran.out)


def test_no_option_takes_a_secret() -> None:
    """Every process on the machine can read arguments."""
    for command in (*ALL.values(), cli.group):
        for parameter in command.params:
            assert not re.search("password|access.?token|client.?secret", str(parameter.name))


@pytest.fixture
def files(run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the files and variables that examples and samples take for granted."""
    for name in ("lease", "inventory"):
        (tmp_path / f"{name}.pdf").write_bytes(make_pdf(text=name))
    rows = [f"{number},Lease,EN,lease.pdf,anna{number}@example.com\n" for number in range(3)]
    (tmp_path / "leases.csv").write_text(f"key,name,language,documents,recipient1_email\n{''.join(rows)}")
    body = event_body("evt_1")
    (tmp_path / "delivery.json").write_bytes(body)
    (tmp_path / "webhook-secret").write_text(SECRET)
    monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("SIGNATURE", hex_of(body))
    monkeypatch.setenv("SIGNING_INBOX", str(tmp_path / "inbox.db"))
    monkeypatch.setenv("EVENT", "evt_1")

    async def receive() -> None:
        async with Inbox(tmp_path / "inbox.db") as inbox:
            await inbox.add(WebhookVerifier(SECRET).parse(body, hex_of(body)), body)

    service.call(receive())


def prepare(command: str, run: Run, service: Service, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Provide what the examples of a command need: a signing, an app, a browser."""
    to = ("anna@example.com", "bo@example.com")
    empty = command in {"upload", "add-recipient"}
    signing = service.draft() if empty else service.draft("lease.pdf", to=to, sent=command != "send")
    monkeypatch.setenv("SIGNING", signing)
    if command in {"watch", "download", "archive verify", "verify-sealed"}:
        service.call(service.sandbox.complete(signing))
    if command == "archive verify":
        assert run("archive", "contracts/").code == 0
    if command == "login":
        register_app(service, monkeypatch, f"http://127.0.0.1:{port}/callback")
        browse_with(monkeypatch, agree)
    if command == "verify-sealed":
        assert run("download", signing).code == 0


# The demo and the sandbox have tests of their own.
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", ["", *sorted(ALL.keys() - {"demo", "sandbox"})])
def test_examples_of_every_command_work_as_printed(
    name: str, run: Run, service: Service, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    prepare(name, run, service, monkeypatch, unused_tcp_port)
    receiver = Receiver(WebhookVerifier(SECRET), lambda event: None, body_timeout=1.0)
    with serve("aiohttp", receiver) if name == "webhook check" else contextlib.nullcontext() as port:
        for line in examples(ALL.get(name, cli.group)):
            ran = run_line(line.replace("http://localhost:8000/webhooks", f"http://127.0.0.1:{port}{PATH}"), run)
            assert ran.code == 0, f"{line}\n{ran.out}{ran.err}"


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


# Samples of the guides

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
# These need a browser, a broker, an endpoint or a port of their own: other tests run them.
NOT_RUN = ("login", "sandbox ", "webhook check", "dispatch leases.csv --broker")
FAILING = ("webhook verify", "webhook doctor", "show none")


def samples() -> Iterator[tuple[str, str]]:
    """Yield each guide's name and one of its blocks that has a command to run."""
    for path in (ROOT / "README.md", *sorted((ROOT / "signing_async").rglob("*.md"))):
        for block in _BLOCK.findall(path.read_text("utf-8")):
            if any(command for command, _ in commands_of(block)):
                yield str(path.relative_to(ROOT)), block


def commands_of(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block that can be run, each with the output that it shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        line = re.split(r"\s+#|\s\| ", line)[0].replace(" --follow", "")
        is_run = "signing-async " in line and not any(f"signing-async {name}" in f"{line} " for name in NOT_RUN)
        if is_run and not line.startswith("pip"):
            yield line, output
        elif line.startswith("export ") and "example.com" not in line and "…" not in line:
            yield line, ""


SAMPLES = list(samples())


@pytest.mark.parametrize(
    ("name", "block"), SAMPLES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(SAMPLES)]
)
def test_console_sample_runs_and_prints_what_it_shows(
    name: str, block: str, files: None, run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = hmac.new(SECRET.encode(), b"1700000000." + Path("delivery.json").read_bytes(), hashlib.sha256)
    monkeypatch.setenv("SIGNATURE", signed.hexdigest())
    Path("signed").mkdir()
    Path("roots.pem").write_bytes(sandbox_authority().certificate_pem)
    for path in ("lease-signed.pdf", "signed/lease-signed.pdf"):
        Path(path).write_bytes(sealed_by_sandbox("B-LTA"))
    if "archive status" in block:
        assert run("dispatch", "leases.csv").code == 0
        service.draft("a.pdf", to=("anna@example.com",), completed=True)
    for line, shown in commands_of(block):
        words = shlex.split(os.path.expandvars(line))
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("=", 1))
            continue
        variable = re.match(r"(\w+)=\$\((.*)\)", line)
        words = shlex.split(variable[2]) if variable else words
        if words[1] == "watch":
            service.call(service.sandbox.complete(words[2]))
        ran = run(*words[1:])
        assert ran.code == line.removeprefix("signing-async ").startswith(FAILING), f"{line}\n{ran.err}"
        if variable:
            monkeypatch.setenv(variable[1], ran.out.strip())
        printed = ran.out or ran.err
        assert not shown or re.fullmatch(_pattern(shown), printed), f"{line}\n{printed}"


def _pattern(shown: str) -> str:
    """Return a pattern for a sample: numbers may differ, and ``...`` stands for anything."""
    return re.sub(r"\d+", r"\\d+", re.escape(shown).replace(r"\.\.\.", ".*"))
