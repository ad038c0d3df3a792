"""Fixtures of the sandbox's own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from signing_async.sandbox import Sandbox
from tests import pdfs
from tests.sandbox.receiving import SECRET, Receiver
from tests.sandbox.seals import NAMES, WHEN, Authority, Panel, make_panel, seal
from tests.sandbox.serving import Caller, caller
from tests.sandbox.token_requests import CALLBACK


@pytest_asyncio.fixture
async def call(signing_sandbox: Sandbox) -> AsyncIterator[Caller]:
    """A caller of the API with the default user's token."""
    async with caller(signing_sandbox) as call:
        yield call


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One authority for all tests."""
    return Authority.open(tmp_path_factory.mktemp("authority"), WHEN)


@pytest.fixture
def sealed(tmp_path: Path, authority: Authority) -> Callable[..., bytes]:
    """Return a function that seals bytes into tmp_path/sealed.pdf and leaves no other file."""

    def make(data: bytes, panel: Panel | None = None, when: datetime = WHEN) -> bytes:
        folder = tmp_path / "documents"
        folder.mkdir(exist_ok=True)
        source, target = folder / "original.pdf", folder / "sealed.pdf"
        source.write_bytes(data)
        seal(source, target, panel=panel or make_panel(*NAMES), authority=authority, when=when)
        assert sorted(folder.iterdir()) == [source, target]
        assert source.read_bytes() == data
        return target.read_bytes()

    return make


@pytest.fixture(scope="module")
def nss(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Path:
    """An NSS database that trusts the authority."""
    folder = tmp_path_factory.mktemp("nss")
    (folder / "ca.pem").write_bytes(authority.certificate_pem)
    pdfs.run("certutil", "-N", "-d", folder, "--empty-password")
    done = pdfs.run("certutil", "-A", "-d", folder, "-n", "ca", "-t", "CT,C,C", "-a", "-i", folder / "ca.pem")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/{name}", receiver.take)
    async with TestServer(app) as server:
        receiver.url = str(server.make_url("/hook"))
        yield receiver


@pytest.fixture
def hooked(signing_sandbox: Sandbox, receiver: Receiver) -> Sandbox:
    """A sandbox that delivers to the receiver."""
    signing_sandbox.webhooks.register(receiver.url, SECRET)
    return signing_sandbox


@pytest.fixture
def app(signing_sandbox: Sandbox) -> Any:
    """A registered application."""
    return signing_sandbox.register_app(redirect_uri=CALLBACK, name="My app")
