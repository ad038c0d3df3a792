"""The recipients' signing page."""

from __future__ import annotations

from types import SimpleNamespace

import aiohttp
import pytest

from signing_async.sandbox import Profile, sealing
from signing_async.sandbox.pages.texts import LANGUAGES
from tests.pdfs import make_pdf
from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import check_document
from tests.sandbox.serving import API, Caller

ENGLISH = LANGUAGES["EN"]


def signing_page(recipient_id: str) -> str:
    """Its address."""
    return f"/sandbox/sign/{recipient_id}"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("method", ["email", "approval", "sms", "bankid"])
async def test_recipient_reads_ticks_signs_and_finds_the_sealed_document(
    visitor: Visitor, call: Caller, method: str, language: str
) -> None:
    words = LANGUAGES[language]
    signing_id = await call.draft(language=language, message="Read this")
    _, document = await call.upload(signing_id)
    extra = {"phone": "+46 70 1", "personal_number": "19900101-2384"}
    recipient = await call.recipient(signing_id, signing_method=method, **extra)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(recipient))
    check_document(page)
    assert page.root.find("html").attributes["lang"] == words.code
    assert words.simulated in page.main.text
    assert words.own_page in page.main.text
    assert "Read this" in page.main.text
    assert "Sandbox User" in page.main.text
    assert words.valid_until in page.main.find("p", id="state").text
    if method == "sms":
        assert "+46 70 1" in page.main.text
    folder = f"/sandbox/signings/{signing_id}/documents/{document['id']}"
    assert page.main.find("object").attributes["data"].startswith(f"{folder}/original.pdf")
    label = {"approval": words.approve, "bankid": words.to_bankid}.get(method, words.sign)
    page = await visitor.send(page, signing_page(recipient), press=label, agree="on")
    if method == "bankid":
        assert page.path == f"{signing_page(recipient)}/bankid"
        check_document(page)
        assert words.bankid_plays in page.main.text
        assert "19900101-2384" in page.main.text
        assert visitor.sandbox.signing(signing_id).state == "sent"
        page = await visitor.send(page, signing_page(recipient), press=words.bankid_confirm)
    assert (page.status, page.path) == (200, signing_page(recipient))
    assert words.state_completed in page.main.find("p", id="state").text
    assert not page.main.every("form")
    assert page.main.find("object").attributes["data"].startswith(f"{folder}/sealed.pdf")
    assert visitor.sandbox.signing(signing_id).is_completed
    again = await visitor.get(f"{signing_page(recipient)}/bankid")
    assert again.path == signing_page(recipient)


async def test_documents_are_served_unchanged_and_only_within_these_pages(visitor: Visitor, call: Caller) -> None:
    signing_id = await call.draft()
    form = aiohttp.FormData(quote_fields=False)
    data = make_pdf(3000)
    form.add_field("selected_file", data, filename='Avtal "1".PDF', content_type="application/pdf")
    document = await call.ok("POST", f"{API}/signings/{signing_id}/documents", data=form)
    recipient = await call.recipient(signing_id)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    folder = f"/sandbox/signings/{signing_id}/documents/{document['id']}"
    assert (await visitor.get(f"{folder}/sealed.pdf")).status == 404
    await call.sandbox.sign(recipient)
    for name, begins in (("original", data), ("sealed", data)):
        async with visitor.session.get(f"{folder}/{name}.pdf") as response:
            body = await response.read()
            assert response.content_type == "application/pdf"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Content-Security-Policy"] == "frame-ancestors 'self'"
            assert "filename*=UTF-8''Avtal%20%221%22.PDF" in response.headers["Content-Disposition"]
            assert response.headers["Content-Disposition"].startswith("inline")
            assert body.startswith(begins)
            assert (body == data) == (name == "original")


@pytest.mark.signing_sandbox(profile=Profile(document_name="stem"))
async def test_document_name_without_pdf_is_served_with_it(visitor: Visitor, call: Caller) -> None:
    signing_id, document_id, _ = await call.sent()
    async with visitor.session.get(f"/sandbox/signings/{signing_id}/documents/{document_id}/original.pdf") as response:
        assert response.headers["Content-Disposition"].endswith("contract.pdf")


@pytest.mark.signing_sandbox(
    profile=Profile(signing_methods=("carrier_pigeon",), phone_methods=(), identification_methods=())
)
async def test_unknown_method_is_signed_with_one_click(visitor: Visitor, call: Caller) -> None:
    _, _, (recipient,) = await call.sent()
    page = await visitor.get(signing_page(recipient))
    assert "The method carrier_pigeon is simulated here: one click signs." in page.main.text
    page = await visitor.send(page, signing_page(recipient), agree="on")
    assert ENGLISH.state_completed in page.main.text


@pytest.mark.signing_sandbox(profile=Profile(phone_methods=(), identification_methods=()))
async def test_page_works_without_the_phone_and_identification_fields(visitor: Visitor, call: Caller) -> None:
    signing_id = await call.draft()
    await call.upload(signing_id)
    by_phone = await call.recipient(signing_id, signing_method="sms")
    by_bankid = await call.recipient(signing_id, signing_method="bankid")
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    assert "send a code to –" in (await visitor.get(signing_page(by_phone))).main.text
    assert "Identification" not in (await visitor.get(f"{signing_page(by_bankid)}/bankid")).main.text


