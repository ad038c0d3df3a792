"""Seals documents in a thread, with an authority that is opened on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from .clock import Clock, to_datetime
from .files import Files
from .records import Document, Recipient, Signing

if TYPE_CHECKING:
    from .authority import Authority

Level: TypeAlias = Literal["B-B", "B-T", "B-LT", "B-LTA"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The PAdES levels; each adds to the previous level."""


class Sealer:
    """Seals documents with the sandbox's own certificate authority. pyHanko is imported with the first document."""

    def __init__(self, folder: Path, clock: Clock, level: Level) -> None:
        self._folder = folder
        self._clock = clock
        self._level: Level = level
        self._authority: Authority | None = None
        self._opening = asyncio.Lock()

    async def certificate_pem(self) -> bytes:
        return (await self._open()).certificate_pem

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
        authority = await self._open()
        from .panel import Panel, Signer
        from .sealing import seal

        signers = [Signer(r.full_name, r.email, r.signing_method, to_datetime(at)) for r, at in signed]
        panel = Panel(signing.name, document.name, document.id, signers)
        source, target, when = files.path(document.file), files.path(name), to_datetime(now)
        await asyncio.to_thread(seal, source, target, panel=panel, authority=authority, when=when, level=self._level)

    async def _open(self) -> Authority:
        async with self._opening:
            if self._authority is None:
                self._authority = await asyncio.to_thread(self._load)
            return self._authority

    def _load(self) -> Authority:
        from .authority import Authority

        return Authority.open(self._folder, self._clock.now())
