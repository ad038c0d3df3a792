"""Origins: one form for each host."""

from __future__ import annotations

import pytest

from signing_async import ConfigurationError, SigningClient


@pytest.mark.parametrize(
    ("base_url", "origin"),
    [
        ("https://BÜCHER.example:443/", "https://xn--bcher-kva.example"),
        ("https://bu\u0308cher.example:8443", "https://xn--bcher-kva.example:8443"),
        ("https://faß.example", "https://xn--fa-hia.example"),
        ("http://bücher.localhost:80", "http://xn--bcher-kva.localhost"),
    ],
)
def test_origin_of_a_tenant_has_one_form(base_url: str, origin: str) -> None:
    assert SigningClient(base_url, "token").base_url == origin


@pytest.mark.parametrize("base_url", [f"https://{'ü' * 64}.example", "https://bü%cher.example", "http://[::1%eth0]"])
def test_host_that_cannot_be_encoded_is_refused(base_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^base_url: must ") as caught:
        SigningClient(base_url, "token")
    assert str(caught.value).endswith(f"got {base_url!r}")
