"""Output: tables, times, colours and JSON, and that no name reaches into the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import piped, screen
from tests.pdfs import make_pdf


def test_characters_missing_from_an_encoding_are_escaped(service: Service) -> None:
    service.draft(name="Båthus…")
    latin = {**service.environment, "PYTHONIOENCODING": "latin-1"}
    assert b"B\xe5thus\\u2026" in piped("list", environment=latin, text=False)[1]
    plain = {**service.environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    assert json.loads(piped("list", "--json", environment=plain)[1])["name"] == "Båthus…"


def test_colours_on_a_terminal_without_no_color_and_no_controls_in_pipes(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.draft(name="Lease")
    without, dumb = {"NO_COLOR": "1"}, {"TERM": "dumb"}
    assert b"\x1b[33mdraft" in screen("list").raw
    assert b"\x1b[33m" not in screen("list", environment=without).raw
    assert b"\x1b" not in screen("list", environment=dumb).raw
    assert b"\x1b[31m" in screen("show", "none", environment={"NO_COLOR": ""}).raw
    assert b"\x1b" not in screen("show", "none", environment=without).raw
    assert b"\x1b" not in screen("watch", "none", environment=dumb).raw
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "\x1b" not in run("list").out


def test_list_fits_narrow_terminals_and_keeps_the_id_whole_and_the_name(service: Service) -> None:
    """Other columns are left out first."""
    signing = service.draft(name="Boat house with a name that is much too long for a terminal such as this one is")
    for columns, header in ((50, "ID NAME"), (60, "ID STATE NAME"), (120, "ID STATE UPDATED NAME")):
        lines = screen("list", columns=columns, environment=service.environment).text.splitlines()
        assert all(len(line.rstrip()) <= columns for line in lines)
        assert len(lines) == 2
        assert lines[1].rstrip().endswith("…")
        assert lines[0].split() == header.split()
        assert lines[1].startswith(signing)
        assert "  Boat house" in lines[1]


def test_times_are_relative_on_a_terminal_and_dates_if_far_away(service: Service) -> None:
    service.draft(name="Lease")
    assert "  just now  " in screen("list", columns=120, environment=service.environment).text
    service.do(service.sandbox.clock.advance, days=100)
    service.draft(name="Later")
    assert re.search(r"  20\d\d-\d\d-\d\d  Later", screen("list", columns=120, environment=service.environment).text)


def test_newlines_in_names_and_messages_cannot_forge_a_fact(run: Run) -> None:
    signing = run("create", "Lease\nstate  completed", "--message", "Sign\nstate  completed").out.strip()
    printed = run("show", signing).out
    assert printed.startswith("Lease state  completed\nid  ")
    assert "\nmessage        Sign\n               state  completed\n" in printed
    ran = run("watch", signing, "--for", "0.5")
    assert ran.err == f"Error: {signing} was not completed within 0.5 s\n"
    assert (ran.code, len(ran.out.splitlines())) == (5, 1)


EVIL = "\x1b]0;title\x07\x1b[31m\u202ex\nError: forged\r\u2028"


def respond(request: web.Request) -> Any:
    """Put control characters and newlines into every text."""
    path = request.path
    if path.endswith(("/send", "/remind", "/download-signed")):
        return web.json_response({"code": EVIL, "message": EVIL, "errors": {EVIL: [EVIL]}}, status=400)
    names = ("id", "name", "email", "message", "language", "first_name", "signing_method")
    record: dict[str, object] = dict.fromkeys(names, EVIL)
    record = {**record, "is_draft": False, "documents": [{**record, "id": "1"}, record], EVIL: EVIL}
    return [record] if request.method == "GET" and path.endswith(("/signings", "/recipients")) else record


def test_texts_of_the_service_cannot_control_the_terminal_or_start_a_line(run: Run) -> None:
    Path("a.pdf").write_bytes(make_pdf())
    with listening(respond) as server:
        for arguments in (
            *("me", "list", "show x", "create x", "upload x a.pdf", "add-recipient x a@example.com", "send x"),
            *("remind x --all-pending", "watch x --for 0.3", "download x --all", "doctor --check-only"),
        ):
            ran = run(*arguments.split(), SIGNING_BASE_URL=server.origin)
            shown = f"{ran.out}\n{ran.err}"
            assert shown.strip()
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", shown), arguments
            assert "\nError: forged" not in shown
