"""Whose signature it is: roots, validity, use, revocation, timestamps, and the level that all of it adds up to."""

from __future__ import annotations

import re
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from signing_async import InvalidRequest
from signing_async._verify.roots import load_roots
from signing_async.sealed import inspect_sealed
from tests import pdfs
from tests.sealed.pdfs import judged, sandbox_authority, sealed_by_sandbox
from tests.sealed.pki import NOW, Holder, root, signed_by, stamped, with_store, years


@pytest.fixture(scope="module")
def ca() -> Holder:
    """An authority that is trusted."""
    return root()


@pytest.fixture(scope="module")
def tsa(ca: Holder) -> Holder:
    """A timestamp service that is trusted."""
    return ca.issue("Time", stamping=True)


def test_without_roots_nothing_is_said_of_trust(ca: Holder) -> None:
    """Whoever signed."""
    report = judged(signed_by(ca.issue("Anna")))
    assert (report.sound, report.trusted, report.trust_problems) == (True, None, ())
    assert (report.seals[0].trusted, report.seals[0].revocation) == (None, None)


def test_a_certificate_has_to_lead_to_a_root(ca: Holder) -> None:
    """Over intermediate authorities too, which come along."""
    department = ca.issue("Department", authority=True)
    data = signed_by(department.issue("Anna"))
    report = judged(data, ca.der)
    assert (report.sound, report.trusted, report.seals[0].revocation) == (True, True, "unknown")
    other = judged(data, root("Another").der)
    assert (other.sound, other.trusted) == (True, False)
    assert other.trust_problems == ("its signature: the certificate does not lead to a trusted root",)


def test_an_unsound_file_is_not_trusted(ca: Holder) -> None:
    """Even where its certificate is."""
    data = signed_by(ca.issue("Anna"))
    changed = judged(data[:300] + b"!" + data[301:], ca.der)
    assert (changed.sound, changed.trusted) == (False, False)
    assert judged(pdfs.make_pdf(), ca.der).trusted is False
    broken = judged(data.replace(b"/ByteRange", b"/ByteRAnge"), ca.der)
    assert (broken.trusted, broken.seals[0].trusted) == (False, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"end": years(-1)}, "has expired or is not yet valid, or that of an issuer"),
        ({"start": years(1)}, "is not trusted"),
        ({"content_commitment": False}, "is not valid for this use, or that of an issuer is not"),
    ],
)
def test_a_certificate_has_to_be_in_force_and_made_for_it(settings: dict[str, Any], words: str, ca: Holder) -> None:
    """As of now, where no timestamp tells when it was used."""
    report = judged(signed_by(ca.issue("Anna", **settings)), ca.der)
    assert (report.sound, report.trusted) == (True, False)
    assert report.trust_problems == (f"its signature: the certificate {words}",)


@pytest.mark.parametrize("kind", ["of the signature", "of the document"])
def test_a_timestamp_outlives_the_certificate(kind: str, ca: Holder, tsa: Holder) -> None:
    """What was signed before the certificate expired stays trusted; what was signed after it does not."""
    anna = ca.issue("Anna", end=years(-1))
    for when, trusted in ((years(-2), True), (years(-0.5), False)):
        if kind == "of the signature":
            data = signed_by(anna, timestamper=tsa.timestamper(when))
        else:
            data = stamped(signed_by(anna), tsa.timestamper(when))
        report = judged(data, ca.der)
        assert (report.sound, report.trusted) == (True, trusted), report.trust_problems
        assert report.seals[0].time_source == ("timestamp" if kind == "of the signature" else "signer")


def test_a_document_timestamp_outlives_the_one_in_the_signature(ca: Holder) -> None:
    """Each is judged as of the time of the next one."""
    early = ca.issue("Early", stamping=True, end=years(-3))
    late = ca.issue("Late", stamping=True)
    anna = ca.issue("Anna", end=years(-5))
    data = signed_by(anna, timestamper=early.timestamper(years(-6)))
    assert judged(data, ca.der).trusted is False
    report = judged(stamped(data, late.timestamper(years(-4))), ca.der)
    assert (report.trusted, report.seals[0].signed_at) == (True, years(-6))


def test_a_timestamp_has_to_lead_to_a_root_as_well(ca: Holder) -> None:
    """In the signature, and of the document."""
    stranger = root("Another").issue("Time", stamping=True).timestamper(NOW)
    report = judged(signed_by(ca.issue("Anna"), timestamper=stranger), ca.der)
    assert report.trust_problems == ("its signature: the certificate of its timestamp does not lead to a trusted root",)
    report = judged(stamped(signed_by(ca.issue("Anna")), stranger), ca.der)
    assert report.trust_problems == ("timestamp 2: the certificate does not lead to a trusted root",)
    assert report.seals[0].trusted


def test_a_revoked_certificate_is_not_trusted(tsa: Holder, ca: Holder) -> None:
    """By a list in the file, unless a timestamp shows that it was used before."""
    issuer = root("Issuer")
    anna = issuer.issue("Anna")
    issuer.revoke(anna, years(-1))
    revocations = issuer.revocations(years(-0.5))
    for when, told in ((None, "revoked"), (years(-0.7), "revoked"), (years(-2), "good")):
        stamp = None if when is None else tsa.timestamper(when)
        data = with_store(signed_by(anna, timestamper=stamp), crls=[revocations])
        report = judged(data, [issuer.der, ca.der])
        assert report.sound
        assert (report.trusted, report.seals[0].revocation) == (told == "good", told)
        if told == "revoked":
            assert report.trust_problems == ("its signature: the certificate was revoked",)


