"""Why a target is missed, where one is: what the floor is, and why. By the target's own words, as `judge` was told."""

from __future__ import annotations

__all__ = ["NOTES"]

NOTES: dict[str, str] = {}
