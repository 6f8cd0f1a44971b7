"""A server's URL leads to this server and to no other."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.runtime.http_server import bind, url_of


def test_a_url_names_the_bound_address_and_not_a_name_with_more_addresses() -> None:
    with bind("localhost", 0) as listener:
        url = urlsplit(url_of("localhost", listener))
        assert (url.hostname, url.port) == listener.getsockname()
