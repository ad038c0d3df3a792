"""``python -m tests.fuzz NAME --seconds 60``: guided by coverage where atheris is installed, else plain mutation.

An input that breaks a promise ends the run with exit code 1 (atheris: with its own report) and is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.running import LONGEST, Found, Target, by_mutation, guarded

NAMES = ("exchange", "pdfs", "sealed", "webhooks")


def load(name: str) -> Target:
    """A target by its module's name."""
    target: Target = importlib.import_module(f"tests.fuzz.{name}").TARGET
    return target


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--plain", action="store_true", help="no atheris, even where there is one")
    given = parser.parse_args()
    if given.name != "all" and not given.plain and importlib.util.find_spec("atheris") is not None:
        guide(given.name, given.seconds, given.seed)
        return
    if not given.plain and given.name != "all":
        print("atheris is not installed (pip install 'signing-async[fuzz]', on Linux): plain mutation instead")
    names = NAMES if given.name == "all" else (given.name,)
    for name in names:
        try:
            tried = by_mutation(load(name), seconds=given.seconds / len(names), seed=given.seed)
        except Found as found:
            sys.exit(f"seed {given.seed}: {found}")
        print(f"{name}: {tried} inputs, seed {given.seed}: every promise held")


def guide(name: str, seconds: float, seed: int) -> None:
    """Let atheris choose the inputs by what they reach in the package; the process ends here."""
    import atheris  # it ships no types

    with atheris.instrument_imports(include=["signing_async"]):
        target = load(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        for number, data in enumerate(target.seeds):
            Path(folder, str(number)).write_bytes(data)
        words = Path(folder, "words.txt")
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        once = guarded(target, held.enter_context(target.attacking()))
        options = [f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST}", f"-seed={seed % 2**32}", f"-dict={words}"]
        options += ["-rss_limit_mb=1500", "-timeout=20", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *options, folder], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
