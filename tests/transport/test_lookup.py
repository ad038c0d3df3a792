"""The record and the request id are found at the paths of the assumptions."""

from __future__ import annotations

from signing_async import Assumptions
from signing_async.transport.lookup import look_up, record, request_id


def test_look_up_follows_a_dotted_path_through_objects_and_lists() -> None:
    data = {"a": {"b": [{"c": 1}]}}
    assert look_up(data, "a.b.0.c") == 1
    for path in ("x", "a.x", "a.b.1", "a.b.-1", "a.b.x", "a.b.²", "a.b.0.c.d"):
        assert look_up(data, path) is None


def test_record_is_the_response_or_the_object_that_it_wraps() -> None:
    """An object with an id wraps nothing."""
    assumptions = Assumptions()
    assert record({"id": "s", "data": {"id": "x"}}, assumptions) == {"id": "s", "data": {"id": "x"}}
    for name in ("data", "signing", "document", "recipient", "user", "result"):
        assert record({name: {"id": "s"}, "request_id": "r"}, assumptions) == {"id": "s"}
    assert record({"data": [1]}, assumptions) == {"data": [1]}
    assert record([1], assumptions) == [1]
    assert record({"payload": {"record": {"id": "s"}}}, Assumptions(record_paths="payload.record")) == {"id": "s"}


def test_request_id_comes_from_a_header_before_the_body() -> None:
    """Never from a flag, an object or an empty string."""
    assumptions = Assumptions()
    assert request_id({"X-Request-Id": "h"}, {"request_id": "b"}, assumptions) == "h"
    assert request_id({"request_id": "g", "X-Request-Id": "h"}, None, assumptions) == "g"
    assert request_id({}, {"request_id": "b"}, assumptions) == "b"
    assert request_id({}, {"meta": {"request_id": 7}}, assumptions) == "7"
    assert request_id({}, {"request_id": ""}, assumptions) is None
    assert request_id({}, {"request_id": True, "error": {"request_id": {}}}, assumptions) is None
    assert request_id({"X-Trace": "t"}, None, Assumptions(request_id_headers="X-Trace")) == "t"
