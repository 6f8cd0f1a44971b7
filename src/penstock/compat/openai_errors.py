"""Errors of the OpenAI API, and what all dialects tell of an error."""

from __future__ import annotations

from starlette.responses import Response

from penstock.compat import openai_wire as wire
from penstock.rollout import http
from penstock.rollout.request import ContextExceeded

RETRYABLE = (408, 409, 429, 503)
"""Statuses of errors for which a retry may succeed."""
CODES = {401: "invalid_api_key"}
INVALID = "invalid_request_error"
MAX_SHOWN = 100
"""Characters of a value that an error shows."""


class NoSuchModel(http.Refused):
    """The requested name is not the name of the only model."""


CONTEXT_EXCEEDED = "context_length_exceeded"
ERROR_CODES = {NoSuchModel: "model_not_found", ContextExceeded: CONTEXT_EXCEEDED}


def refuse(error: Exception) -> Response:
    """Return an error in OpenAI's format. A header tells OpenAI's SDK whether a retry may succeed."""
    status = http.status_of(error)
    response = http.answer(error_reply(error), status)
    response.headers["x-should-retry"] = should_retry(error)
    return response


def should_retry(error: Exception) -> str:
    """Return what a header tells the official SDKs: whether a retry may succeed."""
    return "true" if http.status_of(error) in RETRYABLE else "false"


def error_reply(error: Exception) -> wire.OpenAIError:
    status = http.status_of(error)
    kind, code = INVALID if status < 500 else "server_error", code_of(error) or CODES.get(status)
    return wire.OpenAIError(error=wire.OpenAIErrorDetails(message=str(error), type=kind, code=code))


def short(value: object) -> str:
    """Return the beginning of a value that a client has sent."""
    return repr(value)[:MAX_SHOWN]


def code_of(error: Exception) -> str | None:
    """Return OpenAI's code for an error; None if it has none."""
    return next((code for kind, code in ERROR_CODES.items() if isinstance(error, kind)), None)
