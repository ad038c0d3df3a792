"""The clock, snapshots, seeds, and starting a sandbox."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import aiohttp
import pytest

import signing_async.sandbox
from signing_async.sandbox import Profile, Refused, Sandbox
from tests.sandbox.serving import API, Caller


async def test_advance_adds_up_in_any_units_and_returns_the_new_time(signing_sandbox: Sandbox) -> None:
    before = signing_sandbox.clock.now()
    signing_sandbox.clock.advance(days=1, hours=2, minutes=3, seconds=4.5)
    after = signing_sandbox.clock.advance(seconds=0.5)
    assert timedelta(0) <= after - before - timedelta(days=1, hours=2, minutes=3, seconds=5) < timedelta(seconds=5)


@pytest.mark.parametrize("step", [{}, {"seconds": 0}, {"days": -1}])
async def test_clock_cannot_be_set_back_or_advanced_by_nothing(
    signing_sandbox: Sandbox, step: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="forward"):
        signing_sandbox.clock.advance(**step)


@pytest.mark.parametrize("bad", ["1", None, True, float("nan"), float("inf")])
async def test_amount_that_is_no_finite_number_is_refused_by_name(signing_sandbox: Sandbox, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^hours: must be a number, got "):
        signing_sandbox.clock.advance(days=1, hours=bad)
    assert signing_sandbox.clock.offset.total_seconds() == 0


async def test_clock_cannot_be_advanced_past_the_year_9999(signing_sandbox: Sandbox, call: Caller) -> None:
    with pytest.raises(OverflowError):
        signing_sandbox.clock.advance(days=365 * 8000)
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_advancing_expires_tokens_codes_and_invitations_together(signing_sandbox: Sandbox, call: Caller) -> None:
    app = signing_sandbox.register_app("http://127.0.0.1:1/")
    code, token = signing_sandbox.authorize(app), signing_sandbox.access_token(lifetime=3600)
    _, _, [person] = await call.sent()
    signing_sandbox.clock.advance(days=14)
    parameters = {"grant_type": "authorization_code", "client_id": app.client_id, "redirect_uri": app.redirect_uri}
    secret = {"client_secret": app.client_secret, "code": code}
    assert (await call("POST", "/api/oauth/token", data=parameters | secret))[0] == 400
    async with call.session.get(f"{API}/me", headers={"Authorization": f"Bearer {token}"}) as response:
        assert response.status == 401
    with pytest.raises(Refused, match="expired"):
        await signing_sandbox.sign(person)


# snapshots


async def test_restore_brings_back_signings_documents_tokens_and_the_clock(
    signing_sandbox: Sandbox, call: Caller
) -> None:
    signing_id, _, [person] = await call.sent()
    snapshot = signing_sandbox.snapshot()
    before = signing_sandbox.signings, signing_sandbox.recipients(), signing_sandbox.notifications
    later = await call.draft()
    token = signing_sandbox.access_token()
    await signing_sandbox.complete(signing_id)
    signing_sandbox.clock.advance(days=20)
    signing_sandbox.restore(snapshot)
    assert (signing_sandbox.signings, signing_sandbox.recipients(), signing_sandbox.notifications) == before
    assert signing_sandbox.clock.offset == timedelta(0)
    assert (await call("GET", f"{API}/signings/{later}"))[0] == 404
    async with call.session.get(f"{API}/me", headers={"Authorization": f"Bearer {token}"}) as response:
        assert response.status == 401
    assert (await signing_sandbox.sign(person)).is_completed


@pytest.mark.signing_sandbox(seed=5)
async def test_seeded_sandbox_repeats_the_same_ids_after_every_restore(signing_sandbox: Sandbox, call: Caller) -> None:
    snapshot = signing_sandbox.snapshot()
    runs = []
    for _ in range(3):
        runs.append([await call.draft(), await call.draft(), signing_sandbox.access_token()])
        signing_sandbox.restore(snapshot)
    assert runs[0] == runs[1] == runs[2]


# seeds


@pytest.mark.parametrize("style", ["uuid", "ulid", "integer"])
async def test_same_seed_gives_the_same_ids_tokens_and_secrets(style: str) -> None:

    async def run(seed: int | str | None) -> list[object]:
        async with Sandbox(seed=seed, profile=Profile(ids=style)) as sandbox:  # type: ignore[arg-type]  # one of the three
            app = sandbox.register_app("http://127.0.0.1:1/")
            user = sandbox.add_user("A", "a@b.example")
            signings = [sandbox.service.create_signing(user, {"name": "A", "language": "EN"}).id for _ in range(3)]
            return [app.client_id, app.client_secret, sandbox.authorize(app), sandbox.access_token(), user.id, signings]

    same, again, other = await run(7), await run(7), await run("x")
    assert same == again
    assert same[3] != other[3]
    assert (await run(None))[3] != (await run(None))[3]
    assert (same[5] == other[5]) == (style == "integer")


async def test_ulids_are_26_crockford_characters_that_sort_by_age() -> None:
    for seed in (1, None):
        async with Sandbox(seed=seed, profile=Profile(ids="ulid")) as sandbox:
            user = sandbox.accounts.default_user()
            ids = [sandbox.service.create_signing(user, {"name": "A", "language": "EN"}).id for _ in range(50)]
        assert ids == sorted(set(ids))
        assert all(len(one) == 26 and set(one) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for one in ids)


# starting


@pytest.mark.parametrize(
    "settings",
    [
        {"port": -1},
        {"port": 70_000},
        {"port": True},
        {"keep_requests": 0},
        {"keep_requests": True},
        {"host": ""},
        {"webhook_secret": "x"},
        {"seal_level": "B-X"},
    ],
)
async def test_invalid_setting_is_a_value_error_that_names_it(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sandbox(**settings)  # type: ignore[arg-type]  # that is the point


async def test_sandbox_cannot_be_started_twice(signing_sandbox: Sandbox) -> None:
    with pytest.raises(RuntimeError, match="already started once"):
        await signing_sandbox.__aenter__()


async def test_port_in_use_is_an_os_error_and_leaves_nothing_behind(signing_sandbox: Sandbox) -> None:
    port = int(signing_sandbox.base_url.rpartition(":")[2])
    with pytest.raises(OSError, match="address"):
        async with Sandbox(port=port):
            pass


def has_ipv6() -> bool:
    """Return whether this machine has an IPv6 loopback address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV4 = [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("0.0.0.0", "127.0.0.1")]
