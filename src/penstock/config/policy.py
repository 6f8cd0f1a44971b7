"""Settings of the policy that plays: the run's own model, or one that is not trained here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from penstock.config.section import Section

OF_ENDPOINTS = ("base_url", "model", "options")


class PolicyConfig(Section):
    """The policy that plays. All but `model` are for `penstock rollout` and `penstock eval`, and start no server."""

    name: Literal["model", "openai", "random"] = "model"
    """`model`: the model at `model.path`. `openai`: a model behind an endpoint of the OpenAI API (chat completions),
    for example a teacher. `random`: random words, and random calls of tools, without a model, to try an environment at
    scale."""
    base_url: str | None = None
    """Address of the endpoint, as its clients take it: `https://api.openai.com/v1`."""
    model: str | None = None
    """Name of the endpoint's model."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key of the endpoint. If it is not set, requests have no key."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, for example `reasoning_effort`. They replace the run's own fields. null leaves a
    field out: `{max_tokens: null, max_completion_tokens: 4096}`."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit in seconds of one request. The limits of the episode apply too."""
    max_retries: int = Field(8, ge=0)
    """Number of retries of a request that the endpoint puts off (429) or fails (5xx, no answer)."""

    @property
    def has_tokens(self) -> bool:
        """Return whether the policy has tokens and log-probabilities. Another one only has messages."""
        return self.name == "model"

    def contradictions(self) -> Iterator[str]:
        if self.name == "openai":
            for name in ("base_url", "model"):
                if not getattr(self, name):
                    yield f"name openai needs {name}: set policy.{name}"
            if self.base_url and not self.base_url.startswith(("http://", "https://")):
                yield f"base_url {self.base_url!r} does not begin with http:// or https://"
        for name in OF_ENDPOINTS if self.name != "openai" else ():
            if getattr(self, name):
                yield f"{name} is for name openai, not for {self.name}"
