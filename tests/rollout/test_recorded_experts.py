"""The engine records the experts that computed each token, and clients bring the record home."""

from __future__ import annotations

import base64
import dataclasses
import io
import logging
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from expert_policy import NUM_CHOSEN, NUM_EXPERTS, NUM_LAYERS, WIDTH, chosen_by, expert_model
from tiny_policy import make_engine, make_request, run, serve, sharing_blocks

from penstock.model.experts import expert_layers
from penstock.rollout import admission, bodies, vllm_client
from penstock.rollout.client import RolloutClient, ServerClient
from penstock.rollout.request import GenerateRequest
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import Servers
from penstock.rollout.session import HttpSession
from penstock.rollout.sglang_client import SGLangClient
from penstock.rollout.slot_engine import Finished, SlotEngine
from penstock.routed_experts import Routing, to_wire
from penstock.samples import Segment, Trajectory, Turn, num_routed
from penstock.types import EpisodeId, Sampling, SegmentGrant

MAX_CONTEXT = 96
PROMPT = [5, 9, 11, 7, 30]
ROUTING = Routing(NUM_EXPERTS, NUM_LAYERS, NUM_CHOSEN)
"""As config.json tells it: the first layer might have experts too."""


def expert_engine(dtype: torch.dtype = torch.float32) -> SlotEngine:
    model = expert_model().to(dtype)
    return SlotEngine(model, num_slots=8, max_context=MAX_CONTEXT, policy_version=0)


