"""Manifests of signing packages: CSV or JSON lines, and the report of those that failed."""

from .failures import FailureReport
from .manifest import Manifest
from .rows import Entry, Problem

__all__ = ["Entry", "FailureReport", "Manifest", "Problem"]
