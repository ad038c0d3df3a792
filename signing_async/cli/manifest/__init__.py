"""Manifests of signing packages: CSV or JSON lines, their check, and the report of failed packages."""

from .check import CheckedManifest, check_manifest
from .failures import FailureReport
from .manifest import Manifest
from .rows import Entry, Problem

__all__ = ["CheckedManifest", "Entry", "FailureReport", "Manifest", "Problem", "check_manifest"]
