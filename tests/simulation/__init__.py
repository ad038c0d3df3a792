"""Enumerates what may happen to one call, instead of sampling it: see `histories`."""
