"""Fuzz the verifier: ``python -m tests.webhooks.fuzz 1000000`` is ``python -m tests.fuzz webhooks`` by plain mutation.

The number of mutations is about the given one on a machine of the usual speed.
"""

from __future__ import annotations

import sys

from tests.fuzz.running import by_mutation
from tests.fuzz.webhooks import TARGET

A_SECOND = 5_000

if __name__ == "__main__":
    tried = by_mutation(TARGET, seconds=int(sys.argv[1]) / A_SECOND, seed=1)
    print(f"{tried} mutated deliveries: none was accepted that is not genuine")
