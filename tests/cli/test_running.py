"""How commands end and speak: exit codes, errors, interruptions, pipes, terminals of all kinds."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest

from signing_async import Document, Signing, Token, cli, errors
from signing_async.cli import exits
from signing_async.cli.command import State
from signing_async.cli.output import Output, ago, iso
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import COMMAND, ROOT, Terminal, piped, screen
from tests.pdfs import make_pdf


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ServerError("x", status=500), 1),
        (errors.RequestTimeout("x"), 1),
        (errors.DecodeError("x"), 1),
        (OSError("x"), 1),
        (errors.ConfigurationError("x"), 2),
        (errors.PdfRejected("x", reason="not_pdf", filename="x"), 2),
        (errors.OutcomeUnknown("x"), 3),
        (errors.OutcomeUnknownTimeout("x"), 3),
        (errors.Unauthorized("x", status=401), 4),
        (errors.Forbidden("x", status=403), 4),
        (errors.RefreshRejected("x"), 4),
        (errors.WaitTimeout("x"), 5),
        (errors.SigningCancelled("x"), 6),
    ],
)
def test_what_an_error_is_to_a_script(error: Exception, code: int) -> None:
    """Each kind has its exit code, and that is documented."""
    assert exits.code_of(error) == code
    assert code in exits.CODES
    assert exits.facts_of(error)["exit_code"] == code


def test_what_is_known_of_an_unknown_outcome(capfd: pytest.CaptureFixture[str]) -> None:
    """Machines are told of it too: it is what there is to decide by."""
    signing = Signing("s-1", is_draft=True, documents=(Document("d-1", name="lease.pdf"),), extra={"owner": {"id": 7}})
    error = errors.OutcomeUnknown("it is not known", known=[signing])
    Output(json=True).error("it is not known", exits.facts_of(error))
    (known,) = json.loads(capfd.readouterr().err)["error"]["known"]
    assert (known["id"], known["is_draft"], known["documents"][0]["name"]) == ("s-1", True, "lease.pdf")
    assert known["extra"] == {"owner": {"id": 7}}


def test_several_errors_are_one_exit_code() -> None:
    """An unknown outcome is the gravest; otherwise one code only where all agree, and nothing was done."""
    unknown, usage, failed = errors.OutcomeUnknown("x"), errors.InvalidRequest("x"), errors.DecodeError("x")
    assert exits.code_of_all([], done=2) == 0
    assert exits.code_of_all([usage, usage], done=0) == 2
    assert exits.code_of_all([usage, usage], done=1) == 1
    assert exits.code_of_all([usage, failed], done=0) == 1
    assert exits.code_of_all([usage, unknown, failed], done=1) == 3


def test_errors_for_machines(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON on standard error, also of a call that is wrong; nothing on standard output."""
    for arguments, kind, code in (
        (["list", "--nope", "--json"], "NoSuchOption", 2),
        (["show", "--json"], "MissingParameter", 2),
        (["show", "..", "--json"], "InvalidRequest", 2),
        (["show", "none", "--json"], "NotFound", 1),
        (["me", "--base-url", "x", "--json"], "ConfigurationError", 2),
        (["me", "--json", "--timeout", "0.1"], "TransportError", 1),
    ):
        if kind == "TransportError":
            monkeypatch.setenv("SIGNING_BASE_URL", "http://127.0.0.1:1")
        ran = run(*arguments)
        assert (ran.code, ran.out) == (code, "")
        assert (ran.error["type"], ran.error["exit_code"]) == (kind, code)
        assert ran.error["message"]
        assert kind != "NotFound" or ran.error["request_id"].startswith("req_")


def test_common_options_stand_before_and_after(run: Run, tmp_path: Path) -> None:
    """The command's name, also that of a group; the later one counts."""
    assert "'none' does not exist" in run("webhook", "--json", "verify", "none").error["message"]
    for arguments in (
        ["--base-url", "x", "me"],
        ["me", "--base-url", "x"],
        ["--base-url", "y", "me", "--base-url", "x"],
    ):
        assert "not 'x' (--base-url)" in run(*arguments).err
    (tmp_path / "settings.toml").write_text('base_url = "z"')
    assert "settings.toml" in run("me", "--config", "settings.toml", "--base-url", "https://x.example.com").err
    assert run("--json", "me").lines[0]["email"]


