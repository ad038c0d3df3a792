"""OAuth 2.0 (section 5 of the specification): codes, tokens, rotation and replay."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from signing_async.sandbox.records import App
from tests.sandbox.serving import Caller
from tests.sandbox.token_requests import CALLBACK, CHALLENGE, TOKEN, VERIFIER, exchange, refresh, works


@pytest.mark.parametrize("way", ["data", "json"])
async def test_code_is_exchanged_for_a_token_response_by_form_or_json(
    call: Caller, signing_sandbox: Sandbox, app: App, way: str
) -> None:
    options: dict[str, Any] = {way: exchange(signing_sandbox, app)}
    status, token = await call("POST", TOKEN, **options)
    assert status == 200
    assert (token["token_type"], token["expires_in"]) == ("Bearer", 3600)
    assert token["refresh_token"]
    assert call.headers["cache-control"] == "no-store"
    assert await works(call, token["access_token"])


@pytest.mark.parametrize("name", ["grant_type", "client_id", "client_secret", "redirect_uri", "code"])
@pytest.mark.parametrize("value", [None, ""])
async def test_every_exchange_parameter_is_required(
    call: Caller, signing_sandbox: Sandbox, app: App, name: str, value: str | None
) -> None:
    status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, app, **{name: value}))
    assert (status, body["error"]) == (400, "invalid_request")
    assert name in body["error_description"]


@pytest.mark.parametrize("value", [5, [], {}, True])
async def test_json_parameter_of_another_type_is_refused(
    call: Caller, signing_sandbox: Sandbox, app: App, value: object
) -> None:
    body: dict[str, object] = {**exchange(signing_sandbox, app), "code": value}
    status, response = await call("POST", TOKEN, json=body)
    assert (status, response["error"]) == (400, "invalid_request")


@pytest.mark.parametrize("kind", ["password", "client_credentials", "AUTHORIZATION_CODE", "ö"])
async def test_other_grant_types_are_refused(call: Caller, signing_sandbox: Sandbox, app: App, kind: str) -> None:
    status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, app, grant_type=kind))
    assert (status, body["error"]) == (400, "unsupported_grant_type")


@pytest.mark.parametrize("name", ["client_id", "client_secret"])
async def test_wrong_client_is_401_and_does_not_use_the_code(
    call: Caller, signing_sandbox: Sandbox, app: App, name: str
) -> None:
    right = exchange(signing_sandbox, app)
    status, body = await call("POST", TOKEN, data=right | {name: "wrong"})
    assert (status, body["error"]) == (401, "invalid_client")
    assert (await call("POST", TOKEN, data=right))[0] == 200


async def test_reused_code_is_refused_and_revokes_its_tokens(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    parameters = exchange(signing_sandbox, app)
    token = await call.ok("POST", TOKEN, data=parameters)
    status, body = await call("POST", TOKEN, data=parameters)
    assert (status, body["error"]) == (400, "invalid_grant")
    assert not await works(call, token["access_token"])


async def test_code_needs_its_exact_redirect_uri(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    for uri in (CALLBACK + "/", CALLBACK + "?x=1", "https://evil.example/callback", CALLBACK.upper()):
        status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, app, redirect_uri=uri))
        assert (status, body["error"]) == (400, "invalid_grant")


async def test_code_of_another_client_is_refused(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    other = signing_sandbox.register_app(redirect_uri=CALLBACK, name="Other")
    code = signing_sandbox.authorize(app)
    status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, other, code=code))
    assert (status, body["error"]) == (400, "invalid_grant")


async def test_code_expires_on_the_sandboxs_clock(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    late, soon = exchange(signing_sandbox, app), exchange(signing_sandbox, app)
    signing_sandbox.clock.advance(seconds=590)
    assert (await call("POST", TOKEN, data=soon))[0] == 200
    signing_sandbox.clock.advance(seconds=11)
    status, body = await call("POST", TOKEN, data=late)
    assert (status, body["error"]) == (400, "invalid_grant")


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [(VERIFIER, 200), (None, 400), ("", 400), (VERIFIER + "x", 400), (CHALLENGE, 400), (5, 400)],
)
async def test_code_with_a_challenge_needs_its_verifier(
    call: Caller, signing_sandbox: Sandbox, app: App, verifier: Any, expected: int
) -> None:
    """PKCE (RFC 7636, S256); a wrong verifier does not use up the code."""
    right = exchange(signing_sandbox, app, code=signing_sandbox.accounts.authorize(app, challenge=CHALLENGE))
    body: dict[str, Any] = right if verifier is None else {**right, "code_verifier": verifier}
    status, response = await call("POST", TOKEN, json=body)
    assert (status, response.get("error")) == (expected, None if expected == 200 else "invalid_grant")
    if expected != 200:
        assert (await call("POST", TOKEN, data={**right, "code_verifier": VERIFIER}))[0] == 200


async def test_verifier_without_a_challenge_is_ignored(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    assert (await call("POST", TOKEN, data=exchange(signing_sandbox, app, code_verifier="x")))[0] == 200


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


async def test_refresh_rotates_the_refresh_token_and_keeps_the_access_token(
    call: Caller, signing_sandbox: Sandbox, app: App
) -> None:
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert len({first["access_token"], second["access_token"], first["refresh_token"], second["refresh_token"]}) == 4
    assert await works(call, first["access_token"])
    assert await works(call, second["access_token"])


async def test_replayed_refresh_token_revokes_all_tokens_of_the_consent(
    call: Caller, signing_sandbox: Sandbox, app: App
) -> None:
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    other = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    status, body = await call("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert (status, body["error"]) == (400, "invalid_grant")
    assert (await call("POST", TOKEN, data=refresh(app, second["refresh_token"])))[0] == 400
    assert not await works(call, second["access_token"])
    assert await works(call, other["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(revoke_family_on_replay=False))
async def test_replayed_refresh_token_revokes_nothing_if_the_profile_says_so(
    call: Caller, signing_sandbox: Sandbox, app: App
) -> None:
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert (await call("POST", TOKEN, data=refresh(app, first["refresh_token"])))[0] == 400
    assert (await call("POST", TOKEN, data=refresh(app, second["refresh_token"])))[0] == 200


@pytest.mark.signing_sandbox(profile=Profile(replay_grace=10))
async def test_refresh_token_may_be_replayed_within_the_grace(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    for _ in range(3):
        second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
        signing_sandbox.clock.advance(seconds=3)
    signing_sandbox.clock.advance(seconds=2)
    assert (await call("POST", TOKEN, data=refresh(app, first["refresh_token"])))[0] == 400
    assert not await works(call, second["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(rotate_refresh_tokens=False, refresh_revokes_access_tokens=True))
async def test_without_rotation_a_refresh_revokes_the_access_token(
    call: Caller, signing_sandbox: Sandbox, app: App
) -> None:
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    third = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert "refresh_token" not in second
    assert not await works(call, first["access_token"])
    assert not await works(call, second["access_token"])
    assert await works(call, third["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(issue_refresh_tokens=False))
async def test_profile_without_refresh_tokens_issues_none(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    assert "refresh_token" not in token


async def test_refresh_token_expires(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    signing_sandbox.clock.advance(days=30)
    status, body = await call("POST", TOKEN, data=refresh(app, token["refresh_token"]))
    assert (status, body["error"]) == (400, "invalid_grant")


@pytest.mark.parametrize("name", ["client_id", "client_secret", "refresh_token"])
async def test_every_refresh_parameter_is_required_and_a_wrong_one_revokes_nothing(
    call: Caller, signing_sandbox: Sandbox, app: App, name: str
) -> None:
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    assert (await call("POST", TOKEN, data=refresh(app, token["refresh_token"], **{name: None})))[0] == 400
    assert (await call("POST", TOKEN, data=refresh(app, token["refresh_token"], **{name: "wrong"})))[0] in {400, 401}
    assert (await call("POST", TOKEN, data=refresh(app, token["access_token"])))[0] == 400
    assert (await call("POST", TOKEN, data=refresh(app, token["refresh_token"])))[0] == 200


async def test_access_token_expires_after_expires_in(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    signing_sandbox.clock.advance(seconds=3590)
    assert await works(call, token["access_token"])
    assert not await works(call, token["refresh_token"])
    signing_sandbox.clock.advance(seconds=11)
    assert not await works(call, token["access_token"])


async def test_database_holds_no_secret_code_or_token(signing_sandbox: Sandbox, app: App, call: Caller) -> None:
    parameters = exchange(signing_sandbox, app)
    token = await call.ok("POST", TOKEN, data=parameters)
    dump = signing_sandbox.snapshot().database
    for secret in (parameters["client_secret"], parameters["code"], token["access_token"], token["refresh_token"]):
        assert secret.encode() not in dump
    assert signing_sandbox.apps[0].client_secret is None


@pytest.mark.parametrize(
    "uri",
    [
        "https://app.example/cb",
        "http://localhost:8000/cb",
        "http://127.0.0.1/cb?x=1",
        "http://[::1]:9/",
        "http://a.localhost/",
    ],
)
async def test_https_and_loopback_redirect_uris_are_accepted(signing_sandbox: Sandbox, uri: str) -> None:
    assert signing_sandbox.register_app(uri).redirect_uri == uri


@pytest.mark.parametrize(
    "uri",
    ["", "nope", "http://app.example/cb", "javascript:alert(1)", "https://", "https://a.example/#x", "https://a b/",
     "https://a.example:99999/", "https://[::1", "https://ö.example/"],
)  # fmt: skip
async def test_other_redirect_uris_are_refused(signing_sandbox: Sandbox, uri: str) -> None:
    with pytest.raises(Refused) as caught:
        signing_sandbox.register_app(uri, " ")
    assert set(caught.value.errors) == {"redirect_uri", "name"}
    assert signing_sandbox.apps == []


async def test_app_that_is_kept_has_the_same_id_and_a_new_secret(call: Caller, signing_sandbox: Sandbox) -> None:
    first, second = [signing_sandbox.accounts.keep_app("My app", CALLBACK) for _ in range(2)]
    assert [app.client_id for app in signing_sandbox.apps] == [first.client_id] == [second.client_id]
    for app, status in ((first, 401), (second, 200)):
        fields = {"grant_type": "authorization_code", "client_id": app.client_id, "redirect_uri": CALLBACK}
        fields |= {"client_secret": app.client_secret or "", "code": signing_sandbox.authorize(app)}
        assert (await call("POST", "/api/oauth/token", data=fields))[0] == status
