"""The console samples of the README and the guides: every command runs, and prints what the sample shows."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import ROOT
from tests.sealed.pdfs import sandbox_authority, sealed_by_sandbox
from tests.webhooks.deliveries import SECRET

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
# These need a browser, a broker, an endpoint or a port of their own; `test_examples` and `test_workers` run them.
NOT_RUN = ("login", "sandbox ", "webhook check", "dispatch leases.csv --broker")
FAILING = ("webhook verify", "webhook doctor", "show none")


def samples() -> Iterator[tuple[str, str]]:
    """Yield each guide's name and one of its blocks that has a command to run."""
    for path in (ROOT / "README.md", *sorted((ROOT / "signing_async").rglob("*.md"))):
        for block in _BLOCK.findall(path.read_text("utf-8")):
            if any(command for command, _ in commands(block)):
                yield str(path.relative_to(ROOT)), block


def commands(block: str) -> Iterator[tuple[str, str]]:
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


@pytest.fixture
def prepared(sample_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the files and variables that the samples take for granted."""
    signed = hmac.new(SECRET.encode(), b"1700000000." + Path("delivery.json").read_bytes(), hashlib.sha256)
    monkeypatch.setenv("SIGNATURE", signed.hexdigest())
    Path("signed").mkdir()
    Path("roots.pem").write_bytes(sandbox_authority().certificate_pem)
    for path in ("lease-signed.pdf", "signed/lease-signed.pdf"):
        Path(path).write_bytes(sealed_by_sandbox("B-LTA"))


@pytest.mark.parametrize(
    ("name", "block"), SAMPLES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(SAMPLES)]
)
def test_console_sample_runs_and_prints_what_it_shows(
    name: str, block: str, prepared: None, run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "archive status" in block:
        assert run("dispatch", "leases.csv").code == 0
        service.draft("a.pdf", to=("anna@example.com",), completed=True)
    for line, shown in commands(block):
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
