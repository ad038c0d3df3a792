"""The command ``signing-async``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command and exit with its exit code."""
    try:
        # Importing takes a while, and Ctrl-C may come meanwhile.
        from .app import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted\n")
        sys.exit(130)
