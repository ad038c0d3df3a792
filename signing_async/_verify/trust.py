"""Validate signatures with pyHanko: against roots, by revocation data, and for their PAdES level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

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

__all__ = ["Validator", "indication"]

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
    """Validates the signatures of one file, `judge.Signature`, and records in them what it finds."""

    def __init__(self, reader: PdfFileReader, roots: Sequence[Any] | None, fetch: bool) -> None:
        self._reader = reader
        self._roots = roots
        self._fetch = fetch
        self._fetched: dict[str, list[Any]] = {"ocsps": [], "crls": [], "other_certs": []}

    async def check_integrity(self, signature: Any) -> Any:
        """Return pyHanko's verdict without roots. Only this validation examines changes after the signature."""
        context = self._context((), signature, CertRevTrustPolicy(_IF_ANY))
        return await self._validate(signature, context, skip_diff=False)

    async def judge_trust(self, signatures: Sequence[Any]) -> None:
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
                    signature.trust_problems.append(f"the certificate of its timestamp {_describe(token)}")
            status, signature.revocation = await self._judge(signature, at, lambda status: status)
            if signature.is_valid and not status.trusted:
                signature.trust_problems.append(f"the certificate {_describe(status)}")
            signature.trusted = status.trusted and not signature.trust_problems
            if signature.trusted and signature.kind == "timestamp":
                moment = status.timestamp

    async def _judge(self, signature: Any, moment: datetime | None, part: Callable[[Any], Any]) -> tuple[Any, str]:
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

    async def _fetch_revocation(self, signature: Any) -> None:
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

    async def judge_levels(self, signatures: Sequence[Any]) -> None:
        """Determine the PAdES levels that the contents of the file reach (ETSI EN 319 142-1)."""
        for signature in signatures:
            if not signature.is_valid or signature.subfilter != SigSeedSubFilter.PADES.value.lstrip("/"):
                continue
            if get_signing_cert_attr(signature.embedded.signer_info["signed_attrs"]) is None:
                continue
            signature.level = "B-B"
            later = [stamp for stamp in signatures if stamp.kind == "timestamp" and stamp.is_valid]
            later = [stamp for stamp in later if stamp.covers > signature.covers]
            token = signature.status.timestamp_validity
            if token is None and later:
                token = later[0].status
            if token is None:
                continue
            signature.level = "B-T"
            if await self._is_complete(signature, token.timestamp, self._reader):
                signature.level = "B-LT"
                for stamp in later:
                    revision = self._reader.get_historical_resolver(stamp.embedded.signed_revision)
                    if await self._is_complete(signature, token.timestamp, revision):
                        signature.level = "B-LTA"

    async def _is_complete(self, signature: Any, moment: datetime, revision: Any) -> bool:
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

    async def _validate(self, signature: Any, context: ValidationContext, *, skip_diff: bool = True) -> Any:
        if signature.kind == "timestamp":
            return await async_validate_pdf_timestamp(signature.embedded, context, skip_diff=skip_diff)
        return await async_validate_pdf_signature(signature.embedded, context, context, skip_diff=skip_diff)

    def _context(
        self,
        roots: Iterable[Any],
        signature: Any,
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


def _archived(signature: Any, kind: str) -> list[Any]:
    """Return the revocation data inside the signature, where Adobe's programs put it."""
    attributes = signature.embedded.signer_info["signed_attrs"]
    try:
        return list(find_unique_cms_attribute(attributes, "adobe_revocation_info_archival")[kind])
    except NonexistentAttributeError:
        return []


def indication(status: Any) -> str:
    """Return the ETSI EN 319 102-1 name of the reason why a certificate is not trusted; empty if it is trusted."""
    return "" if status.trust_problem_indic is None else str(status.trust_problem_indic.standard_name)


def _describe(status: Any) -> str:
    return _UNTRUSTED.get(indication(status), "is not trusted")
