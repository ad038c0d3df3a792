"""A reminder of this project's words for its ideas: the files of the package avoid the worst of the others."""

from __future__ import annotations

import re

from tests.guides import ROOT

AVOIDED = {
    r"\bin doubt\b": "ambiguous, or outcome unknown",
    r"\bof an outage\b": "transient",
    r"\bpurse\b": "retry budget",
    r"\bteller\b|\btally\b": "progress reporter",
    r"\bmany hands\b": "worker pool",
    r"\bread[- ]ahead\b|\bon its way meanwhile\b": "prefetch",
    r"\bhand(ed)?[- ]?over\b|\bhand-off\b": "deliver",
    r"\bseen before\b": "duplicate",
    r"\bspoiled\b": "desynchronized",
    r"\blet (go|end)\b": "release, or drain",
    r"\bone that (has|was|does)\b": "name the thing",
    r"\bwhoever\b": "name the caller",
    r"\b(of|one of|all) those that\b": "name the things",
    r"\bwhat came of\b": "the result of",
    r"\bstands there\b|\bis there already\b": "exists",
    r"\bthat is no (good|use|PDF)\b": "invalid",
    r"\bmust be a text\b|\bmust be a whole number\b": "must be a string, must be an integer",
    r"\bcannot be had\b|\bcould be had\b": "could not obtain",
    r"\bas far as\b": "if, or where",
}
_ANY = re.compile("|".join(f"(?:{pattern})" for pattern in AVOIDED), re.IGNORECASE)


def test_words_of_other_ideas_are_avoided() -> None:
    files = [ROOT / "README.md", *sorted((ROOT / "signing_async").rglob("*"))]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()} (say: {instead})"
        for path in files
        if path.suffix in (".py", ".md", ".html", ".css")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if _ANY.search(line)
        for pattern, instead in AVOIDED.items()
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
