"""The texts for recipients, in the languages that a signing can have."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from types import SimpleNamespace

LANGUAGES: dict[str, SimpleNamespace] = {
    language: SimpleNamespace(**texts)
    for language, texts in tomllib.loads(files(__package__).joinpath("texts.toml").read_text(encoding="utf-8")).items()
}
