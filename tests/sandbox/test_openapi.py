"""The OpenAPI document, and the running sandbox tested against it by schemathesis."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest

from signing_async.sandbox import Profile, Sandbox

# The document is compared with all routes, operations and faults, and no response lists these.
from signing_async.sandbox.control import Control
from signing_async.sandbox.faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS
from tests.sandbox.serving import caller

CONTROL = "/sandbox/api"
PRESETS = ("default", "laravel", "rfc9457", "numeric")

NIGHTLY = os.environ.get("SIGNING_NIGHTLY")

# Well-formed requests may be refused with a documented 400, depending on what happened before.
CONFIG = f"""
[phases.stateful]
generation.max-examples = {20 if NIGHTLY else 5}
# In a sequence, a signing may be sent before something is added to it: the request is then refused.
checks.positive_data_acceptance.enabled = false

[[operations]]
include-operation-id = ["signings.send", "signings.cancel", "signings.delete", "recipients.remind", "oauth.token"]
checks.positive_data_acceptance.enabled = false

[[operations]]
include-tag = "control"
checks.positive_data_acceptance.enabled = false
checks.negative_data_rejection.enabled = false
checks.ensure_resource_availability.enabled = false
checks.use_after_free.enabled = false

[[operations]]
include-operation-id = "documents.download_signed"
checks.ensure_resource_availability.enabled = false
"""


# The control API has a run of its own, because it arranges faults.
SHORT = [("laravel", "coverage,stateful", {"service"}), ("numeric", "coverage", {"control", "own"})]
# The other presets differ in the shapes of errors and ids. Sequences of requests also cancel and delete.
ALL = [(preset, "coverage,fuzzing", {"service"}) for preset in PRESETS]
ALL += [(preset, "stateful", {"service", "own"}) for preset in PRESETS]
ALL += [("numeric", "coverage,fuzzing", {"control", "own"})]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("preset", "phases", "tags"), ALL if NIGHTLY else SHORT)
async def test_every_response_is_documented(preset: str, phases: str, tags: set[str], tmp_path: Path) -> None:
    """Generate hundreds of valid and invalid requests: no server error, nothing undocumented, no bad input accepted."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    options = ["--phases", phases, "--max-examples", "8" if NIGHTLY else "1", "--seed", "1", "--no-color"]
    for tag in tags:
        options += ["--include-tag", tag]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.sandbox.schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parents[2])}
    async with Sandbox(profile=Profile.preset(preset), seed=1) as sandbox, caller(sandbox) as call:
        paths = (await call.ok("GET", "/openapi.json"))["paths"].values()
        options += ["-H", f"Authorization: Bearer {sandbox.access_token()}", f"{sandbox.base_url}/openapi.json"]
        command = ["-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run", *options]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=tmp_path, env=os.environ | hooks, stdout=PIPE, stderr=STDOUT
        )
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-10_000:]
    cases = re.search(r"(\d+) generated", said)
    assert cases
    assert int(cases[1]) >= (20 if phases == "stateful" else 300), said[-2000:]
    tested = sum(bool(tags & set(operation["tags"])) for path in paths for operation in path.values())
    assert phases == "stateful" or f"Tested: {tested}" in said


async def described(**settings: Any) -> Any:
    """Return the document of a sandbox with this profile."""
    async with Sandbox(profile=Profile(**settings)) as sandbox, caller(sandbox) as call:
        return await call.ok("GET", "/openapi.json")


async def test_document_names_every_operation_fault_and_route_of_the_control_api(signing_sandbox: Sandbox) -> None:
    paths = (await described())["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    named = {operation["operationId"] for operation in operations if operation["tags"] != ["control"]}
    assert named == set(OPERATIONS) - {"oauth.authorize"}
    fault = paths[f"{CONTROL}/faults"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fault["operation"]["enum"] == [*OPERATIONS, DELIVERY, "*"]
    assert fault["kind"]["enum"] == list(dict.fromkeys(KINDS + DELIVERY_KINDS))
    routes = {(route.method.lower(), route.path) for route in Control(signing_sandbox._state).routes()}
    of_control = {(method, path) for path in paths if path.startswith(CONTROL) for method in paths[path]}
    assert routes == {*of_control, ("get", "/sandbox/authority.pem")}


async def test_details_of_the_profile_are_described() -> None:
    required = {
        "required_recipient_fields": ("first_name", "signing_method"),
        "required_signing_fields": ("message",),
        "pagination": "bare",
    }
    document = await described(**required)
    schemas = document["components"]["schemas"]
    assert schemas["NewSigning"]["required"] == ["name", "language", "message"]
    needs = {
        method: set(alternative["required"]) - {"email", "first_name", "signing_method"}
        for alternative in schemas["NewRecipient"]["anyOf"]
        for method in alternative["properties"]["signing_method"]["enum"]
    }
    assert needs == {"email": set(), "approval": set(), "bankid": {"personal_number"}, "sms": {"phone"}}
    listed = document["paths"]["/api/1.0/signings"]["get"]
    assert "parameters" not in listed
    assert listed["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    document = await described(over_page_size="refuse", max_page_size=50, record_field="data")
    assert document["components"]["parameters"]["limit"]["schema"]["maximum"] == 50
    created = document["paths"]["/api/1.0/signings"]["post"]["responses"]["201"]
    assert created["links"]["signings_get"]["parameters"] == {"signing_id": "$response.body#/data/id"}
    for shape, fields in (
        ("nested", ["error"]),
        ("list", ["errors"]),
        ("rfc9457", ["type", "title", "status", "detail", "code"]),
    ):
        document = await described(error_shape=shape, token_error_shape="profile")
        assert document["components"]["schemas"]["Error"]["required"] == fields
