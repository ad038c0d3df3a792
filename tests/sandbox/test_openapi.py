"""The OpenAPI document, and the running sandbox tested against it by schemathesis."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from signing_async.sandbox import Profile, Sandbox

# The document is compared with all routes, and no response lists these.
from signing_async.sandbox.control import Control
from tests.sandbox.serving import caller, in_thread

CONTROL = "/sandbox/api"
PRESETS = ("default", "laravel", "rfc9457", "numeric")

NIGHTLY = os.environ.get("SIGNING_NIGHTLY")

# Well-formed requests may be refused with a documented 400, depending on what happened before.
CONFIG = f"""
[phases.stateful]
generation.max-examples = {20 if NIGHTLY else 8}
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
CONTROL_RUN = ("numeric", "coverage,fuzzing", {"control", "own"})
SHORT = [("laravel", "coverage,fuzzing,stateful", {"service"}), CONTROL_RUN]
# The other presets differ in the shapes of errors and ids. Sequences of requests also cancel and delete.
ALL = [(preset, "coverage,fuzzing", {"service"}) for preset in PRESETS]
ALL += [*((preset, "stateful", {"service", "own"}) for preset in PRESETS), CONTROL_RUN]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("preset", "phases", "tags"), ALL if NIGHTLY else SHORT)
def test_every_response_is_documented(preset: str, phases: str, tags: set[str], tmp_path: Path) -> None:
    """Generate hundreds of valid and invalid requests: no server error, nothing undocumented, no bad input accepted."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    options = ["--phases", phases, "--max-examples", "8" if NIGHTLY else "1", "--seed", "1", "--no-color"]
    for tag in tags:
        options += ["--include-tag", tag]
    with in_thread(profile=Profile.preset(preset), seed=1) as (url, token):
        command = ["-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run", f"{url}/openapi.json"]
        repository = str(Path(__file__).parents[2])
        with urllib.request.urlopen(f"{url}/openapi.json") as response:
            paths = json.load(response)["paths"].values()
        done = subprocess.run(
            [sys.executable, *command, "-H", f"Authorization: Bearer {token}", *options],
            cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.sandbox.schemathesis_hooks", "PYTHONPATH": repository},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases
    assert int(cases[1]) >= (20 if phases == "stateful" else 300), done.stdout[-2000:]
    tested = sum(bool(tags & set(operation["tags"])) for path in paths for operation in path.values())
    assert phases == "stateful" or f"Tested: {tested}" in done.stdout


async def described(profile: Profile | None = None) -> Any:
    """Return the document of a sandbox with this profile."""
    async with Sandbox(profile=profile) as sandbox, caller(sandbox) as call:
        return await call.ok("GET", "/openapi.json")


async def test_document_names_every_operation_and_fault(signing_sandbox: Sandbox) -> None:
    known = []
    for wrong in (("nothing", "500"), ("*", "nothing"), ("webhooks.deliver", "nothing")):
        with pytest.raises(ValueError, match="nothing") as caught:
            signing_sandbox.faults.add(*wrong)
        known.append(str(caught.value).partition("use one of ")[2].split(", "))
    paths = (await described())["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    named = {operation["operationId"] for operation in operations if operation["tags"] != ["control"]}
    assert named == set(known[0]) - {"oauth.authorize", "webhooks.deliver", "*"}
    fault = paths[f"{CONTROL}/faults"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fault["operation"]["enum"] == known[0]
    assert fault["kind"]["enum"] == list(dict.fromkeys(known[1] + known[2]))


async def test_document_describes_every_route_of_the_control_api_and_no_other(signing_sandbox: Sandbox) -> None:
    routes = {(route.method.lower(), route.path) for route in Control(signing_sandbox._state).routes()}
    paths = (await described())["paths"]
    of_control = {(method, path) for path in paths if path.startswith(CONTROL) for method in paths[path]}
    assert routes == {*of_control, ("get", "/sandbox/authority.pem")}


async def test_required_fields_follow_the_profile_and_the_signing_method() -> None:
    profile = Profile(required_recipient_fields=("first_name", "signing_method"), required_signing_fields=("message",))
    schemas = (await described(profile))["components"]["schemas"]
    assert schemas["NewSigning"]["required"] == ["name", "language", "message"]
    needs = {
        method: set(alternative["required"]) - {"email", "first_name", "signing_method"}
        for alternative in schemas["NewRecipient"]["anyOf"]
        for method in alternative["properties"]["signing_method"]["enum"]
    }
    assert needs == {"email": set(), "approval": set(), "bankid": {"personal_number"}, "sms": {"phone"}}


async def test_details_of_the_profile_are_described() -> None:
    listed = (await described(Profile(pagination="bare")))["paths"]["/api/1.0/signings"]["get"]
    assert "parameters" not in listed
    assert listed["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    document = await described(Profile(over_page_size="refuse", max_page_size=50, record_field="data"))
    assert document["components"]["parameters"]["limit"]["schema"]["maximum"] == 50
    created = document["paths"]["/api/1.0/signings"]["post"]["responses"]["201"]
    assert created["links"]["signings_get"]["parameters"] == {"signing_id": "$response.body#/data/id"}


@pytest.mark.parametrize(
    ("shape", "required"),
    [
        ("flat", ["code", "message"]),
        ("nested", ["error"]),
        ("list", ["errors"]),
        ("rfc9457", ["type", "title", "status", "detail", "code"]),
    ],
)
async def test_shape_of_errors_is_described(shape: Any, required: list[str]) -> None:
    document = await described(Profile(error_shape=shape, token_error_shape="profile"))
    assert document["components"]["schemas"]["Error"]["required"] == required
