"""The process that is killed: it dispatches one package, and writes the spans that have ended to a file.

``python -m tests.telemetry.victim BASE_URL TOKEN FOLDER``
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from signing_async import NewRecipient, SigningClient, SigningPackage
from tests.pdfs import make_pdf

KEY = "key-of-anna"


def package(folder: Path) -> SigningPackage:
    path = folder / "lease-of-anna.pdf"
    if not path.exists():
        path.write_bytes(make_pdf())
    return SigningPackage("Lease of Anna", "EN", [path], [NewRecipient("anna@example.com")], key=KEY)


async def _dispatch(base_url: str, token: str, folder: Path) -> None:
    async with SigningClient(base_url, token) as client:
        await client.dispatch(package(folder), journal=folder / "journal")


def main(base_url: str, token: str, folder: str) -> None:
    provider = TracerProvider()
    with Path(folder, "spans.jsonl").open("w", buffering=1) as out:
        exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        asyncio.run(_dispatch(base_url, token, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
