"""Output: tables, times, colours and JSON, and that no name reaches into the terminal."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from signing_async.cli import app as cli
from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import piped, screen
from tests.pdfs import make_pdf


def test_characters_missing_from_the_terminals_encoding_are_escaped(service: Service) -> None:
    service.draft(name="Båthus…")
    latin = {**service.environment, "PYTHONIOENCODING": "latin-1"}
    assert b"B\xe5thus\\u2026" in screen("list", environment=latin).raw
    plain = {**service.environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    assert json.loads(piped("list", "--json", environment=plain).stdout)["name"] == "Båthus…"
    assert "Båthus…" in piped("list", environment={**service.environment, "LC_ALL": "C"}).stdout


def test_colours_on_a_terminal_without_no_color_and_no_controls_in_pipes(service: Service) -> None:
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


@pytest.mark.parametrize(
    ("columns", "header"),
    [(50, ["ID", "NAME"]), (60, ["ID", "STATE", "NAME"]), (120, ["ID", "STATE", "UPDATED", "NAME"])],
)
def test_list_fits_narrow_terminals_and_keeps_the_id_whole_and_the_name(
    columns: int, header: list[str], service: Service
) -> None:
    """Other columns are left out first."""
    signing = service.draft(name="Boat house with a name that is much too long for a terminal such as this one is")
    lines = screen("list", columns=columns, environment=service.environment).text.splitlines()
    assert all(len(line.rstrip()) <= columns for line in lines)
    assert len(lines) == 2
    assert lines[1].rstrip().endswith("…")
    assert lines[0].split() == header
    assert lines[1].startswith(signing)
    assert "  Boat house" in lines[1]


def test_times_are_relative_on_a_terminal_and_dates_if_far_away(service: Service) -> None:
    service.draft(name="Lease")
    assert "  just now  " in screen("list", columns=120, environment=service.environment).text
    service.do(service.sandbox.clock.advance, days=100)
    service.draft(name="Later")
    assert re.search(r"  20\d\d-\d\d-\d\d  Later", screen("list", columns=120, environment=service.environment).text)


def test_newlines_in_names_and_messages_cannot_forge_a_fact(run: Run, service: Service) -> None:
    signing = run("create", "Lease\nstate  completed", "--message", "Sign\nstate  completed").out.strip()
    printed = run("show", signing).out
    assert printed.startswith("Lease state  completed\nid  ")
    assert "\nmessage        Sign\n               state  completed\n" in printed
    ran = run("watch", signing, "--for", "0.5")
    assert (ran.code, len(ran.out.splitlines())) == (5, 1)


EVIL = "\x1b]0;title\x07\x1b[31m\u202ex\nError: forged\r\u2028"


class Hostile(BaseHTTPRequestHandler):
    """A service that puts control characters and newlines into every text."""

    def _respond(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        record = dict.fromkeys(("id", "name", "email", "message", "language", "first_name", "signing_method"), EVIL)
        refused = self.path.endswith(("/send", "/remind", "/download-signed"))
        response: object = {**record, "is_draft": False, "documents": [record], EVIL: EVIL}
        if refused:
            response = {"code": EVIL, "message": EVIL, "errors": {EVIL: [EVIL]}}
        elif self.command == "GET" and self.path.partition("?")[0].endswith(("/signings", "/recipients")):
            response = [response]
        body = json.dumps(response).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _respond  # noqa: N815  # the names that http.server calls

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        "me", "list", "show x", "create x", "upload x a.pdf", "add-recipient x a@example.com", "send x",
        "remind x --all-pending", "watch x --for 0.3", "download x", "doctor --check-only",
    ],
)  # fmt: skip
def test_texts_of_the_service_cannot_control_the_terminal_or_start_a_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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
