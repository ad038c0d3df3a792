"""A webhook endpoint that records deliveries and responds as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

SECRET = "a shared secret"


@dataclass
class Receiver:
    """An endpoint that records deliveries and responds as told: to /bad with 500, to /verbose with a body."""

    base: str = ""
    bodies: list[bytes] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)
    location: str = ""
    delay: float = 0

    async def take(self, request: web.Request) -> web.Response:
        """Record a delivery."""
        self.bodies.append(await request.read())
        self.signatures.append(request.headers["X-Signature"])
        await asyncio.sleep(self.delay)
        if request.path == "/verbose":
            return web.Response(text="<taken>", headers={"X-Reply": "yes", "Set-Cookie": "session=1"})
        status = 500 if request.path == "/bad" else self.responses.pop(0) if self.responses else 202
        return web.Response(status=status, headers={"Location": self.location} if self.location else None)

    @property
    def url(self) -> str:
        """The URL that responds with `responses`, and then with 202."""
        return f"{self.base}/hook"

    @property
    def events(self) -> list[tuple[str, str]]:
        """Types and ids of the deliveries."""
        return [(e["event"]["type"], e["event"]["id"]) for e in map(json.loads, self.bodies)]

    @property
    def types(self) -> list[str]:
        """Types of the deliveries."""
        return [kind for kind, _ in self.events]

    async def got(self, count: int) -> None:
        """Wait until so many deliveries have arrived."""
        await until(lambda: len(self.bodies) >= count)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
