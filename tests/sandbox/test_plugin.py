"""The pytest plugin's fixtures."""

from __future__ import annotations

import aiohttp
import pytest

from signing_async.sandbox import Profile, Sandbox


async def test_signing_sandbox_fixture_is_a_running_sandbox(signing_sandbox: Sandbox) -> None:
    headers = {"Authorization": f"Bearer {signing_sandbox.access_token()}"}
    async with (
        aiohttp.ClientSession(signing_sandbox.base_url, headers=headers) as session,
        session.get("/api/1.0/me") as response,
    ):
        assert response.status == 200


@pytest.mark.signing_sandbox(profile=Profile(ids="integer"), seed=1)
async def test_marker_arguments_are_passed_to_the_sandbox(signing_sandbox: Sandbox) -> None:
    assert signing_sandbox.profile.ids == "integer"
    assert signing_sandbox.add_user("A", "a@b.example").id == "1002"