IPV6 = [("::1", "[::1]"), ("::", "[::1]")]


@pytest.mark.parametrize(("host", "shown"), [*IPV4, *(IPV6 if has_ipv6() else [])])
async def test_sandbox_listens_on_the_given_host_and_its_base_url_works(host: str, shown: str) -> None:
    async with Sandbox(host=host) as sandbox:
        assert sandbox.base_url.startswith(f"http://{shown}:")
        assert repr(sandbox) == f"<Sandbox {sandbox.base_url}>"
        async with aiohttp.ClientSession() as session, session.get(f"{sandbox.base_url}/openapi.json") as response:
            assert response.status == 200


async def test_sandbox_that_was_not_started_says_so_and_can_be_closed() -> None:
    sandbox = Sandbox()
    assert repr(sandbox) == "<Sandbox not started>"
    await sandbox.aclose()


def test_missing_module_is_named_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing_async.sandbox, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs cryptography: pip install 'signing-async\[sandbox\]'"):
        _ = signing_async.sandbox.Sandbox


def test_importing_the_package_loads_no_heavy_modules() -> None:
    import subprocess
    import sys

    import signing_async.sandbox

    with pytest.raises(AttributeError, match="Sandbos"):
        _ = signing_async.sandbox.Sandbos
    code = "import sys, signing_async.sandbox.server; print({'pikepdf', 'pyhanko', 'cryptography'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
