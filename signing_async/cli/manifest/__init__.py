"""Manifests of signing packages: CSV or JSON lines, and the report of those that failed."""

from .check import CheckedManifest, check_manifest
from .failures import FailureReport
from .manifest import Manifest
from .rows import Entry, Problem

__all__ = ["CheckedManifest", "Entry", "FailureReport", "Manifest", "Problem", "check_manifest"]
