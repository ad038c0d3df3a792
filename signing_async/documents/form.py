"""Multipart forms, streamed with known length."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from ..transport import wire

__all__ = ["FilePart", "form_body"]


class FilePart(Protocol):
    """A file of a form."""

    filename: str
    size: int

    async def write(
        self, write: wire.Write, most: int, sent: Callable[[int], None], before: bytes, after: bytes
    ) -> None:
        """Write the content between the other bytes of the form, at most ``most`` bytes at once."""


def form_body(fields: Mapping[str, str | FilePart], sent: Callable[[int], None]) -> wire.Body:
    """Return a form with these fields, for one attempt; report the progress of its files to ``sent``."""
    boundary = os.urandom(16).hex()
    # What comes before each file, and after the last one.
    parts, files = [b""], []
    for name, value in fields.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_escape(name)}"'
        if isinstance(value, str):
            parts[-1] += f"{head}\r\n\r\n{value}\r\n".encode()
            continue
        parts[-1] += f'{head}; filename="{_escape(value.filename)}"\r\nContent-Type: application/pdf\r\n\r\n'.encode()
        parts.append(b"\r\n")
        files.append(value)
    parts[-1] += f"--{boundary}--\r\n".encode()

    async def produce(write: wire.Write, most: int) -> None:
        *before, last = parts
        for file, part in zip(files[:-1], before[:-1], strict=True):
            await file.write(write, most, sent, part, b"")
        if files:
            await files[-1].write(write, most, sent, before[-1], last)
        else:
            await write(last)

    size = sum(map(len, parts)) + sum(file.size for file in files)
    return wire.Body(produce, size, f"multipart/form-data; boundary={boundary}")


def _escape(filename: str) -> str:
    """Escape as browsers do: UTF-8, with percent-encoding for what would end the header's value."""
    return filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
