"""The pytest plugin: its fixtures, the sample PDF, and the guide's examples in a project of their own."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path

import pikepdf
import pytest

import signing_async.sandbox.authority  # noqa: F401  # cryptography loads once; pytester drops what its runs load
from signing_async import SigningClient, testing
from signing_async.sandbox import Sandbox
from signing_async.testing import sample_pdf

GUIDE = (Path(testing.__file__ or "").parent / "README.md").read_text("utf-8")
[TOML] = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
NOT_RUN = "async def functions are not natively supported"
OPTIONS = ("-q", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:randomly")


def test_plugin_loads_without_pytest_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fixtures exist for any other plugin that runs coroutines."""
    monkeypatch.setitem(sys.modules, "pytest_asyncio", None)
    assert testing.__file__ is not None
    spec = importlib.util.spec_from_file_location("signing_async.testing", testing.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert type(module.signing_client) is type(pytest.fixture(lambda: None))


def test_fixtures_work_in_another_project(pytester: pytest.Pytester, recwarn: pytest.WarningsRecorder) -> None:
    """It has the guide's settings and tests, and plain functions. No plugin warns. Each test has its own sandbox."""
    pytester.makepyfile(
        """
        async def test_retries_are_quick(signing_sandbox, signing_client):
            signing_sandbox.faults.add("signings.create", "503", times=3)
            await signing_client.signings.create(name="Lease", language="EN")

        async def test_each_test_has_its_own_sandbox(signing_sandbox, signing_client):
            assert [signing async for signing in signing_client.signings.list()] == []

        def test_plain_function_may_use_it(signing_sandbox):
            assert not signing_sandbox.signings
        """,
        test_guide="\n\n".join(re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)),
    )
    pytester.makepyprojecttoml(TOML)
    result = pytester.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=7, warnings=0)
    assert not recwarn.list


def test_project_without_the_guides_setting_gets_the_message_that_the_guide_quotes(pytester: pytest.Pytester) -> None:
    """Versions of pytest that do not fail such a test skip it, with a warning."""
    assert f"`{NOT_RUN}`" in GUIDE
    pytester.makepyfile("async def test_me(signing_client):\n    assert (await signing_client.me()).email\n")
    pytester.makepyprojecttoml(TOML.replace('asyncio_mode = "auto"\n', ""))
    result = pytester.runpytest_inprocess(*OPTIONS)
    assert "passed" not in result.parseoutcomes()
    result.stdout.fnmatch_lines([f"*{NOT_RUN}*"])


def test_test_in_another_loop_than_its_sandbox_fails_at_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("async def test_me(signing_client):\n    assert (await signing_client.me()).email\n")
    pytester.makepyprojecttoml(TOML.replace('fixture_loop_scope = "function"', 'fixture_loop_scope = "session"'))
    result = pytester.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(['*set asyncio_default_fixture_loop_scope = "function" in pytest\'s configuration*'])


async def test_sample_pdf_is_valid_and_can_be_sealed(signing_sandbox: Sandbox, signing_client: SigningClient) -> None:
    samples = [sample_pdf(title) for title in (r"Lease (draft) \ 7", "Mietvertrag für Ångström", "契約\r\nsecond line")]
    signing = await signing_client.signings.create(name="Lease", language="EN")
    documents = [await signing_client.documents.upload(signing, sample, "lease.pdf") for sample in samples]
    await signing_client.recipients.add(signing, email="anna@example.com")
    await signing_client.signings.send(signing)
    await signing_sandbox.complete(signing.id)
    for sample, document in zip(samples, documents, strict=True):
        assert (await signing_client.documents.read_signed(signing, document)).startswith(sample)
        with pikepdf.open(io.BytesIO(sample)) as pdf:
            assert pdf.check_pdf_syntax() == []
            assert len(pdf.pages) == 1
