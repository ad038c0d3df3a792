"""The API page names every method, record, exception and status as the code has them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
from aiohttp import web

import signing_async
from signing_async import Assumptions, RetryPolicy, SigningClient, errors
from signing_async.sandbox import Profile, Sandbox, openapi
from tests.servers import serving

PAGE = (Path(signing_async.__file__).parent / "README.md").read_text("utf-8")
ORIGIN = "https://tenant.example.com"


def rows(heading: str, first: str) -> dict[str, list[str]]:
    """Return the rows of the table under ``heading`` whose first column is headed ``first``, by their first cell."""
    section = PAGE[PAGE.index(f"\n## {heading}\n") :]
    table = section[section.index(f"\n| {first} |") :].strip().split("\n\n")[0]
    cells = [[cell.strip() for cell in re.split(r" \|(?= )", row.strip("|"))] for row in table.split("\n")[2:]]
    return {row[0]: row[1:] for row in cells}


async def test_every_method_has_its_row() -> None:
    documented = {re.sub(r"\(.*", "", name.strip("`")): name for name in rows("Methods", "method of `client`")}
    async with SigningClient(ORIGIN, "token") as client:
        owners: dict[str, Any] = {"": client, "signings.": client.signings, "documents.": client.documents}
        owners["recipients."] = client.recipients
        methods = {
            f"{prefix}{name}": method
            for prefix, owner in owners.items()
            for name, method in inspect.getmembers(type(owner), callable)
            if not name.startswith("_")
        }
    assert documented.keys() == methods.keys()
    for name, method in methods.items():
        for argument in re.findall(r"\w+", documented[name].partition("(")[2]):
            assert argument in inspect.signature(method).parameters, f"{name} has no argument {argument}"


def test_endpoints_of_the_methods_are_those_of_the_openapi_document() -> None:
    """The page says {id} for {signing_id}. Methods that make the request of another one name the same endpoint."""
    paths, prefix = openapi.document(Profile())["paths"], "/api/1.0"
    described = {
        operation["operationId"]: f"{method.upper()} {path.removeprefix(prefix).replace('{signing_id}', '{id}')}"
        for path, operations in paths.items()
        for method, operation in operations.items()
        if path.startswith(prefix) and "service" in operation["tags"]
    }
    table = rows("Methods", "method of `client`")
    endpoints = {re.sub(r"\(.*", "", name.strip("`")): row[0] for name, row in table.items()}
    assert described.items() <= {name: endpoint.strip("`") for name, endpoint in endpoints.items()}.items()
    named = re.findall(r"[A-Z]+ /[^`]*", " ".join(endpoints.values()))
    assert set(named) == set(described.values())


def test_exceptions_of_the_methods_exist() -> None:
    raised = " ".join(row[2] for row in rows("Methods", "method of `client`").values())
    assert not set(re.findall(r"`([A-Z]\w*)`", raised)) - set(errors.__all__)


def test_every_exported_name_is_on_the_page() -> None:
    assert not [name for name in signing_async.__all__ if not re.search(rf"\b{name}\b", PAGE)]


def test_every_record_has_its_fields() -> None:
    records: dict[str, list[str]] = {}
    for name in signing_async.__all__:
        public = getattr(signing_async, name)
        for record in [public] if isinstance(public, type) else map(_class_of, typing.get_args(public)):
            if isinstance(record, type) and attrs.has(record) and not issubclass(record, Exception | Assumptions):
                fields = [field.name for field in attrs.fields(record) if not field.name.startswith("_")]
                records |= {f"`{record.__name__}`": [", ".join(f"`{field}`" for field in fields)]} if fields else {}
    assert rows("Records", "record") == records


def _class_of(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def test_tree_of_exceptions_is_that_of_the_module() -> None:
    tree = re.search(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert tree
    assert inspect.cleandoc(tree[1]) in re.sub(r"^    ", "", errors.__doc__ or "", flags=re.MULTILINE)


async def test_status_raises_the_documented_exception() -> None:
    table = rows("Exceptions", "status")

    async def respond(request: web.Request) -> web.Response:
        return web.json_response({}, status=status)

    async with serving(respond) as server, SigningClient(server.origin, "token", retry=RetryPolicy.none()) as client:
        for status in (400, 401, 403, 404, 422, 429, 500, 418):
            with pytest.raises(errors.APIError) as raised:
                await client.me()
            documented = table.get(str(status)) or table["5xx" if status == 500 else "other"]
            assert documented[0].startswith(f"`{type(raised.value).__name__}`")


def test_every_member_of_the_sandbox_is_documented() -> None:
    documented = [re.sub(r"^await |\(.*", "", name.strip("`")) for name in rows("The sandbox", "member")]
    assert documented == [name for name, _ in inspect.getmembers(Sandbox) if not name.startswith("_")]


def test_every_field_of_a_profile_is_documented_with_its_default() -> None:
    documented = rows("The sandbox", "field")
    assert list(documented) == [f"`{field.name}`" for field in dataclasses.fields(Profile)]
    for field in dataclasses.fields(Profile):
        shown = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        assert documented[f"`{field.name}`"][0].startswith(f"`{shown}`")
