"""Endpoints and deliveries."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re

import pytest

from signing_async.sandbox.pages.site import NOTICES
from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import check_document
from tests.sandbox.serving import Caller


async def test_endpoint_is_registered_gets_deliveries_and_resends_and_is_removed(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    page = await visitor.get("/sandbox/webhooks")
    page = await visitor.send(page, "/sandbox/webhooks", url=f" {receiver}/ok ", secret="")
    check_document(page)
    secret = page.main.find("code", id="webhook-secret").text
    [endpoint] = visitor.sandbox.webhooks.endpoints()
    assert (endpoint.url, endpoint.secret) == (f"{receiver}/ok", secret)
    await call.draft()
    await visitor.sandbox.webhooks.settled()
    page = await visitor.get("/sandbox/webhooks")
    assert secret not in page.html
    assert "signing.created" in page.main.text
    assert "Delivered 1 attempt" in page.main.text
    [first] = visitor.sandbox.webhooks.deliveries()
    page = await visitor.send(page, f"/sandbox/webhooks/deliveries/{first.id}/resend")
    assert page.main.find("p", role="status").text == NOTICES["resent"]
    await visitor.sandbox.webhooks.settled()
    page = await visitor.get(page.path.partition("?")[0])
    assert first.event_id in page.main.text
    assert '"type": "signing.created"' in page.main.find("pre", aria_label="The event as JSON").raw
    assert "Response 202" in page.main.text
    assert {d.event_id for d in visitor.sandbox.webhooks.deliveries()} == {first.event_id}
    page = await visitor.get("/sandbox/webhooks")
    page = await visitor.send(page, f"/sandbox/webhooks/endpoints/{endpoint.id}/remove")
    assert page.main.find("p", role="status").text == NOTICES["endpoint-removed"]
    late = await visitor.send(page, f"/sandbox/webhooks/deliveries/{first.id}/resend")
    assert late.status == 404
    assert "no such webhook endpoint any more" in late.main.find("p", role="alert").text


async def test_given_secret_is_used_and_typed_unseen(visitor: Visitor, receiver: str) -> None:
    page = await visitor.get("/sandbox/webhooks")
    assert page.main.find("input", name="secret").attributes["type"] == "password"
    page = await visitor.send(page, "/sandbox/webhooks", url=f"{receiver}/ok", secret="my own")
    assert page.main.find("code", id="webhook-secret").text == "my own"


async def test_url_off_this_machine_is_refused_and_kept_in_the_form_without_the_secret(visitor: Visitor) -> None:
    page = await visitor.get("/sandbox/webhooks")
    page = await visitor.send(page, "/sandbox/webhooks", url="https://example.com/hook", secret="my own")
    assert page.status == 400
    assert page.main.find("input", name="url").attributes["value"] == "https://example.com/hook"
    assert "is not on this machine" in page.main.find("p", id="url-error").text
    assert "my own" not in page.html


async def test_failed_unreachable_and_lost_deliveries_show_the_reason_and_the_next_attempt(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    for path in ("/bad", "/ok"):
        call.sandbox.webhooks.register(receiver + path)
    call.sandbox.webhooks.register("http://127.0.0.1:9/none")
    call.sandbox.faults.add("webhooks.deliver", "lose", times=None)
    await call.draft()
    await call.sandbox.webhooks.settled()
    call.sandbox.faults.clear()
    call.sandbox.faults.add("webhooks.deliver", "wrong-signature", times=None)
    await call.draft()
    await call.sandbox.webhooks.settled()
    page = await visitor.get("/sandbox/webhooks")
    for words in ("Lost", "lost on purpose", "HTTP status 500", "retry at", "Retrying"):
        assert words in page.main.text
    assert "could not connect: " in page.main.text
    seen = ""
    for delivery in call.sandbox.webhooks.deliveries():
        one = await visitor.get(f"/sandbox/webhooks/deliveries/{delivery.id}")
        check_document(one)
        seen += one.main.text
    for words in ("None yet.", "wrong-signature", "Next attempt", "Last error", "500"):
        assert words in seen


async def test_delivery_opens_to_its_signature_and_the_endpoints_response(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    call.sandbox.webhooks.register(f"{receiver}/verbose", "s3cret")
    await call.draft()
    await call.sandbox.webhooks.settled()
    [delivery] = call.sandbox.webhooks.deliveries()
    [event] = call.sandbox.webhooks.events()
    page = await visitor.get(f"/sandbox/webhooks/deliveries/{delivery.id}")
    check_document(page)
    assert hmac.new(b"s3cret", event.body, hashlib.sha256).hexdigest() in page.main.text
    assert "X-Reply: yes" in page.main.find("pre", aria_label="Headers of the response").raw
    assert "Set-Cookie: [redacted]" in page.main.find("pre", aria_label="Headers of the response").raw
    assert "<taken>" in page.main.find("pre", aria_label="Body of the response").raw
    assert re.search(r"Duration \d+ ms", page.main.text)
    assert "s3cret" not in page.html


async def test_url_that_is_registered_twice_is_warned_about(
    visitor: Visitor, receiver: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "signing_async.sandbox")
    page = await visitor.get("/sandbox/webhooks")
    first = await visitor.send(page, "/sandbox/webhooks", url=f"{receiver}/ok", secret="")
    assert "registered before" not in first.main.text
    assert not caplog.records
    second = await visitor.send(page, "/sandbox/webhooks", url=f"{receiver}/ok", secret="")
    assert "This URL was registered before: it gets every event once more." in second.main.text
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"webhook endpoint registered twice: {receiver}/ok gets every event once more"


async def test_older_deliveries_are_on_the_following_page(visitor: Visitor, call: Caller, receiver: str) -> None:
    call.sandbox.webhooks.register(f"{receiver}/ok")
    for _ in range(26):
        await call.draft()
    await call.sandbox.webhooks.settled()
    first, second = [await visitor.get(f"/sandbox/webhooks?page={number}") for number in (1, 2)]
    assert "Page 1 of 2, 26 deliveries" in first.main.text
    oldest, *_, newest = call.sandbox.webhooks.deliveries()
    assert (newest.id in first.html, oldest.id in first.html) == (True, False)
    assert (newest.id in second.html, oldest.id in second.html) == (False, True)
