"""Tests of dispatch, and what they have in common."""
