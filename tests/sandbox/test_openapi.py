"""The OpenAPI document, and the running sandbox measured against it by schemathesis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from signing_async.sandbox import Profile, Sandbox
from signing_async.sandbox.faults import OPERATIONS
from signing_async.sandbox.openapi import document
from tests.sandbox.serving import Caller, in_thread

PRESETS = ("default", "laravel", "rfc9457", "numeric")

# Well-formed requests that depend on what happened before: refused with a 400 that is documented.
CONFIG = """
[[operations]]
include-operation-id = ["signings.send", "recipients.remind", "oauth.token"]
checks.positive_data_acceptance.enabled = false

[[operations]]
include-operation-id = "documents.download_signed"
checks.ensure_resource_availability.enabled = false
"""


RUNS = {
    "requests": ["--phases", "coverage,fuzzing", "--max-examples", "8"],
    # In a story a signing may have been sent before something is added: a well-formed request is then refused.
    "stories": ["--phases", "stateful", "--max-examples", "20", "--exclude-checks", "positive_data_acceptance"],
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_answer_is_a_documented_one(preset: str, run: str, tmp_path: Path) -> None:
    """Hundreds of generated requests, right and wrong: no server error, nothing undocumented, no bad input taken."""
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
    assert int(cases[1]) >= (300 if run == "requests" else 20), done.stdout[-2000:]
    assert run == "stories" or "Tested: 11" in done.stdout


async def test_it_is_served(call: Caller, signing_sandbox: Sandbox) -> None:
    """`/openapi.json` is the document, for everybody, and names each operation of the endpoint table."""
    status, body = await call("GET", "/openapi.json")
    assert status == 200
    assert body == document(signing_sandbox.profile)
    named = {operation["operationId"] for path in body["paths"].values() for operation in path.values()}
    assert named == set(OPERATIONS) - {"oauth.authorize"}


def test_it_describes_bare_lists() -> None:
    """Without pages both lists are described as they come, and have no parameters for paging."""
    described = document(Profile(pagination="bare", recipients_list="paged"))["paths"]
    listed = described["/api/1.0/signings"]["get"]
    assert "parameters" not in listed
    assert listed["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    people = described["/api/1.0/signings/{signing_id}/recipients"]["get"]
    assert people["responses"]["200"]["content"]["application/json"]["schema"]["required"] == ["data"]


def test_it_describes_what_is_required() -> None:
    """Fields that the profile requires are required; what a method needs is required with that method."""
    profile = Profile(required_recipient_fields=("first_name", "signing_method"), required_signing_fields=("message",))
    schemas = document(profile)["components"]["schemas"]
    assert schemas["NewSigning"]["required"] == ["name", "language", "message"]
    needs = {
        method: set(alternative["required"]) - {"email", "first_name", "signing_method"}
        for alternative in schemas["NewRecipient"]["anyOf"]
        for method in alternative["properties"]["signing_method"]["enum"]
    }
    assert needs == {"email": set(), "approval": set(), "bankid": {"personal_number"}, "sms": {"phone"}}


def test_it_describes_one_kind_of_recipient() -> None:
    """When no method needs anything there are no alternatives."""
    recipient = document(Profile(phone_methods=(), identification_methods=()))["components"]["schemas"]["NewRecipient"]
    assert recipient["required"] == ["email"]


@pytest.mark.parametrize(
    ("shape", "required"),
    [
        ("flat", ["code", "message"]),
        ("nested", ["error"]),
        ("list", ["errors"]),
        ("rfc9457", ["type", "title", "status", "detail", "code"]),
    ],
)
def test_it_describes_errors(shape: Any, required: list[str]) -> None:
    """The schema of errors is the profile's shape."""
    assert document(Profile(error_shape=shape))["components"]["schemas"]["Error"]["required"] == required
