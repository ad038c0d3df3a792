"""The ``signing-async`` command: one module for each group of commands, loaded when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from ..errors import SigningError

try:
    import click
except ModuleNotFoundError:  # the extra is not installed: say so in a sentence, not in a traceback
    sys.exit("signing-async: the command line needs its extra: pip install 'signing-async[cli]'")

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMANDS = {
    "demo": ("demo", "The whole story on this machine, in seconds: from a new app to a sealed PDF."),
    "sandbox": ("sandbox", "Run the whole service on this machine."),
    "webhook": ("webhook", "Verify, diagnose and check webhook deliveries."),
}


class _Lazy(click.Group):
    """Imports a command when it is run, so that ``--help`` is quick and missing extras hurt nobody."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._rows()))

    def _rows(self) -> Iterator[tuple[str, str]]:
        for name in sorted(COMMANDS):
            yield name, COMMANDS[name][1]


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="signing-async")
def group() -> None:
    """Work with the electronic signing service from the terminal."""


def main() -> None:
    """Run the command; an error of the package ends it with one sentence and exit code 1."""
    try:
        group(prog_name="signing-async")
    except SigningError as error:
        click.echo(f"signing-async: {error}", err=True)
        sys.exit(1)
