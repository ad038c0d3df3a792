"""OAuth 2.0 (section 5 of the specification): codes, tokens, rotation and replay."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from tests.sandbox.serving import CALLBACK, CHALLENGE, TOKEN, VERIFIER, Caller, exchange, refresh


async def granted(call: Caller, app: Any) -> Any:
    """Return the response to a code exchange."""
    return await call.ok("POST", TOKEN, data=exchange(call.sandbox, app))


async def refreshed(call: Caller, app: Any, token: Any) -> Any:
    """Return the response to a refresh with this token response's refresh token."""
    return await call.ok("POST", TOKEN, data=refresh(app, token["refresh_token"]))


async def refused(call: Caller, parameters: Any, error: str = "invalid_grant", status: int = 400) -> str:
    """Assert that the token endpoint refuses the parameters, and return why."""
    seen, body = await call("POST", TOKEN, json=parameters)
    assert (seen, body["error"]) == (status, error)
    return str(body["error_description"])


@pytest.mark.parametrize("way", ["data", "json"])
async def test_code_is_exchanged_once_by_form_or_json_and_a_reuse_revokes_its_tokens(
    call: Caller, app: Any, way: str
) -> None:
    parameters = exchange(call.sandbox, app, code_verifier="ignored without a challenge")
    options: dict[str, Any] = {way: parameters}
    token = await call.ok("POST", TOKEN, **options)
    assert (token["token_type"], token["expires_in"]) == ("Bearer", 3600)
    assert token["refresh_token"]
    assert call.headers["cache-control"] == "no-store"
    assert await call.works(token["access_token"])
    dump = call.sandbox.snapshot().database
    for secret in (parameters["code"], token["access_token"], token["refresh_token"]):
        assert secret.encode() not in dump
    assert call.sandbox.apps[0].client_secret is None
    await refused(call, parameters)
    assert not await call.works(token["access_token"])


async def test_every_parameter_is_required_and_a_wrong_one_uses_or_revokes_nothing(call: Caller, app: Any) -> None:
    code = exchange(call.sandbox, app)
    for name in code:
        for value in (None, "", 5):
            assert name in await refused(call, {**code, name: value}, "invalid_request")
    token = await granted(call, app)
    renewal = refresh(app, token["refresh_token"])
    for name in ("client_id", "client_secret", "refresh_token"):
        await refused(call, {key: value for key, value in renewal.items() if key != name}, "invalid_request")
    for right in (code, renewal):
        for name in ("client_id", "client_secret"):
            await refused(call, right | {name: "wrong"}, "invalid_client", 401)
        await refused(call, right | {"grant_type": "client_credentials"}, "unsupported_grant_type")
    for wrong in ("wrong", token["access_token"]):
        await refused(call, refresh(app, wrong))
    for right in (code, renewal):
        assert (await call("POST", TOKEN, data=right))[0] == 200


async def test_code_needs_its_exact_redirect_uri_and_client(call: Caller, app: Any) -> None:
    for uri in (CALLBACK + "/", CALLBACK + "?x=1", "https://evil.example/callback", CALLBACK.upper()):
        await refused(call, exchange(call.sandbox, app, redirect_uri=uri))
    other = call.sandbox.register_app(redirect_uri=CALLBACK, name="Other")
    await refused(call, exchange(call.sandbox, other, code=call.sandbox.authorize(app)))


async def test_codes_and_tokens_expire_on_the_sandboxs_clock(call: Caller, app: Any) -> None:
    late, soon = exchange(call.sandbox, app), exchange(call.sandbox, app)
    call.sandbox.clock.advance(seconds=590)
    token = await call.ok("POST", TOKEN, data=soon)
    call.sandbox.clock.advance(seconds=11)
    await refused(call, late)
    call.sandbox.clock.advance(seconds=3570)
    assert await call.works(token["access_token"])
    assert not await call.works(token["refresh_token"])
    call.sandbox.clock.advance(seconds=20)
    assert not await call.works(token["access_token"])
    call.sandbox.clock.advance(days=30)
    await refused(call, refresh(app, token["refresh_token"]))


