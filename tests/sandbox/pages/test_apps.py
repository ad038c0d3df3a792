"""Registering applications, and the consent page."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from signing_async.sandbox import Profile
from tests.sandbox.browsing import Page, Visitor
from tests.sandbox.pages.checks import CALLBACK, check_document, check_headers, consent, crawl
from tests.sandbox.serving import CHALLENGE, VERIFIER, exchange

MY_APPS = "/developer/my-apps"
S256 = {"code_challenge": CHALLENGE, "code_challenge_method": "S256"}


def query_of(page: Page) -> dict[str, list[str]]:
    """Return the query of the URL that the page redirects to."""
    return parse_qs(urlsplit(page.headers["location"]).query)


@pytest.fixture
def app(visitor: Visitor) -> Any:
    """A registered application."""
    return visitor.sandbox.register_app(f"{CALLBACK}?kept=1", "My tool")


async def token_of(visitor: Visitor, app: Any) -> dict[str, str]:
    """Return the hidden field of the consent form."""
    page = await visitor.get(consent(app))
    return {"csrf_token": page.main.find("input", name="csrf_token").attributes["value"]}


async def test_registering_an_app_shows_its_secret_only_once(visitor: Visitor) -> None:
    page = await visitor.get(MY_APPS)
    page = await visitor.send(page, MY_APPS, name="My tool", redirect_uri=CALLBACK)
    check_document(page)
    client_id, secret = page.main.find("code", id="client-id").text, page.main.find("code", id="client-secret").text
    assert page.html.count(secret) == 1
    assert client_id in (await visitor.get(MY_APPS)).main.text
    assert not [path for path, seen in (await crawl(visitor)).items() if secret in seen.html]
    [app] = visitor.sandbox.apps
    assert visitor.sandbox.accounts.token(exchange(visitor.sandbox, app, client_secret=secret))["access_token"]


async def test_invalid_app_is_refused_with_the_error_of_each_field(visitor: Visitor) -> None:
    page = await visitor.get(MY_APPS)
    page = await visitor.send(page, MY_APPS, name=" ", redirect_uri="http://example.com/cb")
    assert page.status == 400
    address = page.main.find("input", name="redirect_uri")
    assert (address.attributes["value"], address.attributes["aria-invalid"]) == ("http://example.com/cb", "true")
    assert "redirect_uri-error" in address.attributes["aria-describedby"].split()
    said = page.main.find("p", id="redirect_uri-error").text
    assert "'http://example.com/cb' must begin with https://" in said
    assert "1 to 200 characters" in page.main.find("p", id="name-error").text
    links = [link.attributes["href"] for link in page.main.find("p", role="alert").every("a")]
    assert links == ["#name-field", "#redirect_uri-field"]
    assert not visitor.sandbox.apps


async def test_app_and_token_belong_to_the_chosen_user(visitor: Visitor, app: Any) -> None:
    sandbox, other = visitor.sandbox, visitor.sandbox.add_user("Other", "other@x.example", "a-tenant")
    page = await visitor.get(MY_APPS)
    await visitor.send(page, MY_APPS, name="Theirs", redirect_uri=CALLBACK, user=other.id)
    owners = {app.name: app.user_id for app in sandbox.apps}
    assert owners == {"My tool": sandbox.accounts.default_user().id, "Theirs": other.id}
    page = await visitor.get(consent(app))
    [option] = [o for o in page.main.every("option") if "selected" in o.attributes]
    assert option.attributes["value"] == sandbox.accounts.default_user().id
    done = await visitor.send(page, consent(app), user=other.id, follow=False)
    token = sandbox.accounts.token(exchange(sandbox, app, code=query_of(done)["code"][0]))
    assert sandbox.accounts.authenticate(f"Bearer {token['access_token']}") == other
    for address, fields in ((MY_APPS, {"name": "Whose", "redirect_uri": CALLBACK}), (consent(app), {})):
        refused = await visitor.send(await visitor.get(address), address, fields, user="nobody")
        assert "There is no such user" in refused.refusal


async def test_consent_page_names_the_app_and_denying_redirects_with_access_denied(visitor: Visitor, app: Any) -> None:
    page = await visitor.get(consent(app))
    check_document(page)
    check_headers(page)
    assert page.main.find("h1").text == "Allow My tool?"
    for words in ("Sandbox User (user@sandbox.example)", app.redirect_uri, app.client_id):
        assert words in page.main.text
    assert "form-action" not in page.headers["content-security-policy"]  # the application may send its user on
    assert "form-action 'self'" in (await visitor.get("/sandbox")).headers["content-security-policy"]
    again = await visitor.post(consent(app), await token_of(visitor, app))
    assert again.refusal == "Choose Allow or Deny."
    done = await visitor.send(again, consent(app), press="Deny", follow=False)
    assert query_of(done) == {"kept": ["1"], "error": ["access_denied"], "state": ["s1"]}


async def test_allowing_redirects_with_a_code_bound_to_the_challenge_and_the_unchanged_state(
    visitor: Visitor, app: Any
) -> None:
    address = consent(app, state="a b&c=é", **S256)
    done = await visitor.send(await visitor.get(address), address, press="Allow", follow=False)
    assert done.status == 302
    assert done.headers["location"].startswith(CALLBACK)
    query = query_of(done)
    assert (query["kept"], query["state"]) == (["1"], ["a b&c=é"])
    parameters = exchange(visitor.sandbox, app, code=query["code"][0], code_verifier=VERIFIER)
    token = visitor.sandbox.accounts.token(parameters)
    user = visitor.sandbox.accounts.authenticate(f"Bearer {token['access_token']}")
    assert user == visitor.sandbox.accounts.default_user()


async def test_unregistered_app_or_redirect_uri_is_never_redirected_to(visitor: Visitor, app: Any) -> None:
    fields = await token_of(visitor, app) | {"decision": "allow"}
    for name, value in (("client_id", "app_x"), ("redirect_uri", "http://127.0.0.1:9/elsewhere")):
        address = consent(app, **{name: value})
        for response in (await visitor.get(address), await visitor.post(address, fields)):
            assert response.status == 400
            check_document(response)
            assert response.main.find("h1").text == "This application cannot be authorized"
            assert value in response.main.text
    assert "response_type missing" in (await visitor.get("/oauth/authorize?state=s1")).main.text


async def test_invalid_request_is_reported_to_the_app(visitor: Visitor, app: Any) -> None:
    data = await token_of(visitor, app) | {"decision": "allow"}
    for error, changes in (
        ("unsupported_response_type", {"response_type": "token"}),
        ("invalid_request", S256 | {"code_challenge_method": "plain"}),
        ("invalid_request", {"code_challenge": CHALLENGE}),
        ("invalid_request", S256 | {"code_challenge": f"{CHALLENGE}="}),
        ("invalid_request", S256 | {"code_challenge": ""}),
    ):
        address = consent(app, **changes)
        shown = await visitor.get(address, allow_redirects=False)
        for response in (shown, await visitor.post(address, data, follow=False)):
            assert query_of(response) == {"kept": ["1"], "error": [error], "state": ["s1"]}


@pytest.mark.signing_sandbox(profile=Profile(pkce=False))
async def test_service_without_pkce_ignores_the_parameters(visitor: Visitor, app: Any) -> None:
    page = await visitor.get(consent(app, **S256 | {"code_challenge_method": "plain"}))
    assert page.main.find("h1").text == "Allow My tool?"
    assert urlencode(S256 | {"code_challenge_method": "plain"}).replace("&", "&amp;") in page.html
