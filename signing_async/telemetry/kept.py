"""Keep the context of a span in the text of a JSON object, so that a later process can link to the span."""

from __future__ import annotations

import re

__all__ = ["find_context", "keep_context"]

_FIRST_NAME = re.compile(r'\{"(\w+)": ')
_KEPT = re.compile(r'\{"(\w+)": "(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})", "\1": ')


def keep_context(text: str, context: str | None) -> str:
    """Add the context to the text of a JSON object.

    Earlier versions refuse names that they do not know. The context is therefore added under the first name of the
    object, which then occurs twice: `json.loads` takes the last value of a repeated name.
    """
    first = _FIRST_NAME.match(text)
    return text if context is None or first is None else f'{{"{first[1]}": "{context}", {text[1:]}'


def find_context(text: str | None) -> str | None:
    """Return the context that was added to the text; None if there is none."""
    found = _KEPT.match(text or "")
    return None if found is None else found[2]
