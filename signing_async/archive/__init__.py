"""Collect the sealed PDF of every completed signing, each exactly once."""
