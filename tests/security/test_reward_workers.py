"""What a reward worker can get at, and what its answers can do to the run."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.preflight import check_sandbox
from penstock.cli.refusal import Refused
from penstock.config import Config, ConfigError
from penstock.envs.calls import check_reward
from penstock.envs.dialogue import EpisodeFailure
from penstock.envs.registry import needs_sandbox
from penstock.envs.rewards import reward_box
from penstock.envs.rewards.reward import RewardResult
from penstock.envs.rewards.reward_box import check_reward_box
from penstock.envs.rewards.scorer import RewardFailure, Scorer, Scorers
from penstock.sandbox import SandboxUnavailable, confinement


class Curious:
    """Does what the answer asks for."""

    def score(self, answer: str, payload: Mapping[str, Any]) -> Any:
        what, _, argument = answer.partition(" ")
        match what:
            case "reads":
                return float(len(Path(argument).read_bytes()))
            case "connects":
                socket.create_connection(("127.0.0.1", int(argument)), 2).close()
            case "environment":
                return float(argument in os.environ)
            case "sees":
                return float(os.path.exists(f"/proc/{argument}"))  # noqa: PTH110
            case "stops":
                raise ConfigError("stop")
            case "many":
                return RewardResult(reward=1.0, parts={f"part{argument}_{number}": 1.0 for number in range(60)})
            case "names":
                return RewardResult(reward=1.0, parts={"\x1b[2J": 1.0})
            case "escapes":
                raise ValueError("\x1b]0;title\x07" + "x" * 100_000)
            case "earns":
                return float(argument)
            case "exits":
                os._exit(int(argument))
            case "signals":
                os.kill(os.getpid(), int(argument))
            case "returns":
                return [0] * int(argument)
            case "allocates":
                return float(len(bytearray(8 << 30)))
        return 1.0


class Free(Curious):
    """Says that it needs more."""

    confined = False


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Return a file that every user may read."""
    file = tmp_path / "secret"
    file.write_text("x")
    file.chmod(0o666)
    tmp_path.chmod(0o777)
    return file


