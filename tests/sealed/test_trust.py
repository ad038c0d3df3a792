"""Trust in sealed PDFs: roots, validity, use, revocation, timestamps, and the PAdES level."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates
from pyhanko_certvalidator import ValidationContext

from signing_async import InvalidRequest
from signing_async.sealed import inspect_sealed
from tests.sealed.pdfs import judged, sandbox_authority, sealed_by_sandbox
from tests.sealed.pki import NOW, Holder, root, signed_by, stamped, with_store, years


@pytest.fixture(scope="module")
def ca() -> Holder:
    """A trusted authority."""
    return root()


@pytest.fixture(scope="module")
def tsa(ca: Holder) -> Holder:
    """A trusted timestamp service."""
    return ca.issue("Time", stamping=True)


def test_certificate_must_lead_to_a_root(ca: Holder) -> None:
    """Also through intermediate certificates in the file."""
    department = ca.issue("Department", authority=True)
    data = signed_by(department.issue("Anna"))
    report = judged(data, ca.der)
    assert (report.sound, report.trusted, report.seals[0].revocation) == (True, True, "unknown")
    other = judged(data, root("Another").der)
    assert (other.sound, other.trusted) == (True, False)
    assert other.trust_problems == ("its signature: the certificate does not lead to a trusted root",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"end": years(-1)}, "or that of an issuer has expired or is not yet valid"),
        ({"start": years(1)}, "is not trusted"),
        ({"content_commitment": False}, "or that of an issuer is not valid for this use"),
    ],
)
def test_certificate_must_be_valid_now_and_for_its_use_without_a_timestamp(
    settings: dict[str, Any], words: str, ca: Holder
) -> None:
    report = judged(signed_by(ca.issue("Anna", **settings)), ca.der)
    assert (report.sound, report.trusted) == (True, False)
    assert report.trust_problems == (f"its signature: the certificate {words}",)


@pytest.mark.parametrize("kind", ["of the signature", "of the document"])
def test_signature_with_a_timestamp_before_the_expiry_stays_trusted(kind: str, ca: Holder, tsa: Holder) -> None:
    """One made after the expiry does not."""
    anna = ca.issue("Anna", end=years(-1))
    for when, trusted in ((years(-2), True), (years(-0.5), False)):
        if kind == "of the signature":
            data = signed_by(anna, timestamper=tsa.timestamper(when))
        else:
            data = stamped(signed_by(anna), tsa.timestamper(when))
        report = judged(data, ca.der)
        assert (report.sound, report.trusted) == (True, trusted), report.trust_problems
        assert report.seals[0].time_source == ("timestamp" if kind == "of the signature" else "signer")


def test_certificate_of_a_timestamp_must_lead_to_a_root(ca: Holder) -> None:
    """Both in a signature and of the document."""
    stranger = root("Another").issue("Time", stamping=True).timestamper(NOW)
    report = judged(signed_by(ca.issue("Anna"), timestamper=stranger), ca.der)
    assert report.trust_problems == ("its signature: the certificate of its timestamp does not lead to a trusted root",)
    report = judged(stamped(signed_by(ca.issue("Anna")), stranger), ca.der)
    assert report.trust_problems == ("timestamp 2: the certificate does not lead to a trusted root",)
    assert report.seals[0].trusted


def test_revoked_certificate_is_not_trusted_unless_a_timestamp_precedes_the_revocation(tsa: Holder, ca: Holder) -> None:
    issuer = root("Issuer")
    anna = issuer.issue("Anna")
    issuer.revoke(anna, years(-1))
    revocations = issuer.revocations(years(-0.5))
    for when, reports in ((None, "revoked"), (years(-0.7), "revoked"), (years(-2), "good")):
        stamp = None if when is None else tsa.timestamper(when)
        data = with_store(signed_by(anna, timestamper=stamp), crls=[revocations])
        report = judged(data, [issuer.der, ca.der])
        assert report.sound
        assert (report.trusted, report.seals[0].revocation) == (reports == "good", reports)
        if reports == "revoked":
            assert report.trust_problems == ("its signature: the certificate was revoked",)


def test_revocation_data_inside_the_signature_counts(ca: Holder) -> None:
    """Adobe's programs put it there."""
    anna = ca.issue("Anna", crl_url="http://127.0.0.1:9/list.crl")
    context = ValidationContext(trust_roots=[ca.asn1], crls=[ca.revocations()], revocation_mode="require")
    data = signed_by(anna, pades=False, embed_validation_info=True, validation_context=context)
    report = judged(data, ca.der)
    assert (report.trusted, report.seals[0].revocation, report.seals[0].level) == (True, "good", None)


