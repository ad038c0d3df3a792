"""What schemathesis cannot know from the document alone: real PDFs, and values that depend on what was there before."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import strategies as st

from tests.pdfs import make_pdf

schemathesis.openapi.media_type("application/pdf", st.integers(600, 2000).map(make_pdf))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """A made-up cursor is refused, and a valid order may be taken by an earlier recipient: leave them out."""
    query, body = case.query, case.body
    if isinstance(query, dict):
        for name in [name for name in ("cursor", "starting_after") if isinstance(query.get(name), str) and query[name]]:
            del query[name]
    if isinstance(body, dict) and isinstance(body.get("order"), int | float) and body["order"] >= 1:
        del body["order"]
