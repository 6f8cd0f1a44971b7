"""The server's own description of itself, and what a fuzzer makes of it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tiny_policy import serve

from penstock.rollout.app import ApiKeys
from penstock.rollout.runner import EngineRunner
from penstock.types import NO_VERSION

CHECKS = [
    negative_data_rejection,
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
EXAMPLES = 20
LAST = ["/update_weight_version", "/weights/forget"]
"""What is served has no name afterwards, or another one: nothing is generated any more."""


async def test_every_path_is_described_with_what_it_reads_and_answers(url: str) -> None:
    async with aiohttp.ClientSession(url) as session, session.get("/openapi.json") as response:
        schema = await response.json()
    paths = schema["paths"]
    assert {"/generate", "/weights/begin", "/v1/chat/completions", "/pause_generation", "/metrics"} <= paths.keys()
    body = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GenerateBody"}
    assert "temperature" in schema["components"]["schemas"]["SamplingBody"]["properties"]
    assert paths["/generate"]["post"]["security"] == []


async def test_what_needs_a_key_is_described_so(runner: EngineRunner) -> None:
    headers = {"Authorization": "Bearer secret"}
    async with serve(runner, keys=ApiKeys(generation="secret")) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/openapi.json") as response:
            assert response.status == 401
        async with session.get("/openapi.json", headers=headers) as response:
            paths = (await response.json())["paths"]
    assert paths["/health"]["get"]["security"] == []
    assert paths["/generate"]["post"]["security"] == [{"key": []}]


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("last", [False, True])
async def test_a_fuzzer_that_reads_the_description_breaks_nothing(url: str, last: bool) -> None:
    def fuzz() -> list[str]:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        failed = []
        operations = [found.ok() for found in schema.get_all_operations()]
        operations = [operation for operation in operations if (operation.path in LAST) == last]
        operations.sort(key=lambda operation: LAST.index(operation.path) if last else 0)
        for operation, mode in itertools.product(operations, schemathesis.GenerationMode):

            @hypothesis.settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def play(case: Any) -> None:
                case.call_and_validate(checks=CHECKS, timeout=20)

            try:
                play()
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing about this operation can be wrong
            except (Exception, BaseExceptionGroup) as error:
                failed.append(f"{operation.label} {mode}: {error}"[:1500])
        return failed

    failed = await asyncio.to_thread(fuzz)
    assert not failed, "\n\n".join(failed)
    async with aiohttp.ClientSession(url) as session, session.get("/ready") as response:
        assert (await response.json())["policy_version"] == (NO_VERSION if last else 0)
