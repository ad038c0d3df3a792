"""Send whole packages exactly once, with a journal."""
