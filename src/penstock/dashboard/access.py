"""Who may use the dashboard: the Host and Origin of requests, and the key.

On loopback every program of the machine reaches the server, also a browser that shows a foreign page. So the Host must
be a name of this server, because a page may point a name of its own at 127.0.0.1, and a request from a page of another
origin is refused. A server on another address needs a key. It comes once in the address and then in a cookie. There any
Host will do: other machines may know the server by a name that it does not know, and a foreign page has no cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Literal
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.config.loopback import is_loopback

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OWN_SITES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` of a page of this server, and of an address that a user typed."""
KEY_BYTES = 24

Verdict = Literal["open", "by key", "by cookie"]


class NoAccess(Exception):
    """A request is refused. The message says why, and what to do."""


def new_key() -> str:
    """Return a key that cannot be guessed."""
    return secrets.token_urlsafe(KEY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rules of one server."""

    hosts: frozenset[str] | None
    """Lower-case names of this server in a Host header, without a port; None for any name."""
    port: int
    key: str = field(repr=False)
    needs_key: bool
    """Whether reading needs the key. Control always needs it."""

    @classmethod
    def of(cls, host: str, address: str, port: int, key: str) -> Access:
        """Return the rules of a server that was asked to listen on `host` and listens on `address`."""
        if not is_loopback(address):
            return cls(hosts=None, port=port, key=key, needs_key=True)
        hosts = frozenset({_bracketed(name).lower() for name in (host, address)} | set(LOOPBACK_NAMES))
        return cls(hosts=hosts, port=port, key=key, needs_key=False)

    @property
    def cookie(self) -> str:
        """Return the name of the cookie. It has the port, because all servers of a host share their cookies."""
        return f"penstock_dashboard_{self.port}"

    @property
    def cookie_value(self) -> str:
        """Return what the cookie holds: the key itself is in no file of a browser."""
        return hashlib.sha256(f"penstock dashboard {self.key}".encode()).hexdigest()

    def check(self, scope: Scope, *, controls: bool) -> Verdict:
        """Return how a request is allowed. Raises `NoAccess`. `controls`: the request changes something."""
        headers = Headers(scope=scope)
        origins = self._check_host(headers)
        if controls or not _opens_page(scope, headers):
            self._check_origin(headers, origins, controls=controls)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [])
        if given and self._is_key(given[-1]):
            return "by key"
        if hmac.compare_digest(self._cookie_of(headers).encode("utf-8", "replace"), self.cookie_value.encode()):
            return "by cookie"
        if self.needs_key or controls:
            raise NoAccess(
                "the key is missing or wrong: open the address with ?key=… that `penstock dashboard` printed"
            )
        return "open"

    def _check_host(self, headers: Headers) -> set[str]:
        """Return the origins of pages of this server under the name that the request used."""
        given = headers.getlist("host")
        if len(given) == 1:
            host = given[0].lower()
            name, colon, port = host.rpartition(":")
            if not colon or port.endswith("]"):
                name, port = host, ""
            is_port = not port or (port.isascii() and port.isdigit())
            if name and is_port and (self.hosts is None or name in self.hosts):
                return {f"http://{host}"}
        shown, known = ", ".join(given) or "none", sorted(self.hosts or ["this machine"])
        raise NoAccess(f"the Host is {shown}, which is no name of this dashboard: ask for {known[0]}")

    @staticmethod
    def _check_origin(headers: Headers, origins: set[str], *, controls: bool) -> None:
        given = [origin.lower() for origin in headers.getlist("origin")]
        sites = [site.lower() for site in headers.getlist("sec-fetch-site")]
        if any(origin not in origins for origin in given) or any(site not in OWN_SITES for site in sites):
            raise NoAccess("the request comes from a page of another origin: use the pages of the dashboard")
        if controls and not given:
            raise NoAccess("the request has no Origin: use the pages of the dashboard, or `penstock stop`")

    def _cookie_of(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.key.encode())


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser opens a page of the dashboard, perhaps from a link on a page of another origin. That
    page cannot read the answer."""
    kinds = headers.get("sec-fetch-mode", ""), headers.get("sec-fetch-dest", "")
    is_read = scope["method"] == "GET" and not scope["path"].startswith("/api")
    return is_read and kinds == ("navigate", "document") and "origin" not in headers


def cookie_header(access: Access) -> str:
    """Return the value of a `Set-Cookie` header that keeps the key."""
    return f"{access.cookie}={access.cookie_value}; HttpOnly; SameSite=Strict; Path=/"


def with_key(url: str, access: Access) -> str:
    """Return the address to open. It has the key, which control needs even where reading does not."""
    return f"{url}/?{urlencode({'key': access.key})}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
