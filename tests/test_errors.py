"""Every exception tells what happened in words, and survives whatever carries exceptions about."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest

from signing_async import APIError, InvalidRequest, OutcomeUnknown, Signing, SigningError, errors

_VALUES: dict[str, Any] = {
    "operation": "signings.send",
    "attempts": 3,
    "status": 418,
    "request_id": "req-1",
    "code": "teapot",
    "messages": {"name": ["too short", "too plain"], "": ["no"]},
    "body": b'{"code": "teapot", "token": "secret"}',
    "redacted_body": b'{"code": "teapot", "token": "[redacted]"}',
    "retry_after": 2.5,
    "may_clear": True,
    "after_transient": False,
    "problems": ("name: too short", "name: too plain"),
    "reason": "too_large",
    "filename": "lease.pdf",
    "known": (Signing("s1", extra={"a": [1]}),),
    "signing": Signing("s1", extra={"a": [1]}),
}


def _tree(cls: type[SigningError] = SigningError) -> Iterator[type[SigningError]]:
    """The class and all public ones below it that this package makes."""
    yield cls
    for below in cls.__subclasses__():
        if below.__module__ == errors.__name__ and not below.__name__.startswith("_"):
            yield from _tree(below)


_ALL = sorted(set(_tree()), key=lambda cls: cls.__name__)


def _made(cls: type[SigningError]) -> SigningError:
    """One with every argument given."""
    first, *parameters, last = inspect.signature(cls).parameters
    assert (first, last) == ("message", "flags")
    flags: errors.Flags = {"transient": True, "effect": "unknown", "client_wide": True}
    return cls("It went wrong.", **{name: _VALUES[name] for name in parameters}, **flags)


def test_errors_that_every_call_of_the_client_would_meet_say_so() -> None:
    """Of these a worker's message, or the rest of a bulk upload, is not to blame."""
    wide = {cls for cls in _ALL if cls.client_wide}
    stores = {*_tree(errors.StorageError)} - {errors.ArchiveConflict}
    assert wide == {
        *(errors.ClientClosed, errors.ConfigurationError, errors.Unauthorized),
        *stores,
        *_tree(errors.AuthError),
    }


def test_errors_tell_whether_a_retry_may_succeed_and_whether_every_call_would_meet_them() -> None:
    for transient in (False, True):
        assert errors.AuthError("It went wrong.", transient=transient).fatal is not transient
        assert errors.JournalError("It went wrong.", transient=transient).fatal is not transient
        assert not SigningError("It went wrong.", transient=transient).fatal
    assert (APIError("No.", status=408).transient, APIError("No.", status=418).transient) == (True, False)
    assert not APIError("No.", status=408, transient=False).transient


@pytest.mark.parametrize("cls", _ALL)
def test_every_error_survives_pickle_and_copying(cls: type[SigningError]) -> None:
    """With its class, texts and attributes; of a body, a pickle holds the redacted bytes."""
    error = _made(cls)
    error.add_note("while testing")
    assert "It went wrong" in str(error)
    assert (error.message, repr(error)) == ("It went wrong.", f"{cls.__name__}({str(error)!r})")
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is cls
        assert (str(back), repr(back), back.args) == (str(error), repr(error), error.args)
        assert {**vars(back), "body": 0} == {**vars(error), "body": 0}
        if isinstance(back, APIError):
            assert back.body == _VALUES["redacted_body"]
    for other in (copy.copy(error), copy.deepcopy(error)):
        assert (type(other), str(other), vars(other)) == (cls, str(error), vars(error))


def test_tree_in_the_docstring_is_complete_and_true() -> None:
    """Including the builtin base classes."""
    drawn: dict[str, tuple[str | None, str | None]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│ ├└─]*)([A-Z]\w+)(.*)$", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        also = re.search(r"\(also an? (\w+)\)", found[3])
        drawn[found[2]] = (above.get(depth - 1), also[1] if also else None)
        above[depth] = found[2]
    assert set(drawn) == {cls.__name__ for cls in _ALL} == set(errors.__all__)
    for name, (parent, other) in drawn.items():
        cls = getattr(errors, name)
        assert cls.__doc__
        assert cls.__bases__[0].__name__ == (parent or "Exception")
        if other is not None:
            assert issubclass(cls, getattr(errors, other, None) or getattr(builtins, other))


def test_text_of_an_error_names_each_message_once() -> None:
    messages = {"language": ["The language must be EN or SV."], "": ["The data is invalid."]}
    error = APIError("The data is invalid.", status=400, messages=messages, request_id="req-1", retry_after=30.0)
    assert str(error) == (
        "HTTP 400: language: The language must be EN or SV; The data is invalid (request id req-1, retry after 30 s)"
    )
    assert str(APIError("", status=500)) == "HTTP 500"
    assert InvalidRequest("a; b", problems=["a", "b"]).problems == ("a", "b")
    assert InvalidRequest("a").problems == ("a",)


def test_amended_error_is_a_copy_with_cause_and_notes() -> None:
    error = OutcomeUnknown("Lost.", known=["s1"])
    error.add_note("while testing")
    with pytest.raises(OutcomeUnknown):
        raise error from OSError("x")
    amended = errors.amended(error, transient=True)
    assert (error.transient, amended.transient, amended.effect) == (False, True, "unknown")
    assert (str(amended), amended.known, amended.__notes__) == ("Lost.", ("s1",), ["while testing"])
    assert amended.__cause__ is error.__cause__
    amended.add_note("package B")
    assert error.__notes__ == ["while testing"]
