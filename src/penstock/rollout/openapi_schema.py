"""An OpenAPI 3.1 description of the server, built from its routes and the types of their bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

import penstock
from penstock.rollout.app import ApiKeys
from penstock.rollout.http import Route

REFERENCE = "#/components/schemas/{name}"
STREAMS: dict[str, Any] = {"text/event-stream": {}}


def openapi(routes: Iterable[Route], keys: ApiKeys) -> dict[str, Any]:
    """Return the OpenAPI description. It omits routes without methods and marks routes that need one of `keys`."""
    shown = [route for route in routes if route.methods]
    named = [(route.body, route.reply, route.error, *route.query.values()) for route in shown]
    kinds = [kind for kinds in named for kind in kinds if kind is not None]
    found, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schemas = dict(zip(map(repr, kinds), found, strict=True))
    paths: dict[str, Any] = {}
    for route in shown:
        for method in route.methods:
            operation = _operation(route, method, schemas)
            operation["security"] = [{"key": []}] if keys.accepted(route.access) else []
            paths.setdefault(route.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock rollout server", "version": penstock.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").split("\n\n")[0]
    content = {"text/plain": {}} if route.reply is None else _json(schemas[repr(route.reply)])
    refused = _json(schemas[repr(route.error)]) | (content if route.reply is None else {})
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path}",
        "summary": " ".join(summary.split()),
        "responses": {
            "200": {"description": "Done.", "content": content | (STREAMS if route.streams else {})},
            "default": {"description": "Refused or failed.", "content": refused},
        },
    }
    places = [(name, "query", schemas[repr(kind)]) for name, kind in route.query.items()]
    if "{" in route.path:
        places.append((route.path.partition("{")[2].rstrip("}"), "path", {"type": "string"}))
    operation["parameters"] = [
        {"name": name, "in": place, "required": place == "path", "schema": schema} for name, place, schema in places
    ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[repr(route.body)])}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
