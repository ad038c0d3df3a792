"""The public names of the package, held against a list, and loaded only when they are used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import signing_async
from signing_async import errors

NAMES = [
    "APIError", "ArchiveConflict", "ArchiveError", "Assumptions", "Attempt", "AuthError", "AuthorizationRequest",
    "BadRequest", "CannotBeSent", "Claim", "ClaimLost", "ClientClosed", "ConfigurationError", "DecodeError",
    "DispatchResult", "Document", "DocumentRejected", "DraftChanged", "FileTokenStore", "Forbidden", "InboxError",
    "InvalidRequest", "InvalidSignature", "Journal", "JournalError", "Language", "LocalRateLimiter", "MalformedEvent",
    "MemoryTokenStore", "NewRecipient", "NotFound", "NotSound", "NotYetSigned", "OAuth", "OutcomeUnknown",
    "OutcomeUnknownTimeout", "Page", "Pager", "PdfRejected", "PdfSource", "Progress", "RateLimited", "RateLimiter",
    "Reader", "Recipient", "RefreshRejected", "RemindResult", "RequestTimeout", "Response", "ResponseStream",
    "Results", "RetryPolicy", "SealedFile", "ServerError", "Signing", "SigningCancelled", "SigningClient",
    "SigningError", "SigningMethod", "SigningOrder", "SigningPackage", "SigningState", "Source", "SqliteJournal",
    "StateMismatch", "StorageError", "TenantApp", "Tenants", "Timeouts", "Token", "TokenStore", "TokenSuperseded",
    "TransportError", "Unauthorized", "UploadResult", "User", "WaitTimeout", "WebhookError",
]  # fmt: skip
_HEAVY = {"aiohttp", "attrs", "attr", "cattrs", "backoff", "yarl", "asyncio", "orjson"}


def _loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement, and not before."""
    script = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names_are_exactly_these() -> None:
    """A name is added or taken away on purpose only."""
    assert vars(signing_async)["__all__"] == NAMES


@pytest.mark.parametrize("name", ["signing_async", "signing_async.archive", "signing_async.webhooks"])
def test_public_names_are_those_that_type_checkers_read(name: str) -> None:
    """Each package lists its names twice: once for checkers, and once to load them."""
    package = import_module(name)
    imports = next(node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If)).body
    found = {alias.asname for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}
    read = {name for name in found if name is not None}
    if package is signing_async:
        read.update(errors.__all__)
    assert sorted(vars(package)["__all__"]) == sorted(read)


def test_public_names_can_be_imported() -> None:
    for name in NAMES:
        value = getattr(signing_async, name)
        assert getattr(signing_async, name) is value
        if name != "Source":  # an alias of a union, which has neither name nor docstring
            assert value.__name__ == name
            assert value.__module__.startswith("signing_async.")
            assert value.__doc__
    given: dict[str, object] = {}
    exec("from signing_async import *", given)
    assert sorted(set(given) - {"__builtins__"}) == NAMES
    assert set(NAMES) <= set(dir(signing_async))
    assert vars(signing_async)["__getattr__"]("errors") is errors  # also if it was not imported before


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'signing_async' has no attribute 'SigningKlient'$"):
        signing_async.SigningKlient  # noqa: B018  # that it is missing is what is tested
    with pytest.raises(ImportError, match="cannot import name 'SigningKlient'"):
        exec("from signing_async import SigningKlient")


def test_nothing_heavy_is_imported() -> None:
    """The package, the webhook side and the errors need the standard library alone; the client has no sandbox."""
    loaded = _loaded_after("import signing_async; dir(signing_async)")
    assert "signing_async" in loaded
    assert not {name.partition(".")[0] for name in loaded} & _HEAVY  # not even asyncio
    loaded = _loaded_after("import signing_async.webhooks; from signing_async import SigningError, RateLimited")
    assert {name.partition(".")[0] for name in loaded} & _HEAVY <= {"asyncio"}
    loaded = _loaded_after("from signing_async import *")
    assert {"aiohttp", "attrs"} <= loaded
    assert not {name for name in loaded if ".sandbox" in name}
