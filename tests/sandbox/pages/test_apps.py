"""Registering applications, and the consent page."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import CALLBACK, check_document, check_headers, consent, crawl


async def test_registering_an_app_shows_its_secret_only_once(visitor: Visitor) -> None:
    page = await visitor.get("/developer/my-apps")
    page = await visitor.send(page, "/developer/my-apps", name="My tool", redirect_uri=CALLBACK)
    assert page.status == 200
    check_document(page)
    client_id, secret = page.main.find("code", id="client-id").text, page.main.find("code", id="client-secret").text
    assert page.html.count(secret) == 1
    assert "shown only once" in page.main.text
    again = await visitor.get("/developer/my-apps")
    assert client_id in again.main.text
    assert not [path for path, seen in (await crawl(visitor)).items() if secret in seen.html]
    [app] = visitor.sandbox.apps
    code = visitor.sandbox.authorize(app)
    token = visitor.sandbox.accounts.token(
        {"grant_type": "authorization_code", "client_id": client_id, "client_secret": secret,
         "redirect_uri": CALLBACK, "code": code}
    )  # fmt: skip
    assert token["access_token"]


async def test_invalid_app_is_refused_with_the_error_of_each_field(visitor: Visitor) -> None:
    page = await visitor.get("/developer/my-apps")
    page = await visitor.send(page, "/developer/my-apps", name=" ", redirect_uri="http://example.com/cb")
    assert page.status == 400
    address = page.main.find("input", name="redirect_uri")
    assert address.attributes["value"] == "http://example.com/cb"
    assert address.attributes["aria-invalid"] == "true"
    said = page.main.find("p", id="redirect_uri-error")
    assert said.attributes["id"] in address.attributes["aria-describedby"].split()
    assert "'http://example.com/cb' must begin with https://" in said.text
    assert "1 to 200 characters" in page.main.find("p", id="name-error").text
    links = [link.attributes["href"] for link in page.main.find("p", role="alert").every("a")]
    assert links == ["#name-field", "#redirect_uri-field"]
    assert not visitor.sandbox.apps


async def test_app_belongs_to_the_chosen_user(visitor: Visitor) -> None:
    other = visitor.sandbox.add_user("Other", "other@x.example", "a-tenant")
    page = await visitor.get("/developer/my-apps")
    await visitor.send(page, "/developer/my-apps", name="Mine", redirect_uri=CALLBACK)
    await visitor.send(page, "/developer/my-apps", name="Theirs", redirect_uri=CALLBACK, user=other.id)
    owners = {app.name: app.user_id for app in visitor.sandbox.apps}
    assert owners == {"Mine": visitor.sandbox.accounts.default_user().id, "Theirs": other.id}
    page = await visitor.send(page, "/developer/my-apps", name="Whose", redirect_uri=CALLBACK, user="nobody")
    assert page.status == 400
    assert "There is no such user" in page.main.find("p", role="alert").text


async def test_consent_page_names_the_app_the_user_and_the_redirect_uri(visitor: Visitor) -> None:
    app = visitor.sandbox.register_app(CALLBACK, "My tool")
    page = await visitor.get(consent(app))
    check_document(page)
    check_headers(page)
    assert page.main.find("h1").text == "Allow My tool?"
    assert "Sandbox User (user@sandbox.example)" in page.main.text
    assert CALLBACK in page.main.text
    assert app.client_id in page.main.text
    assert "form-action" not in page.headers["content-security-policy"]  # the application may send its user on
    assert "form-action 'self'" in (await visitor.get("/sandbox")).headers["content-security-policy"]


async def test_allowing_redirects_with_a_valid_code_and_the_unchanged_state(visitor: Visitor) -> None:
    app = visitor.sandbox.register_app(f"{CALLBACK}?kept=1", "My tool")
    address = consent(app, state="a b&c=é")
    page = await visitor.get(address)
    done = await visitor.send(page, address, press="Allow", follow=False)
    assert done.status == 302
    target = urlsplit(done.headers["location"])
    query = parse_qs(target.query)
    assert f"{target.scheme}://{target.netloc}{target.path}" == CALLBACK
    assert (query["kept"], query["state"]) == (["1"], ["a b&c=é"])
    token = visitor.sandbox.accounts.token(
        {"grant_type": "authorization_code", "client_id": app.client_id, "client_secret": app.client_secret,
         "redirect_uri": app.redirect_uri, "code": query["code"][0]}
    )  # fmt: skip
    user = visitor.sandbox.accounts.authenticate(f"Bearer {token['access_token']}")
    assert user == visitor.sandbox.accounts.default_user()


async def test_denying_redirects_with_access_denied_and_the_state(visitor: Visitor) -> None:
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    done = await visitor.send(page, consent(app), press="Deny", follow=False)
    assert done.headers["location"] == f"{CALLBACK}?error=access_denied&state=s1"


async def test_token_belongs_to_the_user_chosen_on_the_consent_page(visitor: Visitor) -> None:
    app = visitor.sandbox.register_app(CALLBACK)
    other = visitor.sandbox.add_user("Other", "other@x.example", "a-tenant")
    page = await visitor.get(consent(app))
    [option] = [o for o in page.main.every("option") if "selected" in o.attributes]
    assert option.attributes["value"] == visitor.sandbox.accounts.default_user().id
    done = await visitor.send(page, consent(app), user=other.id, follow=False)
    code = parse_qs(urlsplit(done.headers["location"]).query)["code"][0]
    token = visitor.sandbox.accounts.token(
        {"grant_type": "authorization_code", "client_id": app.client_id, "client_secret": app.client_secret,
         "redirect_uri": CALLBACK, "code": code}
    )  # fmt: skip
    assert visitor.sandbox.accounts.authenticate(f"Bearer {token['access_token']}") == other
    refused = await visitor.send(page, consent(app), user="nobody")
    assert refused.status == 400
    assert "There is no such user" in refused.main.find("p", role="alert").text


async def test_consent_form_without_a_decision_is_shown_again(visitor: Visitor) -> None:
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    token = page.main.find("input", name="csrf_token").attributes["value"]
    again = await visitor.post(consent(app), {"csrf_token": token})
    assert again.status == 400
    assert "Choose Allow or Deny." in again.main.find("p", role="alert").text


@pytest.mark.parametrize("changes", [{"client_id": "app_x"}, {"redirect_uri": "http://127.0.0.1:9/elsewhere"}])
async def test_unregistered_app_or_redirect_uri_is_never_redirected_to(
    visitor: Visitor, changes: dict[str, str]
) -> None:
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    fields = {"csrf_token": page.main.find("input", name="csrf_token").attributes["value"], "decision": "allow"}
    for response in (await visitor.get(consent(app, **changes)), await visitor.post(consent(app, **changes), fields)):
        assert response.status == 400
        check_document(response)
        assert response.main.find("h1").text == "This application cannot be authorized"
        assert next(iter(changes.values())) in response.main.text
    assert "response_type missing" in (await visitor.get("/oauth/authorize?state=s1")).main.text


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unsupported_response_type_is_reported_to_the_app(visitor: Visitor, method: str) -> None:
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    token = page.main.find("input", name="csrf_token").attributes["value"]
    data = {"csrf_token": token, "decision": "allow"} if method == "POST" else None
    address = consent(app, response_type="token")
    response = await visitor.request(method, address, data=data, allow_redirects=False, headers={})
    assert response.headers["location"] == f"{CALLBACK}?error=unsupported_response_type&state=s1"
