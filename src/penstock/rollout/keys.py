"""Who may call what: one key for those who generate, another for whoever controls the server."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from starlette.requests import Request

from penstock.config.schema import RolloutConfig
from penstock.rollout.http import Access, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What `Authorization: Bearer` must carry, as SGLang does it: without an `admin` key the `generation` key controls
    too; with one it is needed for control, and good for everything. What has no key is open."""

    generation: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Keys:
        """Those of a run's servers."""
        return cls(generation=rollout.api_key or None, admin=rollout.admin_api_key or None)

    def check(self, access: Access, request: Request) -> None:
        """Raises Refused with status 401."""
        accepted = self.accepted(access)
        if not accepted:
            return
        given = bearer(request.headers.get("authorization", "")).encode("latin-1")
        if not any(hmac.compare_digest(given, key.encode()) for key in accepted):
            which = "admin API key" if access == "control" and self.admin is not None else "API key"
            raise Refused(401, f"missing or wrong {which}", {"WWW-Authenticate": "Bearer"})

    @property
    def open(self) -> bool:
        """Whether whoever can reach the server may do everything."""
        return not self.generation and not self.admin

    def accepted(self, access: Access) -> list[str]:
        """Any of these will do; empty where none is needed."""
        if access == "everybody" or (access == "generation" and self.generation is None):
            return []
        control = self.admin if self.admin is not None else self.generation
        keys = {control} if access == "control" else {self.generation, control}
        return [key for key in keys if key is not None]


def bearer(authorization: str) -> str:
    """The key in a header; "" if it carries none. The scheme's case does not matter."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