def asked(rid: str, prompt: list[int], *, start: int | None = 0, **further: Any) -> GenerateRequest:
    return dataclasses.replace(make_request(rid, prompt, **further), routed_from=start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_record_is_what_a_plain_pass_chooses(dtype: torch.dtype) -> None:
    engine = expert_engine(dtype)
    prompts = [PROMPT, [*PROMPT, 3, 3], [8]]
    found = run(engine, *(asked(str(number), prompt, seeds=(1, 2)) for number, prompt in enumerate(prompts)))
    num_same = num_all = 0
    for number, prompt in enumerate(prompts):
        for segment in found[str(number)]:
            fed = prompt + segment.token_ids[:-1]
            assert segment.experts is not None and segment.experts.shape == (len(fed), WIDTH)
            assert segment.experts.dtype == np.uint8
            same = segment.experts == chosen_by(engine.model, fed)
            num_same, num_all = num_same + int(same.sum()), num_all + same.size
    if dtype == torch.float32:
        assert num_same == num_all
    assert num_same > 0.9 * num_all, "in half precision near-ties fall as they like"


@pytest.mark.parametrize("shares_blocks", [False, True])
def test_a_prompt_that_comes_while_others_decode_has_its_own_record(shares_blocks: bool) -> None:
    with sharing_blocks(16) if shares_blocks else nullcontext():
        engine = expert_engine()
        engine.submit(asked("first", PROMPT, max_new_tokens=8))
        engine.step()
        late = [8, 2, 9, 9, 3, 5]
        (finished,) = [each for each in run_all(engine, asked("late", late)) if each.request.rid == "late"]
    check_record(engine, late, finished.segments[0])


def run_all(engine: SlotEngine, request: GenerateRequest) -> list[Finished]:
    """Play a request and all that are running."""
    finished = engine.submit(request)
    while engine.has_work:
        finished += engine.step()
    return finished


def test_only_what_is_asked_for_is_recorded() -> None:
    engine = expert_engine()
    found = run(engine, asked("all", PROMPT), asked("late", PROMPT, start=3), asked("none", PROMPT, start=None))
    (whole,), (late,), (none,) = (found[rid] for rid in ("all", "late", "none"))
    assert whole.experts is not None and late.experts is not None and none.experts is None
    np.testing.assert_array_equal(late.experts, whole.experts[3:])
    assert whole.token_ids == none.token_ids, "a record changes no token"
    assert none.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_no_hook_stays_on_the_model() -> None:
    engine = expert_engine()
    run(engine, asked("all", PROMPT))
    assert not any(layer.experts._forward_pre_hooks for layer in expert_layers(engine.model))


def test_tokens_that_are_computed_again_keep_their_first_record() -> None:
    engine = expert_engine()
    before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    engine.submit(asked("a", PROMPT, max_new_tokens=8))
    for _ in range(4):
        engine.step()
    (sequence,) = engine.sequences("a")
    first = PROMPT + sequence.token_ids[:-1]
    wanted = chosen_by(engine.model, first)
    torch.manual_seed(1)
    engine.load_weights({name: parameter + torch.randn_like(parameter) for name, parameter in before.items()}, 1)
    engine.retract()
    finished = []
    while engine.has_work:
        finished += engine.step()
    (segment,) = finished[0].segments
    fed = PROMPT + segment.token_ids[:-1]
    assert segment.experts is not None and len(segment.experts) == len(fed)
    np.testing.assert_array_equal(segment.experts[: len(first)], wanted)
    later = chosen_by(engine.model, fed)
    np.testing.assert_array_equal(segment.experts[len(first) :], later[len(first) :])
    assert (later[: len(first)] != wanted).any()


LONG = [(7 * place) % 60 + 2 for place in range(40)]
"""More than two blocks of the prefix cache."""


def check_record(engine: SlotEngine, prompt: list[int], segment: Segment, start: int = 0) -> None:
    assert segment.experts is not None
    wanted = chosen_by(engine.model, prompt + segment.token_ids[:-1])[start:]
    np.testing.assert_array_equal(segment.experts, wanted)


def served(engine: SlotEngine, request: GenerateRequest) -> tuple[Segment, int]:
    """The only sample, and how many tokens of its prompt were reused."""
    engine.submit(request)
    finished, num_reused = [], 0
    while engine.has_work:
        finished += engine.step()
        num_reused += engine.num_reused
    (segment,) = finished[0].segments
    return segment, num_reused


@pytest.mark.parametrize("budget", [16, 4096])
def test_reused_tokens_keep_the_record_of_the_pass_that_computed_them(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(admission, "PREFILL_TOKENS", budget)
    engine = expert_engine()
    first, num_reused = served(engine, asked("first", LONG))
    assert num_reused == 0
    check_record(engine, LONG, first)
    turn = [*LONG, *first.token_ids, 5, 9]
    for start in (0, 20, len(turn) - 3):
        second, num_reused = served(engine, asked("second", turn, start=start))
        assert num_reused >= 32
        check_record(engine, turn, second, start)


def test_tokens_without_a_record_are_computed_again_for_one_that_is_asked_for() -> None:
    engine = expert_engine()
    served(engine, asked("none", LONG, start=None))
    late, num_reused = served(engine, asked("late", LONG, start=36))
    assert num_reused == 32, "a record of the reused tokens is not asked for"
    check_record(engine, LONG, late, 36)
    for rid, expected in (("all", 0), ("again", 32)):
        segment, num_reused = served(engine, asked(rid, LONG))
        assert num_reused == expected
        check_record(engine, LONG, segment)


def test_a_record_of_older_weights_is_not_reused() -> None:
    engine = expert_engine()
    engine.submit(asked("a", LONG, max_new_tokens=30))
    for _ in range(4):
        engine.step()
    torch.manual_seed(1)
    engine.load_weights({name: each + torch.randn_like(each) for name, each in engine.model.named_parameters()}, 1)
    engine.retract()
    finished = []
    while engine.has_work:
        finished += engine.step()
    turn = LONG + finished[0].segments[0].token_ids
    segment, num_reused = served(engine, asked("b", turn, max_new_tokens=4))
    assert num_reused >= 32, "the prompt was computed again, with a record"
    check_record(engine, turn, segment)


def test_an_aborted_sample_has_the_record_so_far() -> None:
    engine = expert_engine()
    engine.submit(asked("a", PROMPT, max_new_tokens=8))
    for _ in range(3):
        engine.step()
    (segment,) = engine.abort(["a"])[0].segments
    assert segment.experts is not None and len(segment.experts) == len(PROMPT) + 2
    engine.submit(asked("b", PROMPT))
    assert engine.abort(["b"])[0].segments[0].experts is None


def test_a_dense_model_records_nothing() -> None:
    (segment,) = run(make_engine(), asked("a", PROMPT))["a"]
    assert segment.experts is None


@pytest.mark.parametrize("start", [-1, len(PROMPT) + 1])
def test_a_start_outside_of_the_prompt_is_refused(start: int) -> None:
    with pytest.raises(ValueError, match="routed_experts_start_len"):
        expert_engine().check(asked("a", PROMPT, start=start))


@pytest.fixture
async def expert_url() -> AsyncIterator[str]:
    runner = EngineRunner(expert_engine(), process="rollout-0")
    runner.start()
    async with serve(runner) as url:
        yield url
    await runner.stop()


@pytest.fixture
async def session() -> AsyncIterator[HttpSession]:
    session = HttpSession()
    yield session
    await session.close()


def grants(count: int, max_tokens: int = 6) -> list[SegmentGrant]:
    return [SegmentGrant(episode=EpisodeId("t", 0, member, 0), max_tokens=max_tokens) for member in range(count)]


async def generated(
    client: ServerClient | Servers, prompt: list[int], *, count: int = 2, start: int | None = 0
) -> list[Segment]:
    return await client.generate(prompt, grants(count), Sampling(routed_from=start), list(range(count)))


def wanted_of(prompt: list[int], segment: Segment, start: int) -> np.ndarray[Any, Any]:
    return chosen_by(expert_model(), prompt + segment.token_ids[:-1])[start:]


@pytest.mark.parametrize("kind", [RolloutClient, SGLangClient])
@pytest.mark.parametrize("start", [0, 3])
async def test_clients_bring_the_record_home(
    kind: type[ServerClient], start: int, expert_url: str, session: HttpSession
) -> None:
    client = kind(expert_url, session)
    for segment in await generated(client, PROMPT, start=start):
        assert segment.experts is None, "nobody wants it"
    client.routing = ROUTING
    for segment in await generated(client, PROMPT, start=start):
        assert segment.experts is not None and segment.experts.dtype == np.uint8
        np.testing.assert_array_equal(segment.experts, wanted_of(PROMPT, segment, start))
    for segment in await generated(client, PROMPT, start=None):
        assert segment.experts is None


async def test_two_turns_of_two_segments_have_the_record_of_each_token(expert_url: str) -> None:
    servers = Servers([expert_url], routing=ROUTING)
    turns, context, asked_for = list[Turn](), list[int](), list[int]()
    for observation in ([5, 9, 11], [40, 41]):
        turn = Turn(observation_ids=observation, segments=[])
        context += observation
        for _ in range(2):
            asked_for.append(num_routed([*turns, turn]))
            (segment,) = await generated(servers, context, count=1, start=asked_for[-1])
            assert segment.experts is not None
            assert len(segment.experts) == len(context) + len(segment.token_ids) - 1 - asked_for[-1]
            turn.segments.append(segment)
            context += segment.token_ids
        turns.append(turn)
    await servers.close()
    assert asked_for == sorted(set(asked_for)), "nothing is sent twice"
    episode = EpisodeId("t", 0, 0, 0)
    sample = Trajectory(episode=episode, task_id="t", turns=turns, reward=0.0, status="completed").flatten()
    assert sample.experts is not None
    np.testing.assert_array_equal(sample.experts[:-1], chosen_by(expert_model(), context[:-1]))


@pytest.mark.parametrize("kind", [RolloutClient, SGLangClient])
async def test_a_server_without_experts_is_told_of_once(
    kind: type[ServerClient], url: str, session: HttpSession, caplog: pytest.LogCaptureFixture
) -> None:
    client = kind(url, session)
    client.routing = ROUTING
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert all(segment.experts is None for segment in await generated(client, PROMPT))
    assert len([record for record in caplog.records if "returns no experts" in record.getMessage()]) == 1


async def test_the_form_is_that_of_sglang(expert_url: str, session: HttpSession) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
    }
    reply = msgspec.json.decode(await session.send("POST", expert_url, "/generate", body))
    meta, num_rows = reply["meta_info"], len(PROMPT) + 4 - 1 - 2
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    assert "routed_experts_dtype" not in meta
    fed = PROMPT + reply["output_ids"][:-1]
    np.testing.assert_array_equal(experts.reshape(num_rows, WIDTH), chosen_by(expert_model(), fed)[2:])
    plain = msgspec.json.decode(
        await session.send("POST", expert_url, "/generate", {**body, "return_routed_experts": False})
    )
    assert not any(name.startswith("routed") for name in plain["meta_info"])


def test_a_request_for_no_record_is_sent_as_before() -> None:
    assert b"routed" not in bodies.encode(bodies.GenerateBody(input_ids=[1], return_text=False))


class OtherReplies(HttpSession):
    """A server that answers with one token and this record."""

    def __init__(self, record: str | None, dtype: str | None = None) -> None:
        super().__init__()
        self._record, self._dtype = record, dtype

    async def call(self, *words: Any, **further: Any) -> Any:
        meta = bodies.SampledMeta(
            finish_reason=bodies.Length(1),
            weight_versions=[bodies.WeightSpan("0", 0, 1)],
            output_token_logprobs=[(-1.0, 7, None)],
            routed_experts=self._record,
            routed_experts_dtype=self._dtype,
        )
        return [bodies.SampledReply(output_ids=[7], meta_info=meta)]


def numbers(*shape: int, dtype: Any = np.int32) -> str:
    return base64.b64encode(np.zeros(shape, dtype=dtype).tobytes()).decode()


@pytest.mark.parametrize(
    ("record", "dtype", "is_taken"),
    [
        (numbers(5, WIDTH), None, True),
        (numbers(5, WIDTH, dtype=np.uint8), "uint8", True),
        (numbers(5, WIDTH + 2, dtype=np.uint16), "uint16", True),
        (numbers(5, WIDTH + 3), None, False),
        (numbers(4, WIDTH - 1), None, False),
        ("no base64", None, False),
        (numbers(5, WIDTH), "float32", False),
        (None, None, False),
    ],
)
async def test_only_a_record_of_the_right_form_is_taken(record: str | None, dtype: str | None, is_taken: bool) -> None:
    client = SGLangClient("http://other", OtherReplies(record, dtype))
    client.routing = ROUTING
    (segment,) = await generated(client, PROMPT, count=1)
    assert segment.token_ids == [7], "a wrong record loses no answer"
    assert (segment.experts is not None) == is_taken
    if segment.experts is not None:
        assert segment.experts.dtype == np.uint8 and len(segment.experts) == 5


class AsVllm(HttpSession):
    """vLLM, which returns the record of all tokens but the last one, or from where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[int | None] = []
        self.seeds: list[int | None] = []

    async def call(self, method: str, url: str, path: str, body: Any, *words: Any, **further: Any) -> Any:
        start = body["sampling_params"].get("routed_experts_prompt_start")
        self.starts.append(start)
        self.seeds.append(body["sampling_params"].get("seed"))
        rows = np.arange(len(body["token_ids"]) * WIDTH, dtype=np.uint8).reshape(-1, WIDTH // 2, 2) % NUM_EXPERTS
        file = io.BytesIO()
        np.save(file, rows[start or 0 :])
        choice = vllm_client.Choice(
            index=0,
            finish_reason="length",
            token_ids=[7],
            logprobs=vllm_client.Logprobs([vllm_client.Logprob(-1.0)]),
            weight_versions=[bodies.WeightSpan("0", 0, 1)],
            routed_experts=base64.b64encode(file.getvalue()).decode(),
        )
        return vllm_client.Generated([choice])


async def test_the_record_of_vllm_is_asked_for_from_the_first_unknown_token_on() -> None:
    session = AsVllm()
    client = vllm_client.VllmClient("http://other", session)
    client.routing = ROUTING
    for start in (0, 2, 3):
        (segment,) = await generated(client, PROMPT, count=1, start=start)
        wanted = np.arange(len(PROMPT) * WIDTH).reshape(-1, WIDTH)[start:] % NUM_EXPERTS
        np.testing.assert_array_equal(segment.experts, wanted)
    assert session.starts == [None, 2, 3]


@pytest.mark.parametrize("seeded", [False, True])
async def test_vllm_gets_a_seed_only_if_asked_for(seeded: bool) -> None:
    session = AsVllm()
    client = vllm_client.VllmClient("http://other", session)
    client.seeded = seeded
    await generated(client, PROMPT, count=2, start=0)
    assert [seed is not None for seed in session.seeds] == [seeded] * 2
    assert client.update_mode == "in_place"


def test_the_wire_of_a_record_is_as_small_as_it_can_be() -> None:
    rows = np.zeros((100, 384), dtype=np.uint8)
    assert len(to_wire(rows, compacted=True)) == 4 * 100 * 384 // 3