def test_verbose_shows_every_attempt(run: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """With status, time, request id, error and the wait that follows; as JSON for machines."""
    service.do(service.sandbox.faults.add, "me", "500", 1)
    ran = run("me", "-v")
    first, second = ran.err.splitlines()
    assert re.fullmatch(r"me, attempt 1: HTTP 500 in \d+ ms \(req_\w+\) - HTTP 500 .*; again in [\d.]+ s", first)
    assert re.fullmatch(r"me, attempt 2: HTTP 200 in \d+ ms \(req_\w+\)", second)
    monkeypatch.setenv("SIGNING_BASE_URL", "http://127.0.0.1:1")
    ran = run("me", "--verbose", "--json", "--timeout", "0.1")
    told = json.loads(ran.err.splitlines()[0])["attempt"]
    assert (told["operation"], told["status"]) == ("me", None)
    assert "no answer" in run("me", "-v", "--timeout", "0.1").err


def test_warnings_of_the_package_are_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    """A sentence on standard error, or JSON; nobody's after the command."""
    log = logging.getLogger("signing_async")
    before = list(log.handlers)
    for as_json, said in ((False, "Warning: a refresh failed\n"), (True, '{"warning": "a refresh failed"}\n')):
        state = State()
        state.json = as_json
        with state._warnings():
            log.warning("a %s failed", "refresh")
        assert capfd.readouterr().err == said
    assert log.handlers == before


def test_ctrl_c_in_a_terminal(service: Service) -> None:
    """Exit code 130 and a sentence; the cursor is back, and there is no traceback."""
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    terminal = Terminal("watch", signing, environment=service.environment)
    terminal.wait_for("pending")
    terminal.type("\x03")
    ended = terminal.end()
    assert ended.code == 130
    assert ended.text.endswith("Error: interrupted\n")
    assert "Traceback" not in ended.text
    assert ended.raw.rindex(b"\x1b[?25h") > ended.raw.rindex(b"\x1b[?25l")


def test_ctrl_c_while_something_is_changed(service: Service) -> None:
    """It is said that it may have taken effect."""
    service.do(service.sandbox.faults.add, "signings.create", "hang")
    terminal = Terminal("create", "Lease", environment=service.environment)
    while (
        not service.do(service.sandbox.requests_of, "signings.create") and not service.sandbox.faults.arranged[0].hits
    ):
        time.sleep(0.02)
    terminal.type("\x03")
    ended = terminal.end()
    assert (ended.code, "Traceback" in ended.text) == (130, False)
    assert "interrupted; a request that was under way may have taken effect" in ended.text


def test_ctrl_c_at_a_question(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a plain end as well."""
    monkeypatch.delenv("SIGNING_ACCESS_TOKEN")
    terminal = Terminal("login")
    terminal.wait_for("client id")
    ended = terminal.interrupt()
    assert (ended.code, "Traceback" in ended.text) == (130, False)


class Stalled(BaseHTTPRequestHandler):
    """A service whose download stops in the middle, until it is let go on."""

    go_on = threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("/download-signed"):
            self.send_response(200)
            self.send_header("Content-Length", str(5 * 2**20))
            self.end_headers()
            self.wfile.write(b"%PDF-1.7\n" + bytes(2**20))
            self.go_on.wait(30)
            return
        content = json.dumps({"id": "1", "is_draft": False, "documents": [{"id": "d", "name": "lease.pdf"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def listening(service: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), service) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def stalled() -> Iterator[str]:
    """The origin of one that is."""
    Stalled.go_on.clear()
    with listening(Stalled) as origin:
        try:
            yield origin
        finally:
            Stalled.go_on.set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_half_a_file_is_never_left(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """A download that is stopped by Ctrl-C or SIGTERM leaves nothing behind."""
    with stalled() as origin:
        environment = {"SIGNING_BASE_URL": origin, "SIGNING_ACCESS_TOKEN": "token-of-the-test"}
        terminal = Terminal("download", "1", cwd=tmp_path, environment=environment)
        end = time.monotonic() + 20
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.02)
        terminal.signal(number)
        ended = terminal.end()
    assert (ended.code, "Traceback" in ended.text, list(tmp_path.iterdir())) == (code, False, [])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--json"], 141), (["list"], 141), (["completion", "bash"], 141), (["demo"], 141),
        (["demo", "--json"], 141), (["sandbox", "--port", "0"], 141), (["--help"], 1),
    ],
)  # fmt: skip
def test_a_reader_that_has_seen_enough(arguments: list[str], code: int, service: Service) -> None:
    """`| head` is quiet; nobody reads any more here."""
    service.draft(name="Lease")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        ran = subprocess.run(
            [*COMMAND, *arguments],
            env={**os.environ, **service.environment, "PYTHONPATH": str(ROOT)},
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (code, "")


def test_a_disk_that_is_full(service: Service) -> None:
    """Is a sentence, and a failure."""
    service.draft()
    for arguments in (["list", "--json"], ["completion", "bash"]):
        with Path("/dev/full").open("w") as full:
            ran = subprocess.run(
                [*COMMAND, *arguments],
                env={**os.environ, **service.environment, "PYTHONPATH": str(ROOT)},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert ran.returncode == 1
        assert "the output cannot be written: No space left on device" in ran.stderr
        assert ran.stderr.count("\n") == 1


def test_streams_that_are_closed(service: Service) -> None:
    """Are nothing to fail for; no file and no connection takes their place."""
    script = f"{sys.executable} -c 'from signing_async.cli import main; main()' me <&- >&-"
    env = {**os.environ, **service.environment, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_stream_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Takes what it is given."""
    monkeypatch.setattr(sys, "stdout", None)
    cli._fill_streams()
    print("x", flush=True)
    assert capfd.readouterr().out == "x\n"


def test_a_terminal_that_knows_no_unicode(service: Service) -> None:
    """Shows it as well as it can; JSON is the same everywhere."""
    service.draft(name="Båthus…")
    latin = {**service.environment, "PYTHONIOENCODING": "latin-1"}
    assert b"B\xe5thus\\u2026" in screen("list", environment=latin).raw
    plain = {**service.environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    assert json.loads(piped("list", "--json", environment=plain).stdout)["name"] == "Båthus…"
    assert "Båthus…" in piped("list", environment={**service.environment, "LC_ALL": "C"}).stdout


def test_colours(service: Service) -> None:
    """On a terminal, not with NO_COLOR; no control at all on a dumb one or in a pipe."""
    service.draft(name="Lease")
    with_colours = service.environment
    without, dumb = {**with_colours, "NO_COLOR": "1"}, {**with_colours, "TERM": "dumb"}
    assert b"\x1b[33mdraft" in screen("list", environment=with_colours).raw
    assert b"\x1b[33m" not in screen("list", environment=without).raw
    assert b"\x1b" not in screen("list", environment=dumb).raw
    assert "\x1b" not in piped("list", environment={**with_colours, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}).stdout
    assert b"\x1b[31m" in screen("show", "none", environment={**with_colours, "NO_COLOR": ""}).raw
    assert b"\x1b" not in screen("show", "none", environment=without).raw
    assert b"\x1b" not in screen("watch", "none", environment=dumb).raw


@pytest.mark.parametrize("columns", [40, 60, 120])
def test_terminals_of_any_width(columns: int, service: Service) -> None:
    """Rows keep to one line; the id is whole."""
    signing = service.draft(name="A lease with a name that is much too long for a terminal such as this one is")
    shown = screen("list", columns=columns, environment=service.environment).text
    assert signing in shown
    assert all(len(line.rstrip()) <= columns for line in shown.splitlines())
    assert len(shown.splitlines()) == 2


def test_times_as_people_say_them() -> None:
    """From moments to days; then the date."""
    now = datetime(2031, 3, 31, 12, tzinfo=UTC)
    for before, said in (
        (timedelta(seconds=30), "just now"),
        (timedelta(seconds=-30), "just now"),
        (timedelta(minutes=3), "3 min ago"),
        (timedelta(hours=5), "5 h ago"),
        (timedelta(days=3), "3 d ago"),
    ):
        assert ago(now - before, now=now) == said
    assert re.fullmatch(r"2030-0[34]-\d\d", ago(now - timedelta(days=365), now=now))
    assert ago(now + timedelta(days=1), now=now).startswith("2031-0")
    assert (ago(None), iso(None)) == ("", "")
    assert datetime.fromisoformat(iso(now)) == now


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_moments_at_the_ends_of_time(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some services write "never" so: they are shown, also where this machine's time zone would leave the calendar."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for moment in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
            assert iso(moment)[:3] in ("000", "999")
            assert ago(moment)[:3] in ("000", "999")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "arguments", ["watch x --for", "watch x --poll", "login --wait", "webhook check x --slow-limit"]
)
def test_seconds_that_are_no_number(arguments: str, run: Run) -> None:
    """Are refused, as those are that are out of bounds."""
    for text in ("nan", "-1", "soon"):
        ran = run(*arguments.split(), text)
        assert (ran.code, ran.out) == (2, "")
        assert re.search(rf"'{arguments.split()[-1]}': .*{text}", ran.err)


def test_what_json_does_not_know(capfd: pytest.CaptureFixture[str]) -> None:
    """Moments and records become what JSON has; a token shows nothing."""
    out = Output(json=True)
    out.result({"moment": datetime(2031, 1, 1, tzinfo=UTC), "path": Path("/x"), "token": Token("hunter2")})
    told = capfd.readouterr().out
    assert json.loads(told)["moment"] == "2031-01-01T00:00:00+00:00"
    assert "hunter2" not in told


def test_a_module_of_an_extra_that_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, with what to install."""
    monkeypatch.delitem(sys.modules, "signing_async.cli.demo", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    ran = run("demo")
    assert (ran.code, ran.err) == (1, "Error: demo needs the module aiohttp: pip install 'signing-async[all]'\n")


def test_a_file_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error of the system that no command foresees is a sentence too."""

    def fail(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(cli.group, "main", fail)
    monkeypatch.setattr(cli, "discard_output", lambda: None)
    assert cli.run([]) == 1
    assert capfd.readouterr().err == "Error: /somewhere: Permission denied\n"


def test_help_is_quick() -> None:
    """It loads neither the network nor the tables."""
    heavy = ("aiohttp", "attrs", "rich", "asyncio", "signing_async.client")
    script = "import sys; from signing_async.cli import run; run(['--help']); "
    script += f"print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, run: Run) -> None:
    """A script for each shell; it completes names of commands and of options."""
    ran = run("completion", shell)
    assert ran.code == 0
    assert "_SIGNING_ASYNC_COMPLETE" in ran.out
    assert json.loads(run("completion", shell, "--json").out)["script"].strip() == ran.out.strip()


@pytest.mark.parametrize(
    ("words", "among"),
    [
        ("signing-async up", "upload"),
        ("signing-async list --st", "--state"),
        ("signing-async list --state dr", "draft"),
    ],
)
def test_what_is_completed(words: str, among: str) -> None:
    """As bash would ask."""
    asked = {"_SIGNING_ASYNC_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ran = piped(environment=asked)
    assert f"plain,{among}" in ran.stdout.splitlines()


def test_completion_needs_no_extra(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Names are completed without a look at the commands; the options of one that cannot be loaded are none."""
    for module in ("demo", "sandbox", "dispatch"):
        monkeypatch.delitem(sys.modules, f"signing_async.cli.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setenv("_SIGNING_ASYNC_COMPLETE", "zsh_complete")
    for words, among in (
        ("signing-async d", "demo"),
        ("signing-async --ver", "--version"),
        ("signing-async demo --", ""),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            cli.run([])
        told = capfd.readouterr()
        assert (among in told.out.splitlines(), told.err) == (bool(among), "")
    assert "signing_async.cli.dispatch" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lst", "Error: No such command 'lst'; did you mean 'list'?\n"),
        ("frobnicate", "Error: No such command 'frobnicate'.\n"),
    ],
)
def test_a_command_that_there_is_not(name: str, words: str, run: Run) -> None:
    """One that is close is named."""
    ran = run(name)
    assert ran.code == 2
    assert ran.err.endswith(words)


def test_nothing_that_a_name_holds_passes_for_a_fact(run: Run, service: Service) -> None:
    """Its line breaks are none, and a message's further lines are set in."""
    signing = run("create", "Lease\nstate  completed", "--message", "Sign\nstate  completed").out.strip()
    told = run("show", signing).out
    assert told.startswith("Lease state  completed\nid     ")
    assert "\nmessage   Sign\n          state  completed\n" in told
    ran = run("watch", signing, "--for", "0.5")
    assert (ran.code, len(ran.out.splitlines())) == (5, 1)


EVIL = "\x1b]0;title\x07\x1b[31m\u202ex\nError: forged\r\u2028"


class Hostile(BaseHTTPRequestHandler):
    """A service that puts controls and line breaks into every text."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        record = dict.fromkeys(("id", "name", "email", "message", "language", "first_name", "signing_method"), EVIL)
        refused = self.path.endswith(("/send", "/remind", "/download-signed"))
        answer: object = {**record, "is_draft": False, "documents": [record], EVIL: EVIL}
        if refused:
            answer = {"code": EVIL, "message": EVIL, "errors": {EVIL: [EVIL]}}
        elif self.command == "GET" and self.path.partition("?")[0].endswith(("/signings", "/recipients")):
            answer = [answer]
        body = json.dumps(answer).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer  # noqa: N815  # what the server calls

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    "arguments",
    [
        "me", "list", "show x", "create x", "upload x a.pdf", "add-recipient x a@example.com", "send x",
        "remind x --all-pending", "watch x --for 0.3", "download x", "doctor --check-only",
    ],
)  # fmt: skip
def test_a_service_reaches_into_no_terminal(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No control of its gets there, and no line begins with its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "a.pdf").write_bytes(make_pdf())
    monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "the-token")
    with listening(Hostile) as origin:
        monkeypatch.setenv("SIGNING_BASE_URL", origin)
        cli.run(arguments.split())
    shown = "\n".join(capfd.readouterr())
    assert shown.strip()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", shown)
    assert "\nError: forged" not in shown


def test_state_ends_a_command() -> None:
    """0 goes on."""
    State().end(0)
    with pytest.raises(click.exceptions.Exit) as caught:
        State().end(3)
    assert caught.value.exit_code == 3