@pytest.mark.parametrize("method", ["email", "bankid"])
async def test_signing_needs_the_ticked_box(visitor: Visitor, call: Caller, method: str) -> None:
    signing_id = await call.draft()
    await call.upload(signing_id)
    recipient = await call.recipient(signing_id, signing_method=method, personal_number="1")
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(recipient))
    page = await visitor.send(page, signing_page(recipient))
    assert page.status == 400
    check_document(page)
    assert page.main.find("p", role="alert").text == ENGLISH.must_read
    box = page.main.find("input", id="agree")
    assert (box.attributes["aria-invalid"], box.attributes["aria-describedby"]) == ("true", "agree-error")
    assert visitor.sandbox.signing(signing_id).state == "sent"


async def test_form_without_a_decision_is_shown_again(visitor: Visitor, call: Caller) -> None:
    _, _, (recipient,) = await call.sent()
    page = await visitor.get(signing_page(recipient))
    token = page.main.every("input")[0].attributes["value"]
    page = await visitor.post(signing_page(recipient), {"csrf_token": token, "decision": "perhaps"})
    assert page.status == 400
    assert "Sign or decline." in page.main.find("p", role="alert").text


async def test_declining_cancels_the_signing_for_the_others(visitor: Visitor, call: Caller) -> None:
    signing_id, _, (first, second) = await call.sent(2)
    page = await visitor.get(signing_page(first))
    assert ENGLISH.decline_cancels in page.main.text
    page = await visitor.send(page, signing_page(first), press=ENGLISH.decline)
    assert ENGLISH.state_declined in page.main.find("p", id="state").text
    assert visitor.sandbox.signing(signing_id).state == "cancelled"
    page = await visitor.get(signing_page(second))
    assert ENGLISH.state_cancelled in page.main.find("p", id="state").text
    assert not page.main.every("form")


async def test_sequential_signing_lets_only_the_next_recipient_sign(visitor: Visitor, call: Caller) -> None:
    signing_id = await call.draft(signing_order="sequential")
    await call.upload(signing_id)
    second = await call.recipient(signing_id, first_name="Second", email="b@x.example", order=2)
    first = await call.recipient(signing_id, first_name="First", email="a@x.example", order=1)
    page = await visitor.get(signing_page(first))
    assert ENGLISH.state_draft in page.main.find("p", id="state").text
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(second))
    assert ENGLISH.state_waiting in page.main.find("p", id="state").text
    assert "Next to sign: First Berg." in page.main.text
    assert [item.text for item in page.main.find("ol", class_="signers").every("li")] == [
        "First Berg Invited",
        "Second Berg (you) Not invited yet",
    ]
    [marked] = [e for e in page.main.every("li") if e.attributes.get("aria-current") == "step"]
    assert marked.text.startswith("First")
    assert not page.main.every("form")
    page = await visitor.get(signing_page(first))
    assert "Next to sign" not in page.main.text
    await visitor.send(page, signing_page(first), agree="on")
    page = await visitor.get(signing_page(second))
    page = await visitor.send(page, signing_page(second), agree="on")
    assert visitor.sandbox.signing(signing_id).is_completed


@pytest.mark.parametrize("words", LANGUAGES.values())
async def test_refusal_is_in_the_signings_language_and_shows_the_current_state(
    visitor: Visitor, call: Caller, words: SimpleNamespace
) -> None:
    draft = await call.draft(language=words.code.upper())
    await call.upload(draft)
    person = await call.recipient(draft)
    _, _, (first, second) = await call.sent(2, language=words.code.upper(), signing_order="sequential")
    token = {"csrf_token": (await visitor.get(signing_page(first))).main.every("input")[0].attributes["value"]}
    signs, declines = token | {"decision": "sign", "agree": "on"}, token | {"decision": "decline"}

    async def refused(recipient: str, standing: str) -> None:
        page = await visitor.post(signing_page(recipient), signs)
        assert page.status == 400
        assert page.main.find("p", role="alert").text == words.refusals[standing]
        assert words.standings[standing] in page.main.find("p", id="state").text
        assert not page.main.every("form")

    await refused(person, "draft")
    await refused(second, "waiting")
    await visitor.post(signing_page(first), signs)
    await refused(first, "signed")
    await visitor.post(signing_page(second), declines)
    await refused(second, "declined")
    await call.sandbox.cancel(draft)
    await refused(person, "cancelled")
    _, _, (late,) = await call.sent(language=words.code.upper())
    call.sandbox.clock.advance(days=14)
    await refused(late, "expired")


async def test_failed_seal_says_why_and_can_be_tried_again(
    visitor: Visitor, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object, **__: object) -> None:
        raise sealing.SealingFailed("It is damaged.")

    _, _, (recipient,) = await call.sent()
    monkeypatch.setattr(sealing, "seal", fail)
    page = await visitor.get(signing_page(recipient))
    page = await visitor.send(page, signing_page(recipient), agree="on")
    assert (page.status, page.main.find("p", role="alert").text) == (409, "It is damaged.")
    assert page.form(signing_page(recipient), ENGLISH.sign)


async def test_recipient_without_a_name_is_shown_by_address(visitor: Visitor, call: Caller) -> None:
    signing_id = await call.draft()
    await call.upload(signing_id)
    recipient = await call.recipient(signing_id, first_name=None, last_name=None)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    assert "anna@example.com (you)" in (await visitor.get(signing_page(recipient))).main.text
