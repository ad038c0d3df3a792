"""Fixtures that every test may use: a sandbox, and a client of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import uvloop

from signing_async import RetryPolicy, SigningClient
from signing_async.sandbox import Sandbox

if TYPE_CHECKING:
    from tests.postgres.server import PostgresServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--uvloop", action="store_true", help="run the async tests on uvloop")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--uvloop"):
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    # On a busy machine any example may take long.
    hypothesis.settings.register_profile("without deadline", deadline=None)
    hypothesis.settings.load_profile("without deadline")
    # In debug mode asyncio warns of slow callbacks, which a busy machine has at any time.
    logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing"))


@pytest.fixture(autouse=True, scope="session")
def no_settings_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, and no process that it starts, reads the settings or the token of whoever runs it."""
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("SIGNING_")]:
            patched.delenv(name)
        patched.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def default_log_levels() -> None:
    """An earlier test, or a library that it used, may have changed them: records cost memory, and some are asserted."""
    logging.getLogger().setLevel(logging.WARNING)
    for name in ("signing_async", "signing_async.sandbox", "signing_async.webhooks"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """The whole service, on a free port."""
    async with Sandbox(seed=7) as running:
        yield running


@pytest.fixture
async def client(sandbox: Sandbox) -> AsyncIterator[SigningClient]:
    """A client of the sandbox that retries without waiting long."""
    async with SigningClient(
        sandbox.base_url, sandbox.access_token(), retry=RetryPolicy(base_delay=0.01, settle=0.1)
    ) as ready:
        yield ready


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for this worker's tests: each makes a schema of its own, and leaves it running."""
    from tests.postgres.server import PostgresServer

    with PostgresServer() as running:
        yield running
