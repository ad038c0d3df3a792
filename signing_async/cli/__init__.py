"""The ``signing-async`` command: one module for each group of commands, loaded when it is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from .._toml import closest
from ..errors import SigningError

try:
    import click
except ModuleNotFoundError:  # the extra is not installed: say so in a sentence, not in a traceback
    sys.exit("signing-async: the command line needs its extra: pip install 'signing-async[cli]'")

from .command import State, common_options
from .exits import CODES, FAILED, INTERRUPTED, code_of, facts_of
from .output import Output, discard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

COMMANDS = {
    "add-recipient": ("recipients:add_recipient", "Add somebody who has to sign to a draft."),
    "completion": ("completion:completion", "Print the script that completes commands in your shell."),
    "create": ("signings:create", "Create a draft."),
    "demo": ("demo:demo", "The whole story on this machine, in seconds: from a new app to a sealed PDF."),
    "dispatch": ("dispatch:dispatch", "Send every package of a manifest, each of them once."),
    "doctor": ("doctor:doctor", "Find out how a tenant answers, and write that down for the client."),
    "download": ("documents:download", "Download sealed PDFs."),
    "list": ("signings:list_signings", "List signings, by state, name or when they were updated."),
    "login": ("account:login", "Log in with the browser, and keep the token."),
    "logout": ("account:logout", "Remove the token from this machine."),
    "me": ("account:me", "Show who is logged in."),
    "remind": ("recipients:remind", "Remind recipients."),
    "sandbox": ("sandbox:sandbox", "Run the whole service on this machine."),
    "send": ("signings:send", "Send a draft to its recipients."),
    "show": ("signings:show", "Show a signing, its documents and its recipients."),
    "upload": ("documents:upload", "Upload PDFs to a draft."),
    "verify-sealed": ("verify_sealed:verify_sealed", "Say whether a sealed PDF is as it was when it was signed."),
    "watch": ("watch:watch", "Follow a signing until it is completed."),
    "webhook": ("webhook:webhook", "Verify, diagnose and check webhook deliveries."),
}
"""Name: where the command is, and its line in the help."""

_CHANGING = frozenset({"add-recipient", "create", "dispatch", "remind", "send", "upload"})


class _Lazy(click.Group):
    """Imports a command when it is run, so that ``--help`` is quick and missing extras hurt nobody."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        except ModuleNotFoundError as error:
            if ctx.resilient_parsing:  # a shell asks how the line may go on
                return None
            raise click.ClickException(_missing(name, error)) from None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if hint := closest(args[0], COMMANDS):
                raise click.UsageError(f"No such command {args[0]!r}{hint}", ctx) from None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # Click's own would import every command for its line, and end at the first whose extra is missing.
        from click.shell_completion import CompletionItem

        names = [name for name in sorted(COMMANDS) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name][1]) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in CODES.items()])


def _missing(name: str, error: ModuleNotFoundError) -> str:
    return f"{name} needs the module {error.name}: pip install 'signing-async[all]'"


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]}, params=list(common_options()))
@click.version_option(package_name="signing-async")
def group() -> None:
    """Work with the electronic signing service from the terminal.

    Settings come from the environment (SIGNING_BASE_URL, SIGNING_ACCESS_TOKEN, ...) and from a file; "signing-async
    login" makes the token. Secrets are never arguments.

    \b
    Example:
      signing-async list --state sent
    """


def main() -> None:
    """Run the command, and end with its exit code; an error is one sentence."""
    _fill_streams()
    sys.exit(run(sys.argv[1:]))


def _fill_streams() -> None:
    """Take the places of standard streams that are closed, so that no file or connection gets them."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; its exit code."""
    # Text that the terminal's encoding lacks is shown as well as it can be; what is no text is read as arguments are.
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "backslashreplace"), ("stderr", "backslashreplace")):
        with contextlib.suppress(AttributeError):  # not every stream has it
            getattr(sys, name).reconfigure(errors=errors)
    out = Output(json="--json" in arguments)
    try:
        return _invoke(arguments, out)
    except OSError as error:
        discard_output()
        return _tell(out, error, FAILED, f"{error.filename or 'the output cannot be written'}: {error.strerror}")


def _invoke(arguments: Sequence[str], out: Output) -> int:
    try:
        returned: Any = group.main(
            list(arguments), prog_name="signing-async", standalone_mode=False, obj=State(arguments)
        )
        return returned if isinstance(returned, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return _interrupted(out, changing=not _CHANGING.isdisjoint(arguments))
    except SigningError as error:
        return _tell(out, error, code_of(error))
    except click.ClickException as error:
        return _told(out, error)


def _interrupted(out: Output, *, changing: bool) -> int:
    words = "interrupted" + ("; a request that was under way may have taken effect" if changing else "")
    out.error(words, {"type": "Interrupted", "message": words, "exit_code": INTERRUPTED})
    return INTERRUPTED


def _told(out: Output, error: click.ClickException) -> int:
    """An error of click's, which knows how to show itself to people."""
    if not out.json:
        error.show()
        return error.exit_code
    return _tell(out, error, error.exit_code, error.format_message())


def _tell(out: Output, error: BaseException, code: int, words: str | None = None) -> int:
    facts = facts_of(error, code)
    out.error(words or str(error), facts if words is None else {**facts, "message": words})
    return code
