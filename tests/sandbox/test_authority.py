"""The sandbox's certificate authority."""

from __future__ import annotations

import multiprocessing
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from signing_async.sandbox import authority as authorities
from signing_async.sandbox.sealing import Authority, SealingFailed
from tests.sandbox.seals import WHEN


def test_authority_is_created_once_in_a_private_file_without_the_ca_key(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "authority"
    first = Authority.open(folder, WHEN)
    again = Authority.open(folder, WHEN + timedelta(days=900))
    assert first.certificate_pem == again.certificate_pem
    assert first.certificate_pem.startswith(b"-----BEGIN CERTIFICATE-----")
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().count(b"BEGIN PRIVATE KEY") == 3
    assert b"PRIVATE" not in first.certificate_pem


@pytest.mark.parametrize("now", [WHEN, WHEN - timedelta(days=20_000), WHEN + timedelta(days=20_000)])
def test_certificates_cover_the_sandboxs_clock_2020_and_today(tmp_path: Path, now: datetime) -> None:
    from cryptography import x509

    Authority.open(tmp_path, now)
    certificates = x509.load_pem_x509_certificates((tmp_path / "authority.pem").read_bytes())
    assert len(certificates) == 6
    for certificate in certificates:
        certificate.verify_directly_issued_by(certificates[1])
        for moment in (now, now + timedelta(days=10_000), datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC)):
            assert certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc


def test_processes_that_create_the_authority_at_once_share_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        pems = pool.map(_certificate_of, [tmp_path] * 4)
    assert len(set(pems)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["authority.pem"]


def _certificate_of(folder: Path) -> bytes:
    return Authority.open(folder, WHEN).certificate_pem


def test_authority_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "authority.pem"
    authorities._create(path, b"first")
    authorities._create(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-----BEGIN X-----\nAAAA\n-----END X-----\n" * 3])
def test_damaged_authority_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "authority.pem").write_bytes(content)
    with pytest.raises(
        SealingFailed, match=r"authority\.pem: expected the 3 keys and 6 certificates of an authority .* delete it"
    ):
        Authority.open(tmp_path, WHEN)
