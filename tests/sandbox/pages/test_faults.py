"""Arranging faults and the rate limit."""

from __future__ import annotations

import pytest

from signing_async.sandbox.faults import DELIVERY_KINDS, KINDS
from signing_async.sandbox.pages.faults import ABOUT
from signing_async.sandbox.pages.site import NOTICES
from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import check_document
from tests.sandbox.serving import API, Caller


async def test_fault_of_the_form_is_applied_counted_and_removed(visitor: Visitor, call: Caller) -> None:
    page = await visitor.get("/sandbox/faults")
    page = await visitor.send(page, "/sandbox/faults", operation="me", kind="429", times="1", seconds="7")
    assert page.main.find("p", role="status").text == NOTICES["fault"]
    status, _ = await call("GET", f"{API}/me")
    assert (status, call.headers["retry-after"]) == (429, "7")
    page = await visitor.get("/sandbox/faults")
    assert "1 of 1 – used up" in page.main.find("table").text
    slow = {"operation": "webhooks.deliver", "kind": "slow", "times": "", "seconds": "0.5"}
    page = await visitor.send(page, "/sandbox/faults", slow)
    assert "0 times, no limit" in page.main.find("table").text
    assert "seconds=0.5" in page.main.find("table").text
    page = await visitor.send(page, "/sandbox/faults/remove", press="Remove the fault 429")
    assert [fault.kind for fault in visitor.sandbox.faults.arranged] == ["slow"]
    page = await visitor.send(page, "/sandbox/faults/clear")
    assert page.main.find("p", role="status").text == NOTICES["faults-cleared"]
    assert not visitor.sandbox.faults.arranged
    assert "Remove all" not in page.main.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "duplicate"}, "kind: * has no fault 'duplicate'"),
        ({"times": "many"}, "times: must be a number or empty, got 'many'"),
        ({"times": "0"}, "times: must be an integer of at least 1, got 0"),
        ({"seconds": "-1"}, "seconds: must be a number or empty, got '-1'"),
        ({"kind": "500", "seconds": "1"}, "seconds: unknown detail of the fault '500'"),
    ],
)
async def test_invalid_fault_is_refused_and_the_form_keeps_its_input(
    visitor: Visitor, fields: dict[str, str], words: str
) -> None:
    page = await visitor.get("/sandbox/faults")
    page = await visitor.send(page, "/sandbox/faults", fields)
    assert page.status == 400
    check_document(page)
    assert words in page.main.find("p", role="alert").text
    for name in fields.keys() & {"times", "seconds"}:
        assert page.main.find("input", name=name).attributes["value"] == fields[name]
    assert not visitor.sandbox.faults.arranged


async def test_page_says_what_each_kind_does(visitor: Visitor) -> None:
    assert ABOUT.keys() == KINDS.keys() | DELIVERY_KINDS.keys()
    page = await visitor.get("/sandbox/faults")
    check_document(page)
    assert all(text in page.main.text for text in ABOUT.values())


async def test_rate_limit_of_the_form_is_set_and_removed(visitor: Visitor, call: Caller) -> None:
    page = await visitor.get("/sandbox/faults")
    page = await visitor.send(page, "/sandbox/faults/rate-limit", rate="0.01", burst="1")
    assert "0.01 per second, 1 at once" in page.main.text
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    wrong = await visitor.send(page, "/sandbox/faults/rate-limit", rate="0", burst="1")
    assert wrong.status == 400
    assert "rate: must be a number of at least 1e-06" in wrong.main.find("p", role="alert").text
    page = await visitor.send(page, "/sandbox/faults/rate-limit", rate="5", burst="")
    assert "5 per second, 5 at once" in page.main.text
    page = await visitor.send(page, "/sandbox/faults/rate-limit", rate="", burst="")
    assert page.main.find("p", role="status").text == NOTICES["limit-lifted"]
    assert (await call("GET", f"{API}/me"))[0] == 200
