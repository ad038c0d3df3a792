"""The recipients' signing page."""

from __future__ import annotations

import pytest

from signing_async.sandbox import Profile
from tests.pdfs import make_pdf
from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import check_document
from tests.sandbox.serving import API, Caller


def signing_page(recipient_id: str) -> str:
    """Its address."""
    return f"/sandbox/sign/{recipient_id}"


@pytest.mark.parametrize(
    ("language", "method", "label", "simulated", "completed"),
    [
        ("EN", "sms", "Sign", "Simulated", "Everybody has signed"),
        ("SV", "bankid", "Fortsätt med simulerat BankID", "Simulerat", "Alla har signerat"),
    ],
)
async def test_recipient_reads_ticks_signs_and_finds_the_sealed_document(
    visitor: Visitor, call: Caller, method: str, language: str, label: str, simulated: str, completed: str
) -> None:
    person = {"signing_method": method, "phone": "+46 70 1", "personal_number": "19900101-2384"}
    signing_id, document_id, [recipient] = await call.sent(person=person, language=language, message="Read this")
    page = await visitor.get(signing_page(recipient))
    check_document(page)
    assert page.root.find("html").attributes["lang"] == language.lower()
    for words in ("Read this", "Sandbox User", simulated):
        assert words in page.main.text
    assert ("+46 70 1" in page.main.text) == (method == "sms")
    folder = f"/sandbox/signings/{signing_id}/documents/{document_id}"
    assert page.main.find("object").attributes["data"].startswith(f"{folder}/original.pdf")
    page = await visitor.send(page, signing_page(recipient), press=label, agree="on")
    if method == "bankid":
        assert page.path == f"{signing_page(recipient)}/bankid"
        check_document(page)
        assert "19900101-2384" in page.main.text
        assert visitor.sandbox.signing(signing_id).state == "sent"
        page = await visitor.send(page, signing_page(recipient))
    assert (page.status, page.path) == (200, signing_page(recipient))
    assert completed in page.main.find("p", id="state").text
    assert not page.main.every("form")
    assert page.main.find("object").attributes["data"].startswith(f"{folder}/sealed.pdf")
    assert visitor.sandbox.signing(signing_id).is_completed
    assert (await visitor.get(f"{signing_page(recipient)}/bankid")).path == signing_page(recipient)


@pytest.mark.signing_sandbox(profile=Profile(document_name="stem"))
async def test_documents_are_served_unchanged_and_only_within_these_pages(visitor: Visitor, call: Caller) -> None:
    signing_id, data = await call.draft(), make_pdf(3000)
    _, document = await call.upload(signing_id, data, 'Avtal"1".pdf')
    recipient = await call.recipient(signing_id)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    folder = f"/sandbox/signings/{signing_id}/documents/{document['id']}"
    assert (await visitor.get(f"{folder}/sealed.pdf")).status == 404
    await call.sandbox.sign(recipient)
    for name in ("original", "sealed"):
        async with visitor.session.get(f"{folder}/{name}.pdf") as response:
            body, headers = await response.read(), response.headers
        assert headers["Content-Type"] == "application/pdf"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == "frame-ancestors 'self'"
        assert headers["Content-Disposition"].startswith("inline")
        assert headers["Content-Disposition"].endswith("filename*=UTF-8''Avtal%221%22.pdf")
        assert body.startswith(data)
        assert (body == data) == (name == "original")


