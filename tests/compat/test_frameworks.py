"""Agents written with frameworks, as the examples have them, with a policy whose tokens are known."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from fake_ports import leased
from openai import AsyncOpenAI
from scripted_policy import ScriptedPolicy
from test_gateway import Always, play
from tool_template import TEMPLATE

from penstock.config import Config, TinyModelConfig, load_config
from penstock.envs.registry import environment_maker
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.environment import Endpoint
from penstock.samples import ROOT, Trajectory
from penstock.types import Sampling, Task

RUN = Path(__file__).parent.parent.parent / "examples" / "frameworks" / "run.yaml"
TASK = Task(task_id="seed/train/0", tag="train", index=0)
SEED, CONTEXT = 7, 16_384
DEMANDED = '<tool_call>\n{"name": "'
"""Beginning of a call that smolagents demands, which is in the prompt."""

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyModelConfig(), CONTEXT)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer.load(directory)


def player(framework: str, game: str) -> Any:
    settings = [f"env.name=examples.frameworks.with_{framework}:Answerer", f"env.options.game={game}"]
    return environment_maker(load_config(RUN, settings).env)(TASK)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(game: str) -> tuple[list[str], str]:
    """Calls of tools, of which the last one tells what is asked, and the answer."""
    if game == "number":
        secret = random.Random(SEED).randint(1, 15)
        return [call("guess", number=secret % 15 + 1), call("guess", number=secret)], f"it is {secret}"
    from examples.frameworks.games import CITIES, NAMES

    rng = random.Random(SEED)
    homes = dict(zip(NAMES, rng.sample(CITIES, len(NAMES)), strict=True))
    name = rng.choice(NAMES)
    return [call("search", words=name)], f"{name} lives in {homes[name]}"


@pytest.mark.parametrize("game", ["number", "retrieval"])
@pytest.mark.parametrize("framework", ["openai_agents", "langgraph", "smolagents"])
async def test_an_unmodified_agent_plays_and_its_tokens_are_those_sampled(
    chat: ChatTokenizer, framework: str, game: str
) -> None:
    said, answer = script(game)
    if framework == "smolagents":
        said = [each.removeprefix(DEMANDED) for each in (*said, call("final_answer", answer=answer))]
    else:
        said = [*said, answer]
    answers = [[*chat.encode_answer(text), chat.eos_ids[0]] for text in said]

    async def agent(llm: Endpoint) -> float:
        return float(await player(framework, game).play(llm, SEED))

    tree = {"env": {"max_turns": 8, "max_new_tokens": 512, "refused_requests": "fail"}}
    trajectory = await play(
        chat,
        ScriptedPolicy(answers),
        agent,
        settings=Config.model_validate(tree | {"model": {"max_context": CONTEXT}}),
        grants=Always(512),
        job=leased(range(1), max_tokens=512, sampling=Sampling(max_new_tokens=512), deadline_s=60.0, env_seed=SEED),
    )
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 1.0, None)
    assert [turn.token_ids for turn in trajectory.turns] == answers
    if framework == "smolagents":  # it rewrites its history after each step
        assert [turn.parent for turn in trajectory.turns] == [ROOT] * len(answers)
    else:
        assert len(trajectory.branches()) == 1
    for turn, text in zip(trajectory.turns, said, strict=True):
        assert chat.decode(turn.token_ids) == text


async def plays(
    chat: ChatTokenizer, example: str, policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> Trajectory:
    """One episode of an agent in `examples/agent`. Its client's connections end with it."""
    config = load_config(RUN.parent.parent / "agent" / f"{example}.yaml")
    player = environment_maker(config.env)(TASK)

    async def agent(llm: Endpoint) -> float:
        return float(await player.play(llm, SEED))

    job = leased(range(1), max_tokens=4, sampling=Sampling(max_new_tokens=4), deadline_s=60.0, env_seed=SEED)
    async with AsyncOpenAI(base_url="http://unused", api_key="unused") as client:
        monkeypatch.setattr(f"examples.agent.{example}.CLIENT", client)
        credit = getattr(player, "credit", None)
        return await play(chat, policy, agent, settings=config, grants=Always(4), job=job, credit=credit)


async def test_a_compacting_agent_has_a_branch_for_each_question(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(prompt: list[int], seed: int) -> list[int]:
        low, high = map(int, re.findall(r"\d+", chat.decode(prompt)))
        return [*chat.encode(str((low + high) // 2)), chat.eos_ids[0]]

    trajectory = await plays(chat, "compacting", ScriptedPolicy(halve), monkeypatch)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert {turn.parent for turn in trajectory.turns} == {ROOT} and len(trajectory.turns) > 1


async def test_each_debater_has_a_branch_of_its_own(chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is right from the beginning; the other one takes the larger number over."""
    first: list[str] = []

    def answer(prompt: list[int], seed: int) -> list[int]:
        numbers = re.findall(r"\d+", chat.decode(prompt))
        if len(numbers) == 2:
            first.append(min(numbers) if first else max(numbers))
        said = first[-1] if len(numbers) == 2 else max(numbers)
        return [*chat.encode(said), chat.eos_ids[0]]

    trajectory = await plays(chat, "debate", ScriptedPolicy(answer), monkeypatch)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert sorted(turn.parent or 0 for turn in trajectory.turns) == [ROOT, ROOT, 0, 1]
    assert [len(branch) for branch in trajectory.branches()] == [2, 2]
    assert [sample.credit for sample in trajectory.formulate("branches")] == [(1.0, "")] * 2
