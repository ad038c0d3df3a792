"""A browser for BROWSER: it opens a consent page, allows access, and follows the redirect."""

from __future__ import annotations

import re
import sys
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar


def agree(address: str) -> str:
    """Allow access on a consent page, and return the URL and the page that this leads to."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(address, timeout=20) as response:
        page = response.read().decode()
    inputs = [dict(re.findall(r'\b(name|value)="([^"]*)"', tag)) for tag in re.findall(r"<input\b[^>]*>", page)]
    fields = {tag["name"]: tag.get("value", "") for tag in inputs if "name" in tag}
    form = urllib.parse.urlencode({**fields, "decision": "allow"}).encode()
    origin = urllib.parse.urlsplit(address)
    request = urllib.request.Request(address, form, {"Origin": f"{origin.scheme}://{origin.netloc}"})
    with opener.open(request, timeout=20) as response:
        return f"{response.geturl()}\n{response.read().decode()}"


if __name__ == "__main__":
    agree(sys.argv[1])
