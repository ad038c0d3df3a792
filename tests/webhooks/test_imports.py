"""What importing the package loads, and its public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_importing_webhooks_loads_the_standard_library_only_and_no_asyncio() -> None:
    code = (
        "import sys; before = set(sys.modules); import signing_async.webhooks as w;"
        "w.WebhookVerifier('k'); new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'signing_async'}), 'asyncio' in new)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.stdout.strip() == "[] False", done.stderr
