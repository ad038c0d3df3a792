"""Everything of this package that reads foreign bytes, under attack: ``python -m tests.fuzz NAME --seconds 60``."""
