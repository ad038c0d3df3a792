"""`me`, `login` and `logout`: who is logged in, and how that comes about."""

from __future__ import annotations

from .command import State, command


@command()
def me(state: State) -> None:
    """Show who is logged in: a cheap way to check that all is set up.

    \b
    Example:
      signing-async me
    """
    state.run(_me(state))


async def _me(state: State) -> None:
    async with state.client() as client:
        user = await client.me()
        facts = {"base_url": state.settings.origin, "id": user.id, "name": user.name, "email": user.email, **user.extra}
        named = " ".join(part for part in (user.name, user.email and f"<{user.email}>") if part)
        state.out.result(facts, f"{named or user.id or 'somebody without a name'} at {state.settings.origin}")
