"""A browser for BROWSER: it goes to the address, agrees to what the page asks, and follows the way back."""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar


def agree(address: str, decision: str = "allow") -> str:
    """Visit a consent page and answer it; the address and the page that this ends at."""
    return submit(address, decision=decision)


def submit(address: str, **typed: str) -> str:
    """Fill in the form of a page; the address and the page that this ends at, whatever its status."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(address, timeout=20) as response:
        page = response.read().decode()
    inputs = re.findall(r"<input\b[^>]*>", page)
    fields = {_attribute(one, "name"): _attribute(one, "value") for one in inputs if _attribute(one, "name")}
    form = urllib.parse.urlencode({**fields, **typed}).encode()
    origin = urllib.parse.urlsplit(address)
    request = urllib.request.Request(address, form, {"Origin": f"{origin.scheme}://{origin.netloc}"})
    try:
        with opener.open(request, timeout=20) as response:
            return f"{response.geturl()}\n{response.read().decode()}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.geturl()}\n{error.read().decode()}"


def _attribute(tag: str, name: str) -> str:
    found = re.search(rf'\b{name}="([^"]*)"', tag)
    return found[1] if found else ""


if __name__ == "__main__":
    agree(sys.argv[1])
