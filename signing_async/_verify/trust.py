"""Validate signatures with pyHanko: against roots, by revocation data, and for their PAdES level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from asn1crypto import x509
from pyhanko.pdf_utils.reader import PdfFileReader
from pyhanko.sign.fields import SigSeedSubFilter
from pyhanko.sign.general import NonexistentAttributeError, find_unique_cms_attribute
from pyhanko.sign.validation.dss import DocumentSecurityStore
from pyhanko.sign.validation.errors import NoDSSFoundError
from pyhanko.sign.validation.generic_cms import get_signing_cert_attr
from pyhanko.sign.validation.pdf_embedded import async_validate_pdf_signature, async_validate_pdf_timestamp
from pyhanko_certvalidator import ValidationContext
from pyhanko_certvalidator.fetchers.aiohttp_fetchers import AIOHttpFetcherBackend
from pyhanko_certvalidator.policy_decl import CertRevTrustPolicy, FreshnessReqType, RevocationCheckingPolicy

from .signature import Options, Signature, entry, indication

__all__ = ["Validator"]

_IF_ANY = RevocationCheckingPolicy.from_legacy("soft-fail")
_FOR_ALL = RevocationCheckingPolicy.from_legacy("require")
_EXPIRED = "or that of an issuer has expired or is not yet valid"
_UNTRUSTED = {
    "NO_CERTIFICATE_CHAIN_FOUND": "does not lead to a trusted root",
    "CHAIN_CONSTRAINTS_FAILURE": "or that of an issuer is not valid for this use",
    "EXPIRED": _EXPIRED,
    "OUT_OF_BOUNDS_NO_POE": _EXPIRED,
    "NOT_YET_VALID": _EXPIRED,
    "REVOKED": "was revoked",
    "REVOKED_NO_POE": "was revoked",
    "REVOKED_CA_NO_POE": "was issued by an authority whose certificate was revoked",
}


class Validator:
    """Validates the signatures of one file."""

    def __init__(self, reader: PdfFileReader, options: Options) -> None:
        self._reader = reader
        self._fetch = options.fetch
        self._roots = None if options.roots is None else [x509.Certificate.load(root) for root in options.roots]
        self._fetched: dict[str, list[Any]] = {"ocsps": [], "crls": [], "other_certs": []}

    async def check_integrity(self, signature: Signature) -> Any:
        """Return pyHanko's verdict without roots. Only this validation examines changes after the signature."""
        context = self._context((), signature, CertRevTrustPolicy(_IF_ANY))
        return await self._validate(signature, context, skip_diff=False)

    async def judge_trust(self, signatures: Sequence[Signature]) -> None:
        """Judge the newest first: what a trusted document timestamp covers is judged at that timestamp's time."""
        if self._roots is None:
            return
        moment = None
        for signature in reversed(signatures):
            signature.trusted = False
            if signature.status is None:
                continue
            if self._fetch:
                await self._fetch_revocation(signature)
            at = moment
            if getattr(signature.status, "timestamp_validity", None) is not None:
                token, _ = await self._judge(signature, moment, lambda status: status.timestamp_validity)
                if token.trusted:
                    at = token.timestamp
                elif token.intact and token.valid:
                    words = _UNTRUSTED.get(indication(token), "is not trusted")
                    signature.trust_problems.append(f"the certificate of its timestamp {words}")
            status, signature.revocation = await self._judge(signature, at, lambda status: status)
            if signature.is_valid and not status.trusted:
                words = _UNTRUSTED.get(indication(status), "is not trusted")
                signature.trust_problems.append(f"the certificate {words}")
            signature.trusted = status.trusted and not signature.trust_problems
            if signature.trusted and signature.kind == "timestamp":
                moment = status.timestamp

    async def _judge(
        self, signature: Signature, moment: datetime | None, part: Callable[[Any], Any]
    ) -> tuple[Any, Literal["good", "revoked", "unknown"]]:
        """Validate with the roots, first requiring revocation data for every certificate, then using what is available.

        Revocation data in the file counts at any age: without a network there is nothing newer.
        """
        assert self._roots is not None
        for checking in (_FOR_ALL, _IF_ANY):
            policy = CertRevTrustPolicy(
                checking,
                freshness=timedelta(days=36525),
                freshness_req_type=FreshnessReqType.MAX_DIFF_REVOCATION_VALIDATION,
            )
            context = self._context(self._roots, signature, policy, moment=moment)
            status = part(await self._validate(signature, context))
            if status.revoked:
                return status, "revoked"
            if status.trusted and checking is _FOR_ALL:
                return status, "good"
        return status, "unknown"

    async def _fetch_revocation(self, signature: Signature) -> None:
        """Fetch revocation data from the services named in the certificates, and keep it."""
        backend = AIOHttpFetcherBackend()
        settings = {"fetcher_backend": backend, "allow_fetching": True}
        try:
            context = self._context(self._roots or (), signature, CertRevTrustPolicy(_IF_ANY), **settings)
            await self._validate(signature, context)
        finally:
            await backend.close()
        self._fetched["ocsps"] += context.ocsps
        self._fetched["crls"] += context.crls
        self._fetched["other_certs"] += context.certificate_registry

    async def judge_level(self, signature: Signature, signatures: Sequence[Signature]) -> None:
        """Determine the PAdES level that the contents of the file reach (ETSI EN 319 142-1)."""
        if not signature.is_valid or entry(signature.value, "/SubFilter") != SigSeedSubFilter.PADES.value:
            return
        if get_signing_cert_attr(signature.embedded.signer_info["signed_attrs"]) is None:
            return
        signature.level = "B-B"
        later = [
            other
            for other in signatures
            if other.kind == "timestamp" and other.is_valid and other.covers > signature.covers
        ]
        token = signature.status.timestamp_validity
        stamps = [other.status for other in later[:1]] if token is None else [token]
        if not stamps:
            return
        signature.level, moment = "B-T", stamps[0].timestamp
        if not await self._is_complete(signature, moment, self._reader):
            return
        signature.level = "B-LT"
        for stamp in later:
            revision = self._reader.get_historical_resolver(stamp.embedded.signed_revision)
            if await self._is_complete(signature, moment, revision):
                signature.level = "B-LTA"

    async def _is_complete(self, signature: Signature, moment: datetime, revision: Any) -> bool:
        """Return whether the file contains all that validation needs, up to the topmost included or trusted issuer."""
        policy = CertRevTrustPolicy(_FOR_ALL, retroactive_revinfo=True)
        registry = self._context((), signature, policy, revision).certificate_registry
        issuers = [each for each in (*registry, *signature.embedded.other_embedded_certs) if each.ca]
        subjects = {issuer.subject.dump() for issuer in issuers}
        roots = [each for each in issuers if each.self_issued or each.issuer.dump() not in subjects]
        context = self._context([*roots, *(self._roots or ())], signature, policy, revision, moment=moment)
        status = await self._validate(signature, context)
        token = status.timestamp_validity
        return bool(status.trusted and (token is None or token.trusted))

    async def _validate(self, signature: Signature, context: ValidationContext, *, skip_diff: bool = True) -> Any:
        if signature.kind == "timestamp":
            return await async_validate_pdf_timestamp(signature.embedded, context, skip_diff=skip_diff)
        return await async_validate_pdf_signature(signature.embedded, context, context, skip_diff=skip_diff)

    def _context(
        self,
        roots: Iterable[Any],
        signature: Signature,
        policy: CertRevTrustPolicy,
        revision: Any = None,
        **settings: Any,
    ) -> ValidationContext:
        """Return a context with the revocation data of the signature, and of a revision of the file."""
        known = {name: list(found) for name, found in self._fetched.items()}
        known["ocsps"] += _archived(signature, "ocsp")
        known["crls"] += _archived(signature, "crl")
        settings |= {"trust_roots": list(roots), "revinfo_policy": policy, **known}
        try:
            store = DocumentSecurityStore.read_dss(revision or self._reader)
        except NoDSSFoundError:
            return ValidationContext(**settings)
        return store.as_validation_context(settings)


def _archived(signature: Signature, kind: str) -> list[Any]:
    """Return the revocation data inside the signature, where Adobe's programs put it."""
    attributes = signature.embedded.signer_info["signed_attrs"]
    try:
        return list(find_unique_cms_attribute(attributes, "adobe_revocation_info_archival")[kind])
    except NonexistentAttributeError:
        return []
