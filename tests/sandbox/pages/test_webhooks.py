"""Webhook endpoints and deliveries; faults and the rate limit."""

from __future__ import annotations

import hashlib
import hmac
import re

from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import check_document
from tests.sandbox.receiving import Receiver
from tests.sandbox.serving import API, Caller

WEBHOOKS, FAULTS = "/sandbox/webhooks", "/sandbox/faults"


async def test_endpoint_is_registered_gets_deliveries_and_resends_and_is_removed(
    visitor: Visitor, call: Caller, receiver: Receiver
) -> None:
    webhooks = visitor.sandbox.webhooks
    page = await visitor.send(await visitor.get(WEBHOOKS), WEBHOOKS, url=f" {receiver.base}/verbose ", secret="")
    check_document(page)
    secret = page.main.find("code", id="webhook-secret").text
    [endpoint] = webhooks.endpoints()
    assert (endpoint.url, endpoint.secret) == (f"{receiver.base}/verbose", secret)
    await call.draft()
    await webhooks.settled()
    page = await visitor.get(WEBHOOKS)
    assert secret not in page.html
    assert "signing.created" in page.main.text
    assert "Delivered 1 attempt" in page.main.text
    [first] = webhooks.deliveries()
    page = await visitor.send(page, f"{WEBHOOKS}/deliveries/{first.id}/resend")
    assert page.notice == "The event is sent again, as a new delivery."
    await webhooks.settled()
    page = await visitor.get(page.path.partition("?")[0])
    check_document(page)
    assert first.event_id in page.main.text
    assert '"type": "signing.created"' in page.main.find("pre", aria_label="The event as JSON").raw
    assert "Response 200" in page.main.text
    assert hmac.new(secret.encode(), receiver.bodies[1], hashlib.sha256).hexdigest() in page.main.text
    headers = page.main.find("pre", aria_label="Headers of the response").raw
    assert "X-Reply: yes" in headers
    assert "Set-Cookie: [redacted]" in headers
    assert "<taken>" in page.main.find("pre", aria_label="Body of the response").raw
    assert re.search(r"Duration \d+ ms", page.main.text)
    assert secret not in page.html
    page = await visitor.get(WEBHOOKS)
    page = await visitor.send(page, f"{WEBHOOKS}/endpoints/{endpoint.id}/remove")
    assert "it gets no more events" in page.notice
    late = await visitor.send(page, f"{WEBHOOKS}/deliveries/{first.id}/resend")
    assert late.status == 404
    assert "no such webhook endpoint any more" in late.main.find("p", role="alert").text


async def test_given_secret_is_used_and_typed_unseen(visitor: Visitor, receiver: Receiver) -> None:
    page = await visitor.get(WEBHOOKS)
    assert page.main.find("input", name="secret").attributes["type"] == "password"
    refused = await visitor.send(page, WEBHOOKS, url="https://example.com/hook", secret="my own")
    assert "is not on this machine" in refused.refusal
    assert refused.main.find("input", name="url").attributes["value"] == "https://example.com/hook"
    assert "is not on this machine" in refused.main.find("p", id="url-error").text
    assert "my own" not in refused.html
    first, second = [await visitor.send(page, WEBHOOKS, url=receiver.url, secret="my own") for _ in range(2)]
    assert first.main.find("code", id="webhook-secret").text == "my own"
    assert "registered before" not in first.main.text
    assert "This URL was registered before: it gets every event once more." in second.main.text


async def test_failed_unreachable_and_lost_deliveries_show_the_reason_and_the_next_attempt(
    visitor: Visitor, call: Caller, receiver: Receiver
) -> None:
    for url in (f"{receiver.base}/bad", receiver.url, "http://127.0.0.1:9/none"):
        call.sandbox.webhooks.register(url)
    for kind in ("lose", "wrong-signature"):
        call.sandbox.faults.clear()
        call.sandbox.faults.add("webhooks.deliver", kind, times=None)
        await call.draft()
        await call.sandbox.webhooks.settled()
    text = (await visitor.get(WEBHOOKS)).main.text
    for words in ("Lost", "lost on purpose", "HTTP status 500", "retry at", "Retrying", "could not connect: "):
        assert words in text
    pages = [await visitor.get(f"{WEBHOOKS}/deliveries/{one.id}") for one in call.sandbox.webhooks.deliveries()]
    for page in pages:
        check_document(page)
    text = " ".join(page.main.text for page in pages)
    for words in ("None yet.", "wrong-signature", "Next attempt", "Last error", "500"):
        assert words in text


async def test_delivery_that_is_retried_is_amber(visitor: Visitor, call: Caller, receiver: Receiver) -> None:
    """It is so in the list and on its own page."""
    call.sandbox.webhooks.register(f"{receiver.base}/bad")
    await call.draft()
    await call.sandbox.webhooks.settled()
    [delivery] = call.sandbox.webhooks.deliveries()
    for path in (WEBHOOKS, f"{WEBHOOKS}/deliveries/{delivery.id}"):
        badges = (await visitor.get(path)).main.every("span")
        assert [one.attributes["class"] for one in badges if one.text == "Retrying"] == ["badge warn"], path


# faults


async def test_fault_of_the_form_is_applied_counted_and_removed(visitor: Visitor, call: Caller) -> None:
    page = await visitor.get(FAULTS)
    check_document(page)
    kinds = [option.attributes["value"] for option in page.main.find("select", name="kind").every("option")]
    assert [term.text for term in page.main.every("dt")] == kinds
    page = await visitor.send(page, FAULTS, operation="me", kind="429", times="1", seconds="7")
    assert page.notice == "The fault was added."
    status, _ = await call("GET", f"{API}/me")
    assert (status, call.headers["retry-after"]) == (429, "7")
    slow = {"operation": "webhooks.deliver", "kind": "slow", "times": "", "seconds": "0.5"}
    page = await visitor.send(page, FAULTS, slow)
    for words in ("1 of 1 – used up", "0 times, no limit", "seconds=0.5"):
        assert words in page.main.find("table").text
    page = await visitor.send(page, f"{FAULTS}/remove", press="Remove the fault 429")
    assert [fault.kind for fault in visitor.sandbox.faults.arranged] == ["slow"]
    page = await visitor.send(page, f"{FAULTS}/clear")
    assert page.notice == "All faults were removed."
    invalid = (
        ({"kind": "duplicate"}, "kind: * has no fault 'duplicate'"),
        ({"times": "many"}, "times: must be a number or empty, got 'many'"),
        ({"kind": "500", "seconds": "1"}, "seconds: unknown detail of the fault '500'"),
    )
    for fields, words in invalid:
        refused = await visitor.send(page, FAULTS, fields)
        check_document(refused)
        assert words in refused.refusal
        for name in fields.keys() & {"times", "seconds"}:
            assert refused.main.find("input", name=name).attributes["value"] == fields[name]
    assert not visitor.sandbox.faults.arranged


async def test_rate_limit_of_the_form_is_set_and_removed(visitor: Visitor, call: Caller) -> None:
    page, action = await visitor.get(FAULTS), f"{FAULTS}/rate-limit"
    page = await visitor.send(page, action, rate="0.01", burst="1")
    assert "0.01 per second, 1 at once" in page.main.text
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    wrong = await visitor.send(page, action, rate="0", burst="1")
    assert "rate: must be a number of at least 1e-06" in wrong.refusal
    page = await visitor.send(page, action, rate="5", burst="")
    assert "5 per second, 5 at once" in page.main.text
    page = await visitor.send(page, action, rate="", burst="")
    assert page.notice == "The rate limit was removed."
    assert (await call("GET", f"{API}/me"))[0] == 200