def test_revocation_data_in_the_signature_itself(ca: Holder) -> None:
    """Where Adobe's programs put them."""
    from pyhanko_certvalidator import ValidationContext

    anna = ca.issue("Anna", crl_url="http://127.0.0.1:9/list.crl")
    context = ValidationContext(trust_roots=[ca.asn1], crls=[ca.revocations()], revocation_mode="require")
    data = signed_by(anna, pades=False, embed_validation_info=True, validation_context=context)
    report = judged(data, ca.der)
    assert (report.trusted, report.seals[0].revocation, report.seals[0].level) == (True, "good", None)


class _Lists(BaseHTTPRequestHandler):
    """Serves one revocation list."""

    content = b""
    asked = 0

    def do_GET(self) -> None:
        """Serve it."""
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/pkix-crl")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_the_network_is_asked_only_when_told_to() -> None:
    """Then a certificate that was revoked since is found out, and one that was not is known to be good."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Lists)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        issuer = root()
        anna = issuer.issue("Anna", crl_url=f"http://127.0.0.1:{server.server_port}/list.crl")
        data = signed_by(anna)
        _Lists.content = issuer.revocations().dump()
        report = inspect_sealed(data, trust=issuer.der)
        assert (report.trusted, report.seals[0].revocation, _Lists.asked) == (True, "unknown", 0)
        report = inspect_sealed(data, trust=issuer.der, fetch=True)
        assert (report.trusted, report.seals[0].revocation) == (True, "good")
        assert _Lists.asked > 0
        issuer.revoke(anna, NOW - timedelta(days=1))
        _Lists.content = issuer.revocations().dump()
        report = judged(data, issuer.der, fetch=True)
        assert (report.trusted, report.seals[0].revocation) == (False, "revoked")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    report = judged(data, issuer.der, fetch=True)  # nobody answers any more
    assert (report.trusted, report.seals[0].revocation) == (True, "unknown")


def test_levels_are_what_the_file_carries(ca: Holder, tsa: Holder) -> None:
    """A timestamp for B-T; for B-LT data on every certificate; for B-LTA a document timestamp over those."""
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
    adobe = judged(signed_by(anna, pades=False, timestamper=stamp))
    assert adobe.seals[0].level is None


def test_a_root_that_did_not_come_along_is_taken_from_those_given(ca: Holder, tsa: Holder) -> None:
    """So that the level is told in full where there are roots."""
    data = with_store(signed_by(ca.issue("Anna"), timestamper=tsa.timestamper(NOW)), crls=[ca.revocations()])
    assert judged(data).seals[0].level == "B-T"
    assert judged(data, ca.der).seals[0].level == "B-LT"


def test_roots_of_every_kind(tmp_path: Path) -> None:
    """PEM and DER, a file, a folder, bytes, several; of the sandbox's own file the authority alone."""
    pem = sandbox_authority().certificate_pem
    (der,) = load_roots(pem)
    (tmp_path / "root.pem").write_bytes(pem)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "root.CER").write_bytes(der)
    (tmp_path / "folder" / "readme.txt").write_text("no certificate")
    for given in (tmp_path / "root.pem", str(tmp_path / "root.pem"), tmp_path / "folder", pem, der, bytes(der)):
        assert load_roots(given) == [der]
    assert load_roots([pem, tmp_path / "folder"]) == [der, der]
    assert judged(sealed_by_sandbox(), tmp_path / "root.pem").trusted
    assert len(load_roots("system")) > 20
    assert judged(sealed_by_sandbox(), "system").trusted is False


def test_the_sandbox_folder_is_a_root(tmp_path: Path, ca: Holder) -> None:
    """Its file holds keys and other certificates as well."""
    from signing_async.sandbox.authority import Authority

    authority = Authority.open(tmp_path, NOW)
    assert load_roots(tmp_path) == load_roots(authority.certificate_pem)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("none.pem", "trust: cannot read 'none.pem': No such file or directory"),
        ("a\0b", "trust: cannot read 'a\\x00b': embedded null byte"),
        ("letter.pem", "trust: no readable certificate in 'letter.pem': "),
        ("empty", "trust: no certificate given"),
        ("leaf.pem", "trust: no authority's certificate in 'leaf.pem'; pass that of the issuer"),
        (b"", "trust: no readable certificate in the given bytes: "),
        (b"-----BEGIN nonsense", "trust: no readable certificate in the given bytes: "),
        ([], "trust: no certificate given"),
        ([7], "trust: must be paths or bytes, got int"),
    ],
)
def test_roots_that_are_none(
    given: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ca: Holder
) -> None:
    """The error names the file, and what to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.pem").write_text("Dear Sir or Madam")
    (tmp_path / "empty").mkdir()
    (tmp_path / "leaf.pem").write_bytes(ca.issue("Anna").der)
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        inspect_sealed(sealed_by_sandbox(), trust=given)
