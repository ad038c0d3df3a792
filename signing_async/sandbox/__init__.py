"""The whole signing service, running for real on this machine. It is no legal signing service.

Example::

    async with Sandbox() as sandbox:
        client = SigningClient(sandbox.base_url, sandbox.access_token())
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .profile import Profile as Profile
    from .refused import Refused as Refused
    from .server import Sandbox as Sandbox

__all__ = ["Profile", "Refused", "Sandbox"]

_HOMES = {"Profile": "profile", "Refused": "refused", "Sandbox": "server"}
_NEEDED = ("cryptography", "pikepdf", "pyhanko")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _NEEDED:
        # They are imported late, when the first file comes; that one is missing is said at once.
        if find_spec(module) is None:
            words = f"signing_async.sandbox needs {module}: pip install 'signing-async[sandbox]'"
            raise ModuleNotFoundError(words, name=module)
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
