"""The Python blocks of a guide, as a reader pastes them: tests, files that name themselves, and a session."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "signing_async").rglob("*.md"))
_BLOCK = re.compile(r"^(?P<skip><!-- not run: .+ -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r'(?:# |""")(\w+\.py)\b')
_TEST = re.compile(r"^(?:async )?def test_", re.MULTILINE)


def blocks(path: Path) -> list[str]:
    """Return the guide's Python blocks, without those marked ``<!-- not run: why -->``."""
    return [found["code"] for found in _BLOCK.finditer(path.read_text("utf-8")) if not found["skip"]]


def files(path: Path) -> dict[str, str]:
    """Return the blocks that begin with the name of a file, by that name; those with tests are one file."""
    found = {match[1]: code for code in blocks(path) if (match := _FILE.match(code))}
    tests = "\n\n".join(code for code in blocks(path) if _TEST.search(code))
    return found | ({f"test_{path.parent.name}_guide.py": tests} if tests else {})


def session(path: Path) -> str:
    """Return the other blocks but whole programs, to be pasted into ``python -m asyncio``."""
    return "\n".join(
        code for code in blocks(path) if not _FILE.match(code) and not _TEST.search(code) and "asyncio.run(" not in code
    )


def as_module(path: Path) -> str:
    """Return the session as a module for type checkers."""
    return "async def guide() -> None:\n" + textwrap.indent(session(path) or "...\n", "    ")
