"""The group of all commands. Each command's module is imported when the command runs."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from ..errors import AuthError, SigningError, Unauthorized

try:
    import click
except ModuleNotFoundError:  # a sentence instead of a traceback
    sys.exit("signing-async: the command line needs an extra: pip install 'signing-async[cli]'")

from .command_base import State, command, common_options
from .exits import CODES, FAILED, INTERRUPTED, USAGE, code_of, facts_of
from .output import Output, discard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "add-recipient": ("recipients:add_recipient", "Add a recipient to a draft."),
    "archive": ("archive:archive", "Archive the sealed PDFs of all signings, verify the archive, list what is stuck."),
    "completion": ("app:completion", "Print the completion script for your shell."),
    "create": ("signings:create", "Create a draft."),
    "demo": ("demo:demo", "Run through everything on this machine in seconds, from a new app to an archive."),
    "dispatch": ("dispatch:dispatch", "Send every package of a manifest, each once."),
    "doctor": ("doctor:doctor", "Probe a tenant's conventions and write them to an assumptions file."),
    "download": ("documents:download", "Download sealed PDFs."),
    "inbox": ("inbox:inbox", "List, retry and purge the events that a receiver has stored."),
    "list": ("signings:list_signings", "List signings, filtered by state, name or time of update."),
    "login": ("account:login", "Log in with the browser and store the token."),
    "logout": ("account:logout", "Remove the token from this machine."),
    "me": ("account:me", "Show the user who is logged in."),
    "remind": ("recipients:remind", "Send reminders to recipients."),
    "sandbox": ("sandbox:sandbox", "Run the service on this machine, for development and tests."),
    "send": ("signings:send", "Send a draft to its recipients."),
    "show": ("signings:show", "Show a signing with its documents and recipients."),
    "upload": ("documents:upload", "Upload PDFs to a draft."),
    "verify-sealed": (
        "verify_sealed:verify_sealed",
        "Check whether a sealed PDF is unchanged since it was signed, and who signed it.",
    ),
    "watch": ("signings:watch", "Follow a signing until it is completed."),
    "webhook": ("webhook:webhook", "Verify, diagnose and check webhook deliveries."),
}
"""The location and the help line of each command."""


class _LazyGroup(click.Group):
    """Imports a command only to run it: help is fast, and a missing extra affects only its command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None:
            module, _, attribute = COMMANDS[name][0].partition(":")
            try:
                found = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
            except ModuleNotFoundError as error:
                if ctx.resilient_parsing:  # a shell asks for completions
                    return None, None, []
                extra = "sandbox" if name in ("demo", "sandbox") else "all"
                message = f"{name} needs the module {error.name}: pip install 'signing-async[{extra}]'"
                raise click.ClickException(message) from None
        return name, found, rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in CODES.items()])


@click.group(
    cls=_LazyGroup,
    commands={name: click.Command(name, short_help=line) for name, (_, line) in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
    params=list(common_options()),
)
@click.version_option(package_name="signing-async")
def group() -> None:
    """Use the electronic signing service from the terminal.

    Settings come from the environment (SIGNING_BASE_URL, SIGNING_ACCESS_TOKEN, ...) and from a file; "signing-async
    login" obtains the token. Secrets are never arguments.

    \b
    Example:
      signing-async list --state sent
    """


@command()
@click.argument("shell", type=click.Choice(("bash", "fish", "zsh")))
def completion(state: State, shell: str) -> None:
    """Print the script that completes commands and options in your SHELL.

    \b
    Example:
      signing-async completion bash > signing-async.bash
      signing-async completion zsh > _signing-async
      signing-async completion fish > signing-async.fish

    Load it when the shell starts: put "source .../signing-async.bash" into ~/.bashrc, "_signing-async" into a folder of
    zsh's fpath, or "signing-async.fish" into ~/.config/fish/completions.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    script = found(group, {}, "signing-async", "_SIGNING_ASYNC_COMPLETE").source()
    state.out.result({"shell": shell, "script": script}, script)


def main() -> None:
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # closed: no file or connection must get its descriptor
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    # Escape characters that an output's encoding lacks; decode invalid input as Python decodes arguments.
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "backslashreplace"), ("stderr", "backslashreplace")):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    out, state = Output(json="--json" in arguments), State(arguments)
    problem: BaseException
    try:
        returned: Any = group.main(list(arguments), prog_name="signing-async", standalone_mode=False, obj=state)
        return int(returned or 0)
    except (KeyboardInterrupt, click.Abort):
        message = "interrupted" + ("; a request in flight may have taken effect" if state.changing else "")
        out.error(message, {"type": "Interrupted", "message": message, "exit_code": INTERRUPTED})
        return INTERRUPTED
    except SigningError as error:
        problem, code, message = error, code_of(error), str(error)
        if getattr(error, "code", None) == "invalid_client":
            message += ". Check SIGNING_CLIENT_ID and SIGNING_CLIENT_SECRET, or the settings file"
        elif (
            isinstance(error, Unauthorized | AuthError) and not error.transient and "signing-async login" not in message
        ):
            is_given = isinstance(error, Unauthorized) and state.settings.access_token is not None
            how = "Replace the access token of the settings, or remove it and run" if is_given else "To log in, run"
            message += f". {how}: signing-async login"
    except click.ClickException as error:
        if not out.json:
            error.show()
            return error.exit_code
        problem, code, message = error, error.exit_code, error.format_message()
    except ModuleNotFoundError as error:  # of an extra
        problem, code, message = error, USAGE, str(error)
    except OSError as error:
        discard_output()
        problem, code, message = error, FAILED, f"{error.filename or 'could not write the output'}: {error.strerror}"
    out.error(message, {**facts_of(problem, code), "message": message})
    return code
