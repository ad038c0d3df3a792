"""The documented signing service on this machine. It is not a legal signing service.

Example::

    async with Sandbox() as sandbox:
        client = SigningClient(sandbox.base_url, sandbox.access_token())
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._sample_pdf import sample_pdf as sample_pdf
    from .profile import Profile as Profile
    from .refused import Refused as Refused
    from .server import Sandbox as Sandbox

__all__ = ["Profile", "Refused", "Sandbox", "sample_pdf"]

_MODULES = {"Profile": "profile", "Refused": "refused", "Sandbox": "server", "sample_pdf": "._sample_pdf"}
_REQUIRED = {
    "cryptography": "cryptography",
    "jinja2": "jinja2",
    "pikepdf": "pikepdf",
    "pyhanko": "pyhanko",
    "yaml": "pyyaml",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, package in _REQUIRED.items():
        # Each is imported on first use; report a missing one now.
        if find_spec(module) is None:
            message = f"signing_async.sandbox needs {package}: pip install 'signing-async[sandbox]'"
            raise ModuleNotFoundError(message, name=module)
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
