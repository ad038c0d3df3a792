"""The OpenAPI document, and the running sandbox tested against it by schemathesis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from signing_async.sandbox import Profile, Sandbox

# These tests compare the document with the values that the sandbox checks, which no public name has.
from signing_async.sandbox.control import Control
from signing_async.sandbox.faults import DELIVERY, DELIVERY_KINDS, KINDS, OPERATIONS, SERVICE
from signing_async.sandbox.fields import EMAIL, LANGUAGES, MAX_MESSAGE, MAX_ORDER, NOT_BLANK, ORDERS
from signing_async.sandbox.openapi import document
from signing_async.sandbox.responses import CONTROL_API
from signing_async.sandbox.service import STATES
from tests.sandbox.serving import Caller, in_thread

PEM = "/sandbox/authority.pem"
PRESETS = ("default", "laravel", "rfc9457", "numeric")

# Well-formed requests may be refused with a documented 400, depending on what happened before.
CONFIG = """
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


SINGLE = ["--phases", "coverage,fuzzing", "--max-examples", "8"]
RUNS = {
    "requests": [*SINGLE, "--include-tag", "service"],
    # In a sequence, a signing may be sent before something is added to it: the request is then refused.
    "sequences": ["--phases", "stateful", "--max-examples", "20", "--exclude-checks", "positive_data_acceptance",
                  "--include-tag", "service", "--include-tag", "own"],
    "control": [*SINGLE, "--include-tag", "control", "--include-tag", "own"],
}  # fmt: skip
TAGS = {"requests": {"service"}, "control": {"control", "own"}}


# The other presets differ in the shapes of errors and ids: their runs are part of `.ci/nightly`.
ALL = [*((preset, run) for preset in PRESETS for run in ("requests", "sequences")), ("numeric", "control")]
SHORT = [("default", "requests"), ("laravel", "sequences"), ("numeric", "control")]


@pytest.mark.parametrize(("preset", "run"), ALL if os.environ.get("SIGNING_NIGHTLY") else SHORT)
def test_every_response_is_documented(preset: str, run: str, tmp_path: Path) -> None:
    """Generate hundreds of valid and invalid requests: no server error, nothing undocumented, no bad input accepted."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with in_thread(profile=Profile.preset(preset), seed=1) as running:
        token = running.do(lambda sandbox: sandbox.access_token())
        command = ["-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run"]
        address = f"{running.sandbox.base_url}/openapi.json"
        options = ["-H", f"Authorization: Bearer {token}", "--seed", "1", "--no-color", *RUNS[run]]
        repository = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, *command, address, *options],
            cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.sandbox.schemathesis_hooks", "PYTHONPATH": repository},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases
    assert int(cases[1]) >= (20 if run == "sequences" else 300), done.stdout[-2000:]
    paths = document(Profile.preset(preset))["paths"].values()
    tested = sum(bool(TAGS.get(run, set()) & set(each["tags"])) for path in paths for each in path.values())
    assert run == "sequences" or f"Tested: {tested}" in done.stdout


async def test_openapi_document_names_every_operation(call: Caller, signing_sandbox: Sandbox) -> None:
    status, body = await call("GET", "/openapi.json")
    assert status == 200
    assert body == document(signing_sandbox.profile)
    operations = [operation for path in body["paths"].values() for operation in path.values()]
    named = {operation["operationId"] for operation in operations if operation["tags"] != ["control"]}
    assert named == set(OPERATIONS) - {"oauth.authorize"}
    of_service = {operation["operationId"] for operation in operations if "service" in operation["tags"]}
    assert of_service == {*SERVICE, "oauth.token"}


def test_document_describes_every_route_of_the_control_api_and_no_other(signing_sandbox: Sandbox) -> None:
    routes = {
        (route.method.lower(), route.path) for route in Control(signing_sandbox._state).routes() if route.path != PEM
    }
    described = document(signing_sandbox.profile)["paths"]
    assert routes == {
        (method, path) for path in described if path.startswith(CONTROL_API) for method in described[path]
    }


def test_values_of_the_document_are_those_that_the_sandbox_checks() -> None:
    described = document(Profile())
    schemas = described["components"]["schemas"]
    signing, recipient = schemas["NewSigning"]["properties"], schemas["NewRecipient"]["anyOf"][0]["properties"]
    assert (signing["name"]["pattern"], signing["language"]["enum"]) == (NOT_BLANK, list(LANGUAGES))
    assert (signing["signing_order"]["enum"], signing["message"]["maxLength"]) == ([*ORDERS, None], MAX_MESSAGE)
    assert (recipient["email"]["pattern"], recipient["order"]["maximum"]) == (EMAIL, MAX_ORDER)
    fault = described["paths"][f"{CONTROL_API}/faults"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert fault["properties"]["operation"]["enum"] == [*OPERATIONS, DELIVERY, "*"]
    assert fault["properties"]["kind"]["enum"] == list(dict.fromkeys((*KINDS, *DELIVERY_KINDS)))
    assert schemas["ControlSigning"]["properties"]["state"]["enum"] == list(STATES)


def test_bare_lists_are_described_without_paging() -> None:
    described = document(Profile(pagination="bare", recipients_list="paged"))["paths"]
    listed = described["/api/1.0/signings"]["get"]
    assert "parameters" not in listed
    assert listed["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    people = described["/api/1.0/signings/{signing_id}/recipients"]["get"]
    assert people["responses"]["200"]["content"]["application/json"]["schema"]["required"] == ["data"]


def test_required_fields_follow_the_profile_and_the_signing_method() -> None:
    profile = Profile(required_recipient_fields=("first_name", "signing_method"), required_signing_fields=("message",))
    schemas = document(profile)["components"]["schemas"]
    assert schemas["NewSigning"]["required"] == ["name", "language", "message"]
    needs = {
        method: set(alternative["required"]) - {"email", "first_name", "signing_method"}
        for alternative in schemas["NewRecipient"]["anyOf"]
        for method in alternative["properties"]["signing_method"]["enum"]
    }
    assert needs == {"email": set(), "approval": set(), "bankid": {"personal_number"}, "sms": {"phone"}}


def test_details_of_the_profile_are_described() -> None:
    described = document(Profile(over_page_size="refuse", max_page_size=50, record_field="data"))
    assert described["components"]["parameters"]["limit"]["schema"]["maximum"] == 50
    created = described["paths"]["/api/1.0/signings"]["post"]["responses"]["201"]
    assert created["links"]["signings_get"]["parameters"] == {"signing_id": "$response.body#/data/id"}
    shapes = {"flat": ["code", "message"], "nested": ["error"], "list": ["errors"],
              "rfc9457": ["type", "title", "status", "detail", "code"]}  # fmt: skip
    for shape, required in shapes.items():
        schemas = document(Profile(error_shape=shape, token_error_shape="profile"))["components"]["schemas"]
        assert schemas["Error"]["required"] == required


def test_no_operation_with_a_file_documents_413() -> None:
    """A file that is too large is refused with 422, and other parts are ignored."""
    paths = document(Profile())["paths"]
    assert "413" not in paths["/api/1.0/signings/{signing_id}/documents"]["post"]["responses"]
    assert "413" in paths["/api/1.0/signings"]["post"]["responses"]
