"""`completion`: the script that lets a shell complete this command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .command_base import State, command


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
    found = get_completion_class(shell)
    assert found is not None
    group = click.get_current_context().find_root().command
    script = found(group, {}, "signing-async", "_SIGNING_ASYNC_COMPLETE").source()
    state.out.result({"shell": shell, "script": script}, script)
