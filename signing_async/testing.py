"""A pytest plugin: the sandbox as fixtures."""
