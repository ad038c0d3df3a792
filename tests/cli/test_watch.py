"""`watch`: what it prints, and its exit codes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.service import Service

WATCH = ("--poll", "0.05")


def _soon(service: Service, *steps: Callable[[], object]) -> threading.Thread:
    """Run these steps in a thread, each after the watch has read the signing again."""

    def work() -> None:
        for step in steps:
            reads = len(service.sandbox.requests_of("recipients.list"))
            while len(service.sandbox.requests_of("recipients.list")) < reads + 2:
                time.sleep(0.01)
            step()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_watch_prints_a_line_per_change_until_completion(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    anna, _ = service.do(service.sandbox.recipients, signing)
    thread = _soon(
        service,
        lambda: service.call(service.sandbox.sign(anna.id)),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH)
    thread.join()
    assert (ran.code, ran.err) == (0, "")
    printed = [line.split("  ", 1)[1] for line in ran.out.splitlines()]
    assert printed[0] == "Lease is sent"
    assert printed[1] == f"{anna.email} has signed"
    assert sorted(printed[2:]) == ["Lease is completed", "bo@example.com has signed", "lease.pdf is signed"]


def test_watch_as_json_prints_a_whole_object_per_change(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    thread = _soon(service, lambda: service.call(service.sandbox.complete(signing)))
    ran = run("watch", signing, *WATCH, "--json")
    thread.join()
    # In between, a read may find the signing signed but not yet sealed.
    assert [line["state"] for line in ran.lines] in (["sent", "completed"], ["sent", "sent", "completed"])
    assert ran.lines[-1]["recipients"][0]["finished"] is True
    assert ran.lines[-1]["documents"][0]["completed_at"]


def test_watch_exits_with_6_for_a_cancelled_signing(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.cancel(signing))
    ran = run("watch", signing)
    assert (ran.code, ran.err) == (6, f"Error: {signing} was cancelled\n")
    assert run("watch", signing, "--json").error["exit_code"] == 6


def test_watch_exits_with_5_when_its_time_is_up(run: Run, service: Service) -> None:
    signing = service.draft(name="Draft")
    ran = run("watch", signing, *WATCH, "--for", "3")
    assert (ran.code, ran.err) == (5, f"Error: {signing} was not completed within 3 s\n")
    assert "Draft is draft" in ran.out


def test_watch_waits_out_an_outage_with_a_warning_but_not_at_the_start(
    run: Run, service: Service, tmp_path: Path
) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    thread = _soon(
        service,
        lambda: service.do(service.sandbox.faults.add, "signings.get", "500", 2),
        lambda: service.call(service.sandbox.complete(signing)),
    )
    ran = run("watch", signing, *WATCH, "--config", _once(tmp_path))
    thread.join()
    assert ran.code == 0
    assert "Warning: still watching: HTTP 500" in ran.err
    service.do(service.sandbox.faults.add, "signings.get", "500", 1)
    assert run("watch", signing, "--config", _once(tmp_path)).code == 1


def _once(folder: Path) -> str:
    """Return a settings file that allows no retries."""
    path = folder / "once.toml"
    path.write_text("max_attempts = 1\n")
    return str(path)


def test_timeout_of_the_first_call_is_a_request_timeout_and_not_the_end_of_the_wait(run: Run, service: Service) -> None:
    service.do(service.sandbox.faults.add, "signings.get", "slow", None, seconds=5)
    ran = run("watch", "1", "--for", "60", "--timeout", "0.2", "--json")
    assert (ran.code, ran.error["type"]) == (1, "RequestTimeout")
