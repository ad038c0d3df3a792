"""The verdicts on sealed PDFs: sound ones, all kinds of changes, and hostile files."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from asn1crypto import cms as asn1
from asn1crypto.core import OctetString
from pyhanko.sign import fields

from signing_async import ConfigurationError, InvalidRequest, NotSound, PdfRejected, SigningError, sealed
from signing_async.sealed import inspect_sealed
from tests import pdfs
from tests.sealed.cases import edited, fill_form, roots, signed, signed_in_spite, timestamped
from tests.sealed.pdfs import TIMESTAMP, WHEN, as_ber, cms, judged, sandbox_authority, sealed_by_sandbox, signed_pdf
from tests.sealed.pdfs import timestamp as timestamp_of

ROOT = Path(__file__).parents[2]
WORKER = "signing_async._verify.process._START"
"""The code that the worker process runs."""


def test_sealed_pdf_is_sound_and_its_report_names_signer_time_and_revisions() -> None:
    report = judged(sealed_by_sandbox())
    assert report.sound
    assert (report.problems, report.trusted, report.trust_problems) == ((), None, ())
    assert report.signers == ("Signing Sandbox Seal (no legal value)",)
    assert (report.revisions, report.bytes_after, report.size) == (2, 0, len(sealed_by_sandbox()))
    (seal,) = report.seals
    assert (seal.kind, seal.field, seal.level) == ("signature", "SandboxSeal", "B-B")
    assert seal.subfilter == "ETSI.CAdES.detached"
    assert (seal.signed_at, seal.time_source, seal.revision, seal.covers) == (WHEN, "signer", 2, report.size)
    assert (seal.digest_algorithm, seal.digest_right, seal.key_right) == ("sha256", True, True)
    assert seal.issuer == "CN=Signing Sandbox CA (no legal value)"
    assert (seal.shown, seal.changes, seal.certification) == (True, (), None)


def test_path_and_bytes_give_the_same_immutable_report_that_json_can_hold(tmp_path: Path) -> None:
    (tmp_path / "sealed.pdf").write_bytes(sealed_by_sandbox())
    roots = sandbox_authority().certificate_pem
    report = inspect_sealed(tmp_path / "sealed.pdf", trust=roots)
    assert report == judged(str(tmp_path / "sealed.pdf"), [roots])
    assert report == judged(sealed_by_sandbox(), roots)
    reports = json.loads(json.dumps(report.as_dict()))
    assert (reports["sound"], reports["trusted"], reports["seals"][0]["signed_at"]) == (True, True, WHEN.isoformat())
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        report.trusted = False  # type: ignore[misc]  # that is what is tested
    assert sealed.SealedReport is sealed.Report


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


KINDS: dict[str, Callable[[bytes], bytes]] = {
    "ECDSA": cms,
    "RSA-PSS": partial(cms, kind="rsa", pss=True),
    "without attributes": partial(cms, attributes=False),
    "BER": lambda data: as_ber(cms(data)),
}


@pytest.mark.parametrize("sign", KINDS.values(), ids=KINDS)
def test_correct_signatures_of_every_kind_are_sound_and_changed_content_is_not(sign: Callable[[bytes], bytes]) -> None:
    data = signed_pdf(sign)
    report = judged(data)
    assert report.problems == ()
    assert report.signers == ("Björn Åkesson",)
    assert report.seals[0].subject == "C=SE, O=Åkesson AB, CN=Björn Åkesson"
    assert (report.seals[0].key_right, report.seals[0].signed_at) == (True, WHEN)
    assert not judged(_flipped(data, 300)).sound


def test_document_timestamp_is_no_signer() -> None:
    data = signed_pdf(timestamp_of, entries=b"", kind=TIMESTAMP)
    report = judged(data)
    assert (report.sound, report.problems) == (False, ("it is timestamped, not signed",))
    assert (report.signers, report.seals[0].kind, report.seals[0].problems) == ((), "timestamp", ())
    assert (report.seals[0].signed_at, report.seals[0].time_source, report.seals[0].level) == (WHEN, "timestamp", None)
    assert "its timestamp: its digest is wrong" in judged(_flipped(data, 300)).problems[0]


def _with_another_attribute(signed: Any) -> None:
    attribute = {"type": "1.2.3.5", "values": [OctetString(b"x")]}
    signed["signer_infos"][0]["signed_attrs"].append(attribute)


def _with_seed() -> bytes:
    seed = fields.SigSeedValueSpec(flags=fields.SigSeedValFlags.SUBFILTER, subfilters=[fields.SigSeedSubFilter.PADES])
    spec = fields.SigFieldSpec("Signature", seed_value_dict=seed)
    asked = edited(pdfs.make_pdf(), lambda writer: fields.append_signature_field(writer, spec))
    return signed_in_spite(asked, "Signature")


_OLD_FORMAT = b"/Type/Sig/Filter/Adobe.PPKLite/SubFilter/adbe.x509.rsa_sha1"
WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "a range not from the first byte": (
        lambda: signed_pdf(cms, ranged=lambda start, end, size: (1, start - 1, end, size - end)),
        "is invalid",
    ),
    "without its certificate": (lambda: signed_pdf(partial(cms, certificates=False)), "certificate not included"),
    "changed attributes": (
        lambda: signed_pdf(partial(cms, edit=_with_another_attribute)),
        "its signature does not match the key of its certificate",
    ),
    "against the constraints of its field": (_with_seed, "it violates the constraints of its field"),
    "an old format, which pyHanko ignores": (
        lambda: signed_pdf(cms, kind=_OLD_FORMAT),
        "adbe.x509.rsa_sha1 is not a recognized SubFilter type",
    ),
    "an update of a file that violates the format": (
        lambda: pdfs.update(sealed_by_sandbox(original=pdfs.hybrid_pdf()), {90: pdfs.stream_object(b"")}),
        "the file violates the PDF format",
    ),
    "a late certification": (
        lambda: signed_in_spite(signed(pdfs.make_pdf(), "First"), certify=True),
        "signature 2: it certifies the document but is not its first signature",
    ),
}


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_wrong_file_is_not_sound_and_the_report_says_why(make: Callable[[], bytes], words: str) -> None:
    report = judged(make())
    assert not report.sound
    assert words in " / ".join(report.problems)


def test_timestamp_of_other_data_makes_the_signature_unsound() -> None:
    def stamp(made: Any) -> None:
        token = asn1.ContentInfo.load(timestamp_of(b"something else"))
        attribute = {"type": "signature_time_stamp_token", "values": [token]}
        made["signer_infos"][0]["unsigned_attrs"] = [attribute]

    data = signed_pdf(lambda data: cms(data, edit=stamp), room=12_000)
    for trust in (None, roots()):
        report = judged(data, trust)
        assert report.problems == ("its signature: its timestamp was changed or belongs to other data",)
        assert not report.trusted


def test_signature_that_does_not_name_its_certificate_has_no_pades_level() -> None:
    report = judged(signed_pdf(cms, kind=b"/Type/Sig/Filter/Adobe.PPKLite/SubFilter/ETSI.CAdES.detached"))
    assert (report.problems, report.seals[0].level) == ((), None)


def test_each_of_several_signatures_covers_its_revision_and_lists_later_ones() -> None:
    once = signed(pdfs.make_pdf(), "First")
    twice = signed(once, "Second")
    report = judged(twice)
    assert report.sound
    assert [(seal.revision, seal.covers) for seal in report.seals] == [(2, len(once)), (3, len(twice))]
    assert (report.revisions, report.signers) == (3, ("Somebody Else",))
    assert [seal.changes for seal in report.seals] == [("a signature was added in the field 'Second'",), ()]
    changed = judged(_flipped(twice, 400))
    assert [text.split(":")[0] for text in changed.problems] == ["signature 1", "signature 2"]


def test_later_changes_are_listed_and_visible_ones_clear_shown() -> None:
    data = sealed_by_sandbox(original=pdfs.with_form())
    filled = judged(edited(data, fill_form))
    assert (filled.sound, filled.seals[0].shown) == (True, False)
    assert filled.seals[0].changes == ("the form field 'remark' was filled in",)
    refused = judged(edited(data, fill_form), form_filling=False)
    assert refused.problems == ("its signature: form fields were filled in after it: 'remark'",)
    stamped = judged(timestamped(data), form_filling=False)
    assert (stamped.sound, stamped.seals[0].shown) == (True, True)
    assert "a document timestamp was added in the field 'Timestamp-" in stamped.seals[0].changes[0]
    visible = judged(signed(data, "Visible", box=(0, 0, 50, 50)))
    assert (visible.sound, visible.seals[0].shown) == (True, False)
    assert visible.seals[0].changes == ("a visible signature was added in the field 'Visible'",)


def test_file_without_a_signature_is_reported_as_unsigned() -> None:
    files = {
        "no form": pdfs.make_pdf(),
        "an empty signature field": pdfs.with_signature_field(),
        "a field whose value leads nowhere": pdfs.with_signature_field(b"/V 99 0 R"),
        "a field with a number as value": pdfs.with_signature_field(b"/V 5"),
    }
    for name, data in files.items():
        report = judged(data)
        assert (report.sound, report.problems, report.revisions) == (False, ("it is not signed",), 1), name
        assert report.bytes_after == report.size


# Of several files with repeated words, or with shared fields, one is enough here: each takes seconds.
HOSTILE = [name for name in pdfs.hostile() if not name.startswith(("keywords", "open dict", "open str", "fields that"))]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_ends_in_a_verdict(name: str) -> None:
    """Files made to loop, nest and grow without end."""
    assert not judged(pdfs.hostile()[name]).sound


def test_error_of_an_unreadable_source_names_path_and_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.pdf").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.pdf")
    for path, kind, words in (
        (tmp_path / "none.pdf", InvalidRequest, "cannot open"),
        (tmp_path, InvalidRequest, "not a regular file"),
        (tmp_path / "pipe.pdf", InvalidRequest, "not a regular file"),
        (tmp_path / "empty.pdf", PdfRejected, "not a PDF"),
        ("a\0b", InvalidRequest, "embedded null"),
        (7, InvalidRequest, "must be a path or bytes, got int"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            inspect_sealed(path)  # type: ignore[arg-type]  # one of them is wrong on purpose
    path = tmp_path / "sealed.pdf"
    path.write_bytes(sealed_by_sandbox())
    size = path.stat().st_size
    assert judged(path, max_bytes=size).sound
    words = f"source: {str(path)!r} is larger than {size - 1} bytes (max_sealed_bytes)"
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        inspect_sealed(path, max_bytes=size - 1)
    for name, limit in (("timeout", 0), ("timeout", float("nan")), ("max_bytes", -1)):
        with pytest.raises(InvalidRequest, match=f"^{name}: must be "):
            inspect_sealed(b"%PDF-", **{name: limit})  # type: ignore[arg-type]  # wrong on purpose


# the worker process


IMPORTS = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
GROW = "judge.EmbeddedPdfSignature = lambda *_: bytearray(10**10)"


@pytest.mark.parametrize(
    ("code", "timeout", "problem"),
    [
        ("import time; time.sleep(60)", 0.2, "verification took more than 0.2 seconds"),
        (
            f"{IMPORTS}; from signing_async._verify import judge, process; {GROW}; process.main()",
            60,
            "verification took more than 512 MiB of memory",
        ),
        (
            f"{IMPORTS}; from signing_async._verify.process import _limit; _limit(1, 2**30)\nwhile True: pass",
            60,
            "the verifying process was ended by SIGXCPU",
        ),
    ],
    ids=["time", "memory", "CPU time"],
)
def test_file_that_exceeds_a_limit_is_not_sound(
    code: str, timeout: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WORKER, code)
    report = inspect_sealed(sealed_by_sandbox(), timeout=timeout, trust=sandbox_authority().certificate_pem)
    assert (report.sound, report.trusted, report.problems) == (False, False, (problem,))
    assert (report.seals, report.size) == ((), len(sealed_by_sandbox()))


def test_worker_that_is_killed_by_the_system_or_fails_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was killed, or could not be started, is a transient failure."""
    monkeypatch.setattr(WORKER, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(SigningError, match="worker process was killed by SIGKILL") as killed:
        inspect_sealed(sealed_by_sandbox())
    assert not isinstance(killed.value, NotSound)
    assert (killed.value.transient, killed.value.exit_code) == (True, 1)
    monkeypatch.setattr(WORKER, "raise ImportError('pyhanko is broken')")
    with pytest.raises(RuntimeError, match="worker process failed: ImportError: pyhanko is broken"):
        inspect_sealed(sealed_by_sandbox())

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(SigningError, match=f"worker process cannot be started: {os.strerror(errno.EAGAIN)}") as failed:
        inspect_sealed(sealed_by_sandbox())
    assert (failed.value.transient, failed.value.client_wide, failed.value.exit_code) == (True, False, 1)


@pytest.mark.parametrize("name", ["contract-app", "python"])
def test_frozen_or_embedding_application_is_not_started_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = tmp_path / name
    app.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    app.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(app))
    with monkeypatch.context() as patched:
        if name == "python":
            patched.setattr(sys, "frozen", True, raising=False)
        with pytest.raises(ConfigurationError, match="frozen or embeds Python"):
            inspect_sealed(sealed_by_sandbox())
    assert not (tmp_path / "started").exists()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # as after an upgrade that removed it
    with pytest.raises(ConfigurationError, match="worker process cannot be started: No such file or directory"):
        inspect_sealed(sealed_by_sandbox())


def test_worker_imports_nothing_from_its_working_directory(tmp_path: Path) -> None:
    """And output printed by a library does not end up in the report."""
    (tmp_path / "pyhanko.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "json.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "sealed.pdf").write_bytes(sealed_by_sandbox())
    code = "import sys; sys.path.remove(''); from signing_async.sealed import inspect_sealed as look"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}; print(look('sealed.pdf').sound)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_import_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "signing_async.sealed")
    with pytest.raises(ModuleNotFoundError, match=r"needs pyHanko: pip install 'signing-async\[verify\]'$"):
        importlib.import_module("signing_async.sealed")
