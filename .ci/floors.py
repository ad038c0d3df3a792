"""Print the lowest version that pyproject.toml allows of each direct dependency of the named extras."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
for requirement in sum(extras, project["dependencies"]):
    if not requirement.startswith(f"{project['name']}["):  # an extra of our own: name it, too
        sys.stdout.write(re.sub(r">=([\w.]+)", r"==\1", requirement) + "\n")
