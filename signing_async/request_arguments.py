"""Check the arguments of a request to any endpoint, and build its address and body."""

from __future__ import annotations

import asyncio
import json as json_module
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from string import Formatter
from typing import Any
from urllib.parse import unquote, urlencode

from multidict import CIMultiDict

from . import _checks
from .documents.source import OpenPdf, PdfSource
from .errors import InvalidRequest, RequestTimeout
from .transport import urls, wire
from .transport.retry import Repeat

__all__ = [
    "Form",
    "build_address",
    "check_form",
    "check_headers",
    "check_method",
    "choose_repeat",
    "make_body",
    "open_files",
]

Form = Mapping[str, str | PdfSource]
"""The fields of a multipart form."""

_READING = ("GET", "HEAD")
_METHODS = (*_READING, "POST", "PUT", "PATCH", "DELETE")
_SEGMENTS = re.compile(r"(?:/(?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)+", re.ASCII)
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_OWN_HEADERS = ("Authorization", "Connection", "Content-Length", "Cookie", "Expect", "Host", "Transfer-Encoding")


def check_method(method: object) -> str:
    if isinstance(method, str) and method.upper() in _METHODS:
        return method.upper()
    raise InvalidRequest(f"method: must be one of {', '.join(_METHODS)}, got {method!r}")


def choose_repeat(method: str, repeat: object, reconcile: object) -> Repeat:
    if not isinstance(repeat, bool):
        raise InvalidRequest(f"repeat: must be true or false, got {repeat!r}")
    if reconcile is None:
        return Repeat.READ if repeat or method in _READING else Repeat.NEVER
    if not callable(reconcile):
        raise InvalidRequest(f"reconcile: must be an async function of a Reader, got {reconcile!r}")
    if repeat or method in _READING:
        raise InvalidRequest("reconcile: not for GET, HEAD or repeat=True: these requests are retried without it")
    return Repeat.RECONCILED


def build_address(template: object, path: object, params: object) -> str:
    """Return the path with its placeholders filled, and the query."""
    if not isinstance(template, str) or not template.startswith("/") or template.startswith("//"):
        raise InvalidRequest(f"the path must begin with one slash, relative to the client's origin; got {template!r}")
    if "?" in template or "#" in template:
        raise InvalidRequest(f"the path must have no query or fragment: use params=; got {template!r}")
    if not isinstance(path, Mapping):
        raise InvalidRequest(f"path: must be a mapping of the placeholders' values, got {type(path).__name__}")
    address, names = "", set()
    try:
        for text, name, form, conversion in Formatter().parse(template):
            if not _SEGMENTS.fullmatch("/" + text):
                raise InvalidRequest(f"the path must be percent-encoded: {text!r} in {template!r}")
            address += text
            if name is None:
                continue
            if not name.isidentifier() or form or conversion:
                raise ValueError
            if name not in path:
                raise InvalidRequest(f"path: no value for {{{name}}} of {template!r}")
            names.add(name)
            value = path[name]
            address += urls.segment(f"path: {name}", str(value) if _checks.is_integer(value) else value)
    except InvalidRequest:
        raise
    except ValueError:
        raise InvalidRequest(f"the path has a placeholder other than {{name}}: {template!r}") from None
    for name in path:
        if name not in names:
            raise InvalidRequest(f"path: {template!r} has no placeholder {{{name}}}")
    if any(unquote(segment) in (".", "..") for segment in address.split("/")):
        raise InvalidRequest(f"the path must have no segments . and .., got {template!r}")
    query = urlencode(list(_pairs(params)))
    return f"{address}?{query}" if query else address


def _pairs(params: object) -> Iterable[tuple[str, str]]:
    if not isinstance(params, Mapping):
        raise InvalidRequest(f"params: must be a mapping, got {type(params).__name__}")
    for name, given in params.items():
        if not _checks.is_text(name):
            raise InvalidRequest(f"params: names must be non-empty strings, got {name!r}")
        for value in given if isinstance(given, list | tuple) else [] if given is None else [given]:
            if isinstance(value, bool):
                yield name, str(value).lower()
            elif _checks.is_number(value) or _checks.is_text(value) or value == "":
                yield name, str(value)
            else:
                raise InvalidRequest(
                    f"params: {name}: must be a string, a number, true, false, None or a list, got {value!r}"
                )


def check_headers(headers: object) -> Mapping[str, str]:
    """Return the headers. No error shows a value: it may be a secret."""
    if not isinstance(headers, Mapping):
        raise InvalidRequest(f"headers: must be a mapping, got {type(headers).__name__}")
    checked: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidRequest(f"headers: invalid name {name!r}")
        if name.title() in _OWN_HEADERS:
            raise InvalidRequest(f"headers: {name} is set by the client")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise InvalidRequest(f"headers: {name}: must be a string of printable ASCII characters")
        checked[name] = value
    return checked


def check_form(body: object, headers: Mapping[str, str]) -> Form | None:
    """Return the fields of a form; None if the body is not a form."""
    if isinstance(body, PdfSource):
        body = {"selected_file": body}
    if not isinstance(body, Mapping):
        return None
    if "Content-Type" in headers:
        raise InvalidRequest("headers: Content-Type: the client sets that of a form")
    for name, value in body.items():
        if not _checks.is_text(name):
            raise InvalidRequest(f"body: names of fields must be non-empty strings, got {name!r}")
        if not (isinstance(value, PdfSource) or _checks.is_text(value) or value == ""):
            raise InvalidRequest(f"body: {name}: must be a string or a PdfSource, got {type(value).__name__}")
    if not body:
        raise InvalidRequest("body: a form must have a field")
    return body


async def open_files(form: Form, stack: ExitStack, deadline: float, name: str) -> dict[str, str | OpenPdf]:
    """Open the files of a form until the stack is closed. Their content is not checked: an endpoint may accept any."""
    opened: dict[str, str | OpenPdf] = {}
    try:
        async with asyncio.timeout_at(deadline) as opening:
            for field, value in form.items():
                opened[field] = value if isinstance(value, str) else stack.enter_context(await value.open())
    except TimeoutError:
        if not opening.expired():
            raise
    if not opening.expired():
        return opened
    # Raised here, the error does not have the `TimeoutError` as its context.
    raise RequestTimeout(f"{name}: deadline passed before anything was sent", operation=name, attempts=0)


def make_body(method: str, json: Any, body: Any) -> Callable[[], wire.Body] | None:
    """Return a function that makes the body for each attempt; None for GET and HEAD."""
    if json is not None and body is not None:
        raise InvalidRequest("json, body: pass only one of them")
    if method in _READING:
        if json is None and body is None:
            return None
        raise InvalidRequest(f"{'body' if json is None else 'json'}: a {method} has no body")
    content, content_type = b"", None
    if json is not None:
        content_type = wire.JSON
        try:
            content = json_module.dumps(json, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"json: cannot encode as JSON: {error}") from None
    elif isinstance(body, bytes | bytearray | memoryview):
        content, content_type = bytes(body), "application/octet-stream"
    elif isinstance(body, str):
        raise InvalidRequest("body: must be bytes, a PdfSource or a form, got str: encode it, or use json=")
    elif body is not None and not isinstance(body, PdfSource | Mapping):
        raise InvalidRequest(
            f"body: must be bytes, a PdfSource or a form, got {type(body).__name__}, which cannot be sent a second"
            " time: read it, or wrap it in a PdfSource"
        )
    return lambda: wire.bytes_body(content, content_type)
