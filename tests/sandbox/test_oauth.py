"""OAuth 2.0 (section 5 of the specification): codes, tokens, rotation and replay."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from tests.sandbox.serving import Caller
from tests.sandbox.token_requests import CALLBACK, CHALLENGE, TOKEN, VERIFIER, exchange, refresh, works


async def granted(call: Caller, app: Any) -> Any:
    """Return the response to a code exchange."""
    return await call.ok("POST", TOKEN, data=exchange(call.sandbox, app))


async def refused(call: Caller, parameters: Any, error: str = "invalid_grant", status: int = 400) -> None:
    """Assert that the token endpoint refuses the parameters."""
    seen, body = await call("POST", TOKEN, json=parameters)
    assert (seen, body["error"]) == (status, error)


@pytest.mark.parametrize("way", ["data", "json"])
async def test_code_is_exchanged_for_a_token_response_by_form_or_json(call: Caller, app: Any, way: str) -> None:
    options: dict[str, Any] = {way: exchange(call.sandbox, app, code_verifier="ignored without a challenge")}
    token = await call.ok("POST", TOKEN, **options)
    assert (token["token_type"], token["expires_in"]) == ("Bearer", 3600)
    assert token["refresh_token"]
    assert call.headers["cache-control"] == "no-store"
    assert await works(call, token["access_token"])


@pytest.mark.parametrize("name", ["grant_type", "client_id", "client_secret", "redirect_uri", "code"])
async def test_every_exchange_parameter_is_required_and_must_be_a_string(call: Caller, app: Any, name: str) -> None:
    for value in (None, "", 5):
        body: dict[str, Any] = {**exchange(call.sandbox, app), name: value}
        status, response = await call("POST", TOKEN, json=body)
        assert (status, response["error"]) == (400, "invalid_request")
        assert name in response["error_description"]


async def test_wrong_client_or_grant_type_does_not_use_the_code(call: Caller, app: Any) -> None:
    right = exchange(call.sandbox, app)
    for name in ("client_id", "client_secret"):
        await refused(call, right | {name: "wrong"}, "invalid_client", 401)
    await refused(call, right | {"grant_type": "client_credentials"}, "unsupported_grant_type")
    assert (await call("POST", TOKEN, data=right))[0] == 200


async def test_reused_code_is_refused_and_revokes_its_tokens(call: Caller, app: Any) -> None:
    parameters = exchange(call.sandbox, app)
    token = await call.ok("POST", TOKEN, data=parameters)
    await refused(call, parameters)
    assert not await works(call, token["access_token"])


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
    assert await works(call, token["access_token"])
    assert not await works(call, token["refresh_token"])
    call.sandbox.clock.advance(seconds=20)
    assert not await works(call, token["access_token"])
    call.sandbox.clock.advance(days=30)
    await refused(call, refresh(app, token["refresh_token"]))


async def test_code_with_a_challenge_needs_its_verifier_and_survives_a_wrong_one(call: Caller, app: Any) -> None:
    """PKCE (RFC 7636, S256)."""
    right = exchange(call.sandbox, app, code=call.sandbox.accounts.authorize(app, challenge=CHALLENGE))
    for verifier in (None, "", VERIFIER + "x", CHALLENGE, 5):
        await refused(call, {**right, "code_verifier": verifier})
    assert (await call("POST", TOKEN, data={**right, "code_verifier": VERIFIER}))[0] == 200


async def test_malformed_token_request_is_an_oauth_error(call: Caller) -> None:
    for kind, data, expected in (
        ("application/json", b"{", 400),
        ("application/json", b"[]", 400),
        ("application/x-www-form-urlencoded", b"%ff=%ff", 400),
        ("application/x-www-form-urlencoded", b"\xff=1", 400),
        ("application/x-www-form-urlencoded", b"a=1&" * 200, 400),
        ("application/x-www-form-urlencoded", b"", 400),
        ("text/plain", b"x", 415),
    ):
        status, body = await call("POST", TOKEN, data=data, headers={"Content-Type": kind})
        assert status == expected
        assert body["error"]
    assert (await call("GET", TOKEN))[0] == 405


async def test_refresh_rotates_and_a_replay_revokes_all_tokens_of_the_consent(call: Caller, app: Any) -> None:
    first, other = await granted(call, app), await granted(call, app)
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert len({first["access_token"], second["access_token"], first["refresh_token"], second["refresh_token"]}) == 4
    assert await works(call, first["access_token"])
    assert await works(call, second["access_token"])
    await refused(call, refresh(app, first["refresh_token"]))
    await refused(call, refresh(app, second["refresh_token"]))
    assert not await works(call, second["access_token"])
    assert await works(call, other["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(revoke_family_on_replay=False))
async def test_replayed_refresh_token_revokes_nothing_if_the_profile_says_so(call: Caller, app: Any) -> None:
    first = await granted(call, app)
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    await refused(call, refresh(app, first["refresh_token"]))
    assert (await call("POST", TOKEN, data=refresh(app, second["refresh_token"])))[0] == 200


@pytest.mark.signing_sandbox(profile=Profile(replay_grace=10))
async def test_refresh_token_may_be_replayed_within_the_grace(call: Caller, app: Any) -> None:
    first = await granted(call, app)
    for _ in range(3):
        second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
        call.sandbox.clock.advance(seconds=3)
    call.sandbox.clock.advance(seconds=2)
    await refused(call, refresh(app, first["refresh_token"]))
    assert not await works(call, second["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(rotate_refresh_tokens=False, refresh_revokes_access_tokens=True))
async def test_without_rotation_a_refresh_revokes_the_access_token(call: Caller, app: Any) -> None:
    first = await granted(call, app)
    second, third = [await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"])) for _ in range(2)]
    assert "refresh_token" not in second
    assert not await works(call, first["access_token"])
    assert not await works(call, second["access_token"])
    assert await works(call, third["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(issue_refresh_tokens=False))
async def test_profile_without_refresh_tokens_issues_none(call: Caller, app: Any) -> None:
    assert "refresh_token" not in await granted(call, app)


async def test_every_refresh_parameter_is_required_and_a_wrong_one_revokes_nothing(call: Caller, app: Any) -> None:
    token = await granted(call, app)
    right = refresh(app, token["refresh_token"])
    for name in ("client_id", "client_secret", "refresh_token"):
        await refused(call, {key: value for key, value in right.items() if key != name}, "invalid_request")
        assert (await call("POST", TOKEN, data=right | {name: "wrong"}))[0] in {400, 401}
    await refused(call, refresh(app, token["access_token"]))
    assert (await call("POST", TOKEN, data=right))[0] == 200


async def test_database_holds_no_secret_code_or_token(call: Caller, app: Any) -> None:
    parameters = exchange(call.sandbox, app)
    token = await call.ok("POST", TOKEN, data=parameters)
    dump = call.sandbox.snapshot().database
    for secret in (parameters["client_secret"], parameters["code"], token["access_token"], token["refresh_token"]):
        assert secret.encode() not in dump
    assert call.sandbox.apps[0].client_secret is None


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


async def test_app_that_is_kept_has_the_same_id_and_a_new_secret(call: Caller, signing_sandbox: Sandbox) -> None:
    other = signing_sandbox.register_app(CALLBACK, "Other")
    first, second = [signing_sandbox.accounts.keep_app("My app", CALLBACK) for _ in range(2)]
    assert [app.client_id for app in signing_sandbox.apps] == [other.client_id, first.client_id]
    assert first.client_id == second.client_id
    await refused(call, exchange(signing_sandbox, first), "invalid_client", 401)
    assert await granted(call, second)