def closed_folder(outer: Path, *, beside: bool) -> tuple[Path, Path]:
    """Return a folder with a package and secrets, and a reward in it or, if not `beside`, above it."""
    folder = Path(tempfile.mkdtemp(dir=outer))
    reward = (folder if beside else outer) / f"reward_{folder.name}.py"
    (folder / "__init__.py").write_text("")
    (folder / "aside.py").write_text("GIVEN = 3.0")
    for name in ("keys.json", "run/config.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    imported = "aside" if beside else f"{folder.name}.aside"
    reward.write_text(
        f"import os\nfrom {imported} import GIVEN\n"
        "def score(answer, payload):\n"
        "    if answer == 'writes':\n"
        "        os.rename(__file__, __file__ + 'x')\n"
        "    seen = [name for _, folders, names in os.walk(answer) for name in (*folders, *names)]\n"
        "    return GIVEN + (10 if {'keys.json', 'run', 'config.yaml'} & {*seen} else 0)\n"
    )
    folder.chmod(0o700)
    reward.chmod(0o600)
    return folder, reward


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
@pytest.mark.parametrize("place", ["folder", "/tmp", "/dev/shm"])
async def test_a_reward_worker_sees_the_python_files_of_its_folder_and_nothing_else(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that other programs have in /tmp and /dev/shm are left out, because they could be too many."""
    folder, reward = closed_folder(tmp_path if place == "folder" else Path(place), beside=place == "folder")
    listed = reward_box._python_files
    monkeypatch.setattr(
        reward_box, "_python_files", lambda where: (path for path in listed(where) if folder.name in str(path))
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = Config.model_validate({"env": {"reward": f"{reward}:score", "reward_timeout_s": 20.0}})
    try:
        check_sandbox(config)
        async with aclosing(Scorers(config)) as scorers:
            scorer = scorers.of(config.env, {})
            assert scorer is not None
            assert await scorer.score(str(folder), {}, waiter="t") == 3.0
            assert "Error: [Errno " in await failure(scorer, "writes")
    finally:
        reward.unlink()
        shutil.rmtree(folder)


def test_a_reward_beside_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.envs.rewards.reward_box.MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"file{number}.py").write_text("def score(answer, payload): return 1.0")
    with pytest.raises(ConfigError, match=r"more than 3 Python files.*a folder of its own"):
        check_reward_box(f"{tmp_path}/file0.py:score")


@pytest.mark.skipif(os.getuid() != 0, reason="only the boxes of root have other users")
@pytest.mark.usefixtures("sandboxed")
def test_packages_that_the_user_of_a_box_cannot_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir(mode=0o700)
    monkeypatch.setattr("penstock.envs.rewards.reward_box.PACKAGES", (tmp_path / "packages",))
    with pytest.raises(ConfigError, match=r"env.reward 'math': .* cannot read .*/packages: chmod o\+rX"):
        check_sandbox(config_of(env={"reward": "math"}))


@asynccontextmanager
async def scorer_of(reward: str) -> AsyncIterator[Scorer]:
    config = Config.model_validate({"env": {"reward": f"{__name__}:{reward}", "reward_timeout_s": 20.0}})
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        assert scorer is not None
        yield scorer


async def failure(scorer: Scorer, answer: str) -> str:
    with pytest.raises(RewardFailure) as raised:
        await scorer.score(answer, {}, waiter="t")
    return str(raised.value)


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_a_reward_worker_gets_at_nothing(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"connects {server.getsockname()[1]}"
        async with scorer_of("Curious") as scorer:
            assert await scorer.score("environment SECRET_KEY", {}, waiter="t") == 0.0
            for answer in (f"reads {secret}", "reads /etc/shadow", connects):
                reason = await failure(scorer, answer)
                assert "runs in a sandbox" in reason and "confined = False" in reason
            assert "MemoryError" in await failure(scorer, "allocates")
        async with scorer_of("Free") as scorer:
            assert await scorer.score(f"reads {secret}", {}, waiter="t") == 1.0
            assert await scorer.score(connects, {}, waiter="t") == 1.0


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_what_a_reward_worker_says_has_limits(caplog: pytest.LogCaptureFixture) -> None:
    async with scorer_of("Curious") as scorer:
        assert "stop" in await failure(scorer, "stops")
        assert "printable names" in await failure(scorer, "names")
        said = await failure(scorer, "escapes")
        assert said.startswith("ValueError: \\x1b]0;title\\x07xxx") and len(said) < 20_000
        await scorer.score("many 1", {}, waiter="t")
        await scorer.score("many 2", {}, waiter="t")
        assert await scorer.score("many 3", {}, waiter="t") == await scorer.score("many 4", {}, waiter="t") == 1.0
        assert len([name for name in scorer.counts if name.startswith("reward_")]) == 128
        assert scorer.counts["reward_part1_0"] == 1.0 and scorer.counts["scored"] == 4
    assert [record.message for record in caplog.records if "different parts" in record.message] == [
        f"reward {__name__}:Curious has over 128 different parts: the others have no counter"
    ]


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "reason"),
    [("exits 200", "signal 72"), ("signals 35", "signal 35"), ("signals 9", "SIGKILL")],
)
@pytest.mark.parametrize("reward", ["Curious", "Free"])
async def test_the_end_of_a_worker_fails_no_other_answer(reward: str, answer: str, reason: str) -> None:
    if (reward, answer) == ("Free", "exits 200"):
        reason = "exit 200"
    async with scorer_of(reward) as scorer:
        for _ in range(2):
            assert reason in await failure(scorer, answer)
            assert await scorer.score("x", {}, waiter="t") == 1.0
        assert reason in await failure(scorer, answer)


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_an_answer_of_a_confined_worker_is_small() -> None:
    async with scorer_of("Curious") as scorer:
        told = await failure(scorer, f"returns {1 << 20}")
        assert "the reward is [0, 0, 0" in told and len(told) < 3000
        assert await scorer.score("x", {}, waiter="t") == 1.0


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_no_reward_is_beyond_a_million() -> None:
    async with scorer_of("Curious") as scorer:
        assert await scorer.score("earns -1e6", {}, waiter="t") == -1e6
        assert "not a number from -1000000 to 1000000" in await failure(scorer, "earns 1.7e308")
    with pytest.raises(EpisodeFailure, match="not a number from"):
        check_reward(-1e7)


def config_of(**settings: Any) -> Config:
    return Config.model_validate(settings)


def reasons(config: Config) -> list[str]:
    return [each for key, settings in config.environments.by_key.items() for each in needs_sandbox(key, settings)]


SUMMING = {"dataset": "composite", "options": {"datasets": [{"name": "gcd"}, {"name": "puzzle24"}]}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"data": {"dataset": "gcd"}}, []),
        ({"data": {"dataset": "countdown"}}, ["data.dataset countdown"]),
        ({"data": SUMMING}, ["data.dataset puzzle24"]),
        ({"data": {"dataset": "countdown"}, "env": {"reward": "format"}}, []),
        ({"env": {"reward": "math"}}, ["env.reward math"]),
        ({"env": {"reward": "code"}}, ["env.reward code"]),
        ({"env": {"reward": "judge"}}, []),
        ({"env": {"reward": f"{__file__}:Curious"}}, [f"env.reward {__file__}:Curious"]),
        ({"env": {"reward": f"{__file__}:Free"}}, []),
        (
            {"env": {"mixture": {"a": {}, "b": {"data": {"dataset": "n_queens"}}}}},
            ["env.mixture.b.data.dataset n_queens"],
        ),
    ],
)
def test_what_needs_a_sandbox(settings: dict[str, Any], expected: list[str]) -> None:
    assert [
        each.partition(":" if ".py" not in each else ": it")[0] for each in reasons(config_of(**settings))
    ] == expected


def test_a_run_without_a_sandbox_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> str:
        raise SandboxUnavailable("no sandbox: set env.sandbox: none")

    monkeypatch.setattr("penstock.cli.preflight.confinement", unavailable)
    check_sandbox(config_of())
    with pytest.raises(SandboxUnavailable, match=r"data\.dataset countdown: .*env\.sandbox: none"):
        check_sandbox(config_of(data={"dataset": "countdown"}))


@pytest.mark.parametrize("family", ["rg", "math", "code", "eval"])
def test_a_gem_environment_that_executes_answers_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SANDBOX", "auto")
    with pytest.raises(Refused, match=f"env.name gem:{family}:any: GEM executes or parses .*env.sandbox: none"):
        check_sandbox(config_of(env={"name": f"gem:{family}:any"}))


@pytest.mark.integration
async def test_with_env_sandbox_none_rewards_run_as_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SANDBOX", "none")
    monkeypatch.setenv("SECRET_KEY", "x")
    confinement.cache_clear()
    try:
        async with scorer_of("Curious") as scorer:
            assert await scorer.score("environment SECRET_KEY", {}, waiter="t") == 1.0
    finally:
        monkeypatch.undo()
        confinement.cache_clear()