async def test_code_with_a_challenge_needs_its_verifier_and_survives_a_wrong_one(call: Caller, app: Any) -> None:
    """PKCE (RFC 7636, S256)."""
    right = exchange(call.sandbox, app, code=call.sandbox.accounts.authorize(app, challenge=CHALLENGE))
    for verifier in (None, "", VERIFIER + "x", CHALLENGE, 5):
        await refused(call, {**right, "code_verifier": verifier})
    assert (await call("POST", TOKEN, data={**right, "code_verifier": VERIFIER}))[0] == 200


async def test_malformed_token_request_is_an_oauth_error(call: Caller) -> None:
    form = "application/x-www-form-urlencoded"
    for kind, data, expected in (
        *(("application/json", b"{", 400), ("application/json", b"[]", 400), ("text/plain", b"x", 415)),
        *((form, b"%ff=%ff", 400), (form, b"\xff=1", 400), (form, b"a=1&" * 200, 400), (form, b"", 400)),
    ):
        status, body = await call("POST", TOKEN, data=data, headers={"Content-Type": kind})
        assert status == expected
        assert body["error"]
    assert (await call("GET", TOKEN))[0] == 405


async def test_refresh_rotates_and_a_replay_revokes_all_tokens_of_the_consent(call: Caller, app: Any) -> None:
    first, other = await granted(call, app), await granted(call, app)
    second = await refreshed(call, app, first)
    assert len({first["access_token"], second["access_token"], first["refresh_token"], second["refresh_token"]}) == 4
    assert await call.works(first["access_token"])
    assert await call.works(second["access_token"])
    await refused(call, refresh(app, first["refresh_token"]))
    await refused(call, refresh(app, second["refresh_token"]))
    assert not await call.works(second["access_token"])
    assert await call.works(other["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(revoke_family_on_replay=False))
async def test_replayed_refresh_token_revokes_nothing_if_the_profile_says_so(call: Caller, app: Any) -> None:
    first = await granted(call, app)
    second = await refreshed(call, app, first)
    await refused(call, refresh(app, first["refresh_token"]))
    assert await refreshed(call, app, second)


@pytest.mark.signing_sandbox(profile=Profile(replay_grace=10))
async def test_refresh_token_may_be_replayed_within_the_grace(call: Caller, app: Any) -> None:
    first = await granted(call, app)
    for _ in range(3):
        second = await refreshed(call, app, first)
        call.sandbox.clock.advance(seconds=3)
    call.sandbox.clock.advance(seconds=2)
    await refused(call, refresh(app, first["refresh_token"]))
    assert not await call.works(second["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(rotate_refresh_tokens=False, refresh_revokes_access_tokens=True))
async def test_without_rotation_a_refresh_revokes_the_access_token(call: Caller, app: Any) -> None:
    first = await granted(call, app)
    second, third = [await refreshed(call, app, first) for _ in range(2)]
    assert "refresh_token" not in second
    works = [await call.works(token["access_token"]) for token in (first, second, third)]
    assert works == [False, False, True]


@pytest.mark.signing_sandbox(profile=Profile(issue_refresh_tokens=False))
async def test_profile_without_refresh_tokens_issues_none(call: Caller, app: Any) -> None:
    assert "refresh_token" not in await granted(call, app)


async def test_only_https_and_loopback_redirect_uris_are_accepted(signing_sandbox: Sandbox) -> None:
    for uri in (
        *("", "nope", "http://app.example/cb", "javascript:alert(1)", "https://", "https://a.example/#x"),
        *("https://a b/", "https://a.example:99999/", "https://[::1", "https://ö.example/"),
    ):
        with pytest.raises(Refused) as caught:
            signing_sandbox.register_app(uri, " ")
        assert set(caught.value.errors) == {"redirect_uri", "name"}
    assert signing_sandbox.apps == []
    for uri in (
        *("https://app.example/cb", "http://localhost:8000/cb", "http://127.0.0.1/cb?x=1", "http://[::1]:9/"),
        "http://a.localhost/",
    ):
        assert signing_sandbox.register_app(uri).redirect_uri == uri


async def test_app_that_is_kept_has_the_same_id_and_secret(call: Caller, signing_sandbox: Sandbox) -> None:
    other = signing_sandbox.register_app(CALLBACK, "Other")
    first, second = [signing_sandbox.accounts.keep_app("My app", CALLBACK) for _ in range(2)]
    assert [app.client_id for app in signing_sandbox.apps] == [other.client_id, first.client_id]
    assert first == second
    assert await granted(call, second)
