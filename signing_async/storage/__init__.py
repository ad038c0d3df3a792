"""Durable rows: each statement once, run by an engine on SQLite or PostgreSQL."""