def test_fetch_finds_a_later_revocation_and_nothing_is_fetched_without_it(tmp_path: Path) -> None:
    served = tmp_path / "list.crl"
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            issuer = root()
            anna = issuer.issue("Anna", crl_url=f"http://127.0.0.1:{server.server_port}/list.crl")
            data = signed_by(anna)
            served.write_bytes(issuer.revocations().dump())
            report = judged(data, issuer.der)
            assert (report.trusted, report.seals[0].revocation) == (True, "unknown")
            report = inspect_sealed(data, trust=issuer.der, fetch=True)
            assert (report.trusted, report.seals[0].revocation) == (True, "good")
            issuer.revoke(anna, NOW - timedelta(days=1))
            served.write_bytes(issuer.revocations().dump())
            report = judged(data, issuer.der, fetch=True)
            assert (report.trusted, report.seals[0].revocation) == (False, "revoked")
        finally:
            server.shutdown()
            thread.join()
    report = judged(data, issuer.der, fetch=True)  # no server responds any more
    assert (report.trusted, report.seals[0].revocation) == (True, "unknown")


def test_pades_level_follows_from_the_contents_of_the_file(ca: Holder, tsa: Holder) -> None:
    """A timestamp: B-T. Data on every certificate: B-LT. A document timestamp over that data: B-LTA."""
    anna = ca.issue("Anna", crl_url="http://127.0.0.1:9/list.crl")
    plain = signed_by(anna)
    timestamped = signed_by(anna, timestamper=tsa.timestamper(NOW))
    stamp = tsa.timestamper(NOW)
    files = {
        "B-B": plain,
        "B-T": timestamped,
        "B-T, by the document": stamped(plain, stamp),
        "B-T, with lists alone": with_store(timestamped, crls=[]),
        "B-T, stamped before the lists": stamped(timestamped, stamp),
        "B-LT": with_store(timestamped, certs=[ca], crls=[ca.revocations()]),
        "B-LT, stamped before the lists": with_store(stamped(plain, stamp), certs=[ca], crls=[ca.revocations()]),
        "B-LTA": stamped(with_store(timestamped, certs=[ca], crls=[ca.revocations()]), stamp),
    }
    for name, data in files.items():
        assert judged(data).seals[0].level == name.split(",")[0], name
        assert judged(data, ca.der).trusted, name
    without_root = with_store(timestamped, crls=[ca.revocations()])
    assert (judged(without_root).seals[0].level, judged(without_root, ca.der).seals[0].level) == ("B-T", "B-LT")
    adobe = judged(signed_by(anna, pades=False, timestamper=stamp))
    assert adobe.seals[0].level is None


def test_roots_may_be_pem_der_files_folders_bytes_or_several(tmp_path: Path) -> None:
    pem = sandbox_authority().certificate_pem
    der = load_pem_x509_certificates(pem)[0].public_bytes(Encoding.DER)
    (tmp_path / "root.pem").write_bytes(pem)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "root.CER").write_bytes(der)
    (tmp_path / "folder" / "readme.txt").write_text("no certificate")
    files: list[Any] = [tmp_path / "root.pem", str(tmp_path / "root.pem"), tmp_path / "folder"]
    for given in (*files, pem, der, [pem, tmp_path / "folder"]):
        assert judged(sealed_by_sandbox(), given).trusted
    assert judged(sealed_by_sandbox(), "system").trusted is False


def test_error_of_an_unusable_root_names_the_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ca: Holder
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.pem").write_text("Dear Sir or Madam")
    (tmp_path / "leaf.pem").write_bytes(ca.issue("Anna").der)
    cases: list[tuple[Any, str]] = [
        ("none.pem", "trust: cannot read 'none.pem': No such file or directory"),
        ("letter.pem", "trust: no readable certificate in 'letter.pem': "),
        ("leaf.pem", "trust: no authority's certificate in 'leaf.pem'; pass that of the issuer"),
        (b"", "trust: no readable certificate in the given bytes: "),
        ([], "trust: no certificate given"),
        ([7], "trust: must be paths or bytes, got int"),
    ]
    for given, words in cases:
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            inspect_sealed(sealed_by_sandbox(), trust=given)
