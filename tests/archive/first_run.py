"""A first run over many signings: ``python -m tests.archive.first_run --signings 10000``.

A sandbox holds completed signings of two documents each. A process sweeps over them, is killed in the middle, and a
second one goes on. Reported are the memory of each, the time of each tenth, and how many documents were fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from signing_async import SigningClient
from signing_async.archive import Archive, verify_archive
from signing_async.sandbox import Sandbox
from tests.archive.tenants import completed, count

SWEEP = "import sys; from tests.archive.first_run import sweep; sweep(*sys.argv[1:])"


def memory_peak() -> float:
    """Return the most memory that this process has used, in MB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def sweep(base_url: str, token: str, folder: str, report_each: str) -> None:
    """Sweep once; report documents, seconds and memory as they grow."""
    asyncio.run(_sweep(base_url, token, Path(folder), int(report_each)))


async def _sweep(base_url: str, token: str, folder: Path, report_each: int) -> None:
    began, done = time.monotonic(), 0
    async with (
        SigningClient(base_url, token) as client,
        Archive(client, folder / "archive", journal=folder / "the.journal") as archive,
    ):
        async for result in archive.sweep():
            if result.error is not None:
                raise result.error
            done += 1
            if done % report_each == 0:
                print(f"{done} documents, {time.monotonic() - began:.1f} s, {memory_peak():.1f} MB", flush=True)
    print(f"end: {done} documents, {time.monotonic() - began:.1f} s, {memory_peak():.1f} MB", flush=True)


async def fill(sandbox: Sandbox, client: SigningClient, signings: int) -> None:
    """Complete signings of two documents."""
    numbers = iter(range(signings))

    async def some() -> None:
        for number in numbers:
            await completed(sandbox, client, f"Lease {number}")

    await asyncio.gather(*(some() for _ in range(4)))


@dataclass
class Outcome:
    """What three runs did: one that was killed, one that went on, one that found everything done."""

    memory: list[list[float]] = field(default_factory=list)
    """The memory of each run in MB, as it grew."""
    fetched: list[int] = field(default_factory=list)
    """The downloads after each run."""
    documents: int = 0
    findings: tuple[object, ...] = ()


async def run(signings: int) -> Outcome:
    """Fill a sandbox, and archive its signings."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        async with Sandbox(seed=1, keep_requests=1_000_000) as sandbox:
            async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
                await fill(sandbox, client, signings)
            each = max(1, signings // 5)
            arguments = [sys.executable, "-c", SWEEP, sandbox.base_url, sandbox.access_token(), name, str(each)]
            for is_killed in (True, False, False):
                process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
                assert process.stdout is not None
                memory: list[float] = []
                outcome.memory.append(memory)
                for number in itertools.count(1):
                    line = await process.stdout.readline()
                    print(line.decode().strip(), flush=True)
                    memory += [float(line.split()[-2])] if line else []
                    if is_killed and number == 5:
                        process.kill()
                    if not line:
                        break
                await process.wait()
                outcome.fetched.append(count(sandbox)["documents.download_signed"])
            report = await verify_archive(Path(name) / "archive")
            print(f"requests: {dict(count(sandbox))}; downloads after each run: {outcome.fetched}")
            print(f"{report.documents} documents, {report.size} bytes, findings: {report.findings[:5]}")
            outcome.documents, outcome.findings = report.documents, report.findings
    return outcome


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signings", type=int, default=1000)
    signings = parser.parse_args().signings
    outcome = asyncio.run(run(signings))
    sys.exit(bool(outcome.findings) or outcome.documents != 2 * signings)


if __name__ == "__main__":
    main()
