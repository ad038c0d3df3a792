"""The texts in all languages."""

from __future__ import annotations

import re

from signing_async.sandbox.pages.texts import LANGUAGES


def test_both_languages_have_the_same_texts_and_placeholders() -> None:
    english, swedish = (vars(LANGUAGES[language]) for language in ("EN", "SV"))
    assert english.keys() == swedish.keys()
    for name, text in english.items():
        assert text != swedish[name], name
        if isinstance(text, str):
            assert re.findall(r"\{\w+\}", text) == re.findall(r"\{\w+\}", swedish[name]), name
        else:
            assert text.keys() == swedish[name].keys()
