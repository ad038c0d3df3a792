"""`Response`: a response of the service as a whole, with its body."""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from multidict import CIMultiDict

from ..assumptions import Assumptions
from ..errors import DecodeError
from .custom_records import decode_to, hook_of, unwrap
from .decode import Unreadable, parse
from .operation import Shared
from .retry import Repeat, effect_of

__all__ = ["Response"]

T = TypeVar("T")

_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([\w.:-]+)", re.IGNORECASE)


class Response:
    """A response of the service. ``str`` and ``repr`` show nothing of its headers and body."""

    def __init__(
        self,
        operation: str,
        status: int,
        headers: Mapping[str, str],
        content: builtins.bytes,
        shared: Shared,
        assumptions: Assumptions,
        repeat: Repeat,
    ) -> None:
        self.operation: str = operation
        """The name of the call, such as ``"signings.get"`` or ``"POST /api/1.0/signings/{id}/cancel"``."""
        self.status: int = status
        self.headers: Mapping[str, str] = CIMultiDict(headers)
        """The headers, with case-insensitive names."""
        self.bytes: builtins.bytes = content
        """The body; for an error, or a call for which only the status counts, at most its first 64 KiB."""
        self._shared = shared
        self._assumptions = assumptions
        self._repeat = repeat

    @property
    def text(self) -> str:
        """The body as text, in the charset of its Content-Type or UTF-8; what cannot be decoded is replaced."""
        found = _CHARSET.search(self.headers.get("Content-Type", ""))
        try:
            return self.bytes.decode(found[1] if found else "utf-8", "replace")
        except LookupError:  # an unknown charset
            return self.bytes.decode("utf-8", "replace")

    @property
    def request_id(self) -> str | None:
        """The id by which the service's support finds the request, without secrets."""
        data = None
        with contextlib.suppress(Unreadable):
            data = parse(self.bytes)
        return self._shared.request_id(self.headers, data, self._assumptions)

    def json(self) -> Any:
        """Return the parsed body; raise `DecodeError` if it is not JSON."""
        try:
            return parse(self.bytes)
        except Unreadable as error:
            problem = str(error)
        raise self._decode_error(problem)

    def decode(self, cls: type[T]) -> T:
        """Decode the JSON body to a record of this package, an attrs class, a dataclass, or a list of one of these. ::

            template = response.decode(Template)
            templates = response.decode(list[Template])

        Fields that the class does not have are kept in its ``extra``, if it has a field of that name. Raises
        `DecodeError` if the body does not fit. The error's ``effect`` is ``"unknown"`` if the request changed
        something and must not be repeated.
        """
        hook_of(cls)
        try:
            return self.decoded(cls)
        except Unreadable as error:
            problem = str(error)
        raise self._decode_error(problem)

    def decoded(self, cls: type[T]) -> T:
        """Decode the body as `decode` does; raise `Unreadable` if it does not fit."""
        return decode_to(unwrap(parse(self.bytes), cls, self._assumptions), cls)

    def _decode_error(self, problem: str) -> DecodeError:
        error = self._shared.decode_error(self.operation, problem, self.status, self.request_id, self.bytes)
        error.effect = effect_of(self._repeat, succeeded=True)
        return error

    def __repr__(self) -> str:
        return f"<Response {self.status} to {self.operation}, {len(self.bytes)} bytes>"