@pytest.mark.signing_sandbox(
    profile=Profile(signing_methods=("carrier_pigeon", "sms", "bankid"), phone_methods=(), identification_methods=())
)
async def test_page_of_any_method_needs_the_ticked_box_and_a_decision(visitor: Visitor, call: Caller) -> None:
    _, _, [by_phone] = await call.sent(person={"signing_method": "sms"})
    assert "send a code to –" in (await visitor.get(signing_page(by_phone))).main.text
    _, _, [by_bankid] = await call.sent(person={"signing_method": "bankid"})
    assert "Identification" not in (await visitor.get(f"{signing_page(by_bankid)}/bankid")).main.text
    signing_id, _, [recipient] = await call.sent()
    page = await visitor.get(signing_page(recipient))
    assert "The method carrier_pigeon is simulated here: one click signs." in page.main.text
    page = await visitor.send(page, signing_page(recipient))
    check_document(page)
    assert page.refusal == "Tick the box first."
    box = page.main.find("input", id="agree")
    assert (box.attributes["aria-invalid"], box.attributes["aria-describedby"]) == ("true", "agree-error")
    token = page.main.every("input")[0].attributes["value"]
    refused = await visitor.post(signing_page(recipient), {"csrf_token": token, "decision": "perhaps"})
    assert refused.refusal == "Sign or decline."
    assert visitor.sandbox.signing(signing_id).state == "sent"
    await visitor.send(page, signing_page(recipient), agree="on")
    assert visitor.sandbox.signing(signing_id).is_completed


async def test_declining_cancels_the_signing_for_the_others(visitor: Visitor, call: Caller) -> None:
    signing_id, _, (first, second) = await call.sent(2)
    page = await visitor.get(signing_page(first))
    assert "This cancels the signing for everybody." in page.main.text
    page = await visitor.send(page, signing_page(first), press="Decline to sign")
    assert "You declined to sign at" in page.main.find("p", id="state").text
    assert visitor.sandbox.signing(signing_id).state == "cancelled"
    page = await visitor.get(signing_page(second))
    assert "This signing was cancelled." in page.main.find("p", id="state").text
    assert not page.main.every("form")


async def test_sequential_signing_lets_only_the_next_recipient_sign(visitor: Visitor, call: Caller) -> None:
    signing_id = await call.draft(signing_order="sequential")
    await call.upload(signing_id)
    second = await call.recipient(signing_id, first_name="Second", email="b@x.example", order=2)
    first = await call.recipient(signing_id, first_name=None, last_name=None, email="a@x.example", order=1)
    page = await visitor.get(signing_page(first))
    assert "has not been sent yet" in page.main.find("p", id="state").text
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(second))
    assert "It is not your turn yet." in page.main.find("p", id="state").text
    assert "Next to sign: a@x.example." in page.main.text
    assert [item.text for item in page.main.find("ol", class_="signers").every("li")] == [
        "a@x.example Invited",
        "Second Berg (you) Not invited yet",
    ]
    [marked] = [e for e in page.main.every("li") if e.attributes.get("aria-current") == "step"]
    assert marked.text.startswith("a@x.example")
    assert not page.main.every("form")
    page = await visitor.get(signing_page(first))
    assert "Next to sign" not in page.main.text
    await visitor.send(page, signing_page(first), agree="on")
    await visitor.send(await visitor.get(signing_page(second)), signing_page(second), agree="on")
    assert visitor.sandbox.signing(signing_id).is_completed


async def test_refusal_is_in_the_signings_language_and_shows_the_current_state(visitor: Visitor, call: Caller) -> None:
    draft = await call.draft(language="SV")
    await call.upload(draft)
    person = await call.recipient(draft)
    _, _, (first, second) = await call.sent(2, language="SV", signing_order="sequential")
    token = {"csrf_token": (await visitor.get(signing_page(first))).main.every("input")[0].attributes["value"]}
    signs, declines = token | {"decision": "sign", "agree": "on"}, token | {"decision": "decline"}

    async def refused(recipient: str, words: str) -> None:
        page = await visitor.post(signing_page(recipient), signs)
        assert page.refusal == words
        assert not page.main.every("form")

    await refused(person, "Signeringen är inte skickad än.")
    await refused(second, "Det är inte din tur än.")
    await visitor.post(signing_page(first), signs)
    await refused(first, "Du har redan signerat.")
    await visitor.post(signing_page(second), declines)
    await refused(second, "Du har redan avböjt.")
    await call.sandbox.cancel(draft)
    await refused(person, "Signeringen har avbrutits.")
    for language, words in (("SV", "Inbjudan har gått ut."), ("EN", "The invitation has expired.")):
        _, _, (late,) = await call.sent(language=language)
        call.sandbox.clock.advance(days=14)
        await refused(late, words)
