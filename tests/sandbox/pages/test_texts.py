"""The texts in all languages."""

from __future__ import annotations

import re

from signing_async.sandbox.pages.texts import ENGLISH, SWEDISH, Texts


def test_both_languages_have_the_same_texts_and_placeholders() -> None:
    for name in Texts.__dataclass_fields__:
        english, swedish = getattr(ENGLISH, name), getattr(SWEDISH, name)
        assert english != swedish, name
        if isinstance(english, str):
            assert re.findall(r"\{\w+\}", english) == re.findall(r"\{\w+\}", swedish), name
        else:
            assert english.keys() == swedish.keys()
