"""Seals documents in a thread, with an authority that is opened on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .authority import Level
from .clock import Clock, to_datetime
from .files import Files
from .records import Document, Recipient, Signing
from .refused import Refused


class Sealer:
    """Seals documents with the sandbox's own certificate authority."""

    def __init__(self, folder: Path, clock: Clock, level: Level) -> None:
        self._folder = folder
        self._clock = clock
        self._level: Level = level
        self._authority: Any = None
        self._opening = asyncio.Lock()

    async def certificate_pem(self) -> bytes:
        """Return the authority's certificate."""
        pem: bytes = (await self._open()).certificate_pem
        return pem

    async def seal(
        self,
        files: Files,
        document: Document,
        name: str,
        signing: Signing,
        signed: Sequence[tuple[Recipient, int]],
        now: int,
    ) -> None:
        """Write the sealed document to the file `name`."""
        from . import sealing

        panel = sealing.Panel(
            signing.name,
            document.name,
            document.id,
            [sealing.Signer(r.full_name, r.email, r.signing_method, to_datetime(at)) for r, at in signed],
        )
        authority = await self._open()
        source, target, when = files.path(document.file), files.path(name), to_datetime(now)
        try:
            await asyncio.to_thread(
                sealing.seal, source, target, panel=panel, authority=authority, when=when, level=self._level
            )
        except sealing.SealingFailed as error:
            raise Refused(409, "cannot_be_sealed", str(error)) from error

    async def _open(self) -> Any:
        from . import sealing

        async with self._opening:
            self._authority = self._authority or await asyncio.to_thread(
                sealing.Authority.open, self._folder, self._clock.now()
            )
        return self._authority
