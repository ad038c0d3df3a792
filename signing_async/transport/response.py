"""`Response`: a response of the service as a whole, with its body."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import attrs

from .._secret import hide_fields
from ..assumptions import Assumptions
from ..errors import DecodeError
from .decode import Unreadable, decode_record, hook_of, parse, request_id, unwrap
from .redaction import redact, redact_data
from .retry import Safety, effect_of

__all__ = ["Response"]

T = TypeVar("T")

_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([\w.:-]+)", re.IGNORECASE)


@attrs.define(eq=False, repr=False, slots=False, field_transformer=hide_fields)
class Response:
    """A response of the service. ``str`` and ``repr`` show nothing of its headers and body."""

    operation: str
    """The name of the call, such as ``"signings.get"`` or ``"POST /api/1.0/signings/{id}/cancel"``."""
    status: int
    headers: Mapping[str, str]
    """The headers, with case-insensitive names."""
    bytes: builtins.bytes = b""
    """The body; for an error, or a call for which only the status counts, at most its first 64 KiB."""
    _secrets: Callable[[], Iterable[str]] = attrs.field(kw_only=True)
    _assumptions: Assumptions = attrs.field(kw_only=True)
    _safety: Safety = attrs.field(kw_only=True)

    @property
    def text(self) -> str:
        """The body as text, in the charset of its Content-Type or UTF-8; what cannot be decoded is replaced."""
        found = _CHARSET.search(self.headers.get("Content-Type", ""))
        with suppress(LookupError):  # an unknown charset
            return self.bytes.decode(found[1] if found else "utf-8", "replace")
        return self.bytes.decode("utf-8", "replace")

    @property
    def request_id(self) -> str | None:
        """The id by which the service's support finds the request, without secrets: a server may echo anything."""
        found = request_id(self.headers, self._parsed(), self._assumptions)
        return None if found is None else redact(found, self._secrets())

    def json(self) -> Any:
        """Return the parsed body; raise `DecodeError` if it is not JSON."""
        return self._read(parse, self.bytes)

    def decode(self, cls: type[T]) -> T:
        """Decode the JSON body to a record of this package, an attrs class, a dataclass, or a list of one of these. ::

            template = response.decode(Template)
            templates = response.decode(list[Template])

        Fields that the class does not have are kept in its ``extra``, if it has a field of that name. Raises
        `DecodeError` if the body does not fit. The error's ``effect`` is ``"unknown"`` if the request changed
        something and must not be repeated.
        """
        hook_of(cls)
        found: T = self._read(self.decoded, cls)
        return found

    def decoded(self, cls: type[T]) -> T:
        """Decode the body as `decode` does; raise `Unreadable` if it does not fit."""
        return decode_record(unwrap(parse(self.bytes), cls, self._assumptions), cls)

    def decode_error(self, problem: str) -> DecodeError:
        """Return the error for a successful response that cannot be decoded."""
        secrets, identity = tuple(self._secrets()), self.request_id
        suffix = f", request id {identity}" if identity else ""
        return DecodeError(
            redact(f"{self.operation}: the response cannot be read: {problem} (HTTP {self.status}{suffix})", secrets),
            operation=self.operation,
            status=self.status,
            request_id=identity,
            body=redact_data(self._parsed(), secrets),
            effect=effect_of(self._safety, succeeded=True),
        )

    def _read(self, read: Callable[[Any], Any], value: Any) -> Any:
        try:
            return read(value)
        except Unreadable as error:
            problem = str(error)
        # Raised outside, without a context: its frames hold the body, which may echo a secret.
        raise self.decode_error(problem)

    def _parsed(self) -> Any:
        with suppress(Unreadable):
            return parse(self.bytes)
        return None

    def __repr__(self) -> str:
        return f"<Response {self.status} to {self.operation}, {len(self.bytes)} bytes>"
