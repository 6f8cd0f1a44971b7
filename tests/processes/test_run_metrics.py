"""What Prometheus reads of a whole run, and what the shipped dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_ports import played
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from penstock.config import Config
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.processes.run_metrics import metrics_endpoint
from penstock.types import EpisodeId, LearnerState

DASHBOARD = Path(__file__).parent.parent.parent / "docs" / "grafana-dashboard.json"

Found = dict[tuple[str, ...], float]


def busy_run(run_dir: Path) -> Recorder:
    recorder = Recorder(run_dir)
    recorder.joined("rollout-0", "rollout", url="http://127.0.0.1:1")
    recorder.joined("trainer-0", "trainer")
    for name in ("rollout-0", "trainer-0"):
        recorder.heartbeat(name, cpu_s=3.0, busy_s=2.0, counters={"tokens": 100.0}, spans=())
    recorder.accumulated({"tokens": 40.0, "skipped_too_long": 2.0})
    recorder.group_completed("sums", [played(EpisodeId("sums", 0, 0, 0), reward=0.5)])
    recorder.decision("filter", "all rewards are 1", {"group": 1, "dropped_by": "zero_variance"})
    learner = LearnerState(policy_version=7, entropy=0.25, metrics={"loss": float("nan"), "staleness_max": 2.0})
    recorder.stepped(5, learner, {"admitted": 8, "ready": 3, "trained": 5}, {"groups_pending": 4.0})
    recorder.evaluated("step 5", 5, [], [], shown=0, solved_at=1.0)
    return recorder


async def scrape(url: str) -> tuple[Found, set[str]]:
    """Return the samples by name and labels, and the names of all families with their suffixes."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(await response.text()))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}, names


def url_of(run_dir: Path) -> str:
    (event,) = [each for each in jsonl.read(run_dir / "events.jsonl") if each["event"] == "metrics"]
    return str(event["url"])


async def served(run_dir: Path, recorder: Recorder) -> tuple[Found, set[str]]:
    config = Config.model_validate({"observe": {"metrics_port": 0}})
    async with metrics_endpoint(config, run_dir, recorder):
        return await scrape(url_of(run_dir))


async def test_one_target_has_the_run_and_all_of_its_processes(tmp_path: Path) -> None:
    process = {"state": "ready", "role": "trainer", "restarts": 2, "pid": 1}
    facts: dict[str, Any] = {"status": "running", "run_id": "a", "runtime_dir": "/", "lives": 1}
    jsonl.write_json(tmp_path / "state.json", facts | {"processes": {"trainer-0": process}})
    found, _ = await served(tmp_path, busy_run(tmp_path))
    assert (found["penstock_run_step",], found["penstock_run_policy_version",]) == (5, 7)
    assert found["penstock_run_reward_mean", "sums"] == 0.5 and found["penstock_run_entropy_nats",] == 0.25
    assert found["penstock_run_generated_tokens_total",] == 100 and found["penstock_run_trained_tokens_total",] == 40
    assert found["penstock_run_groups_dropped_total", "zero_variance: all rewards are 1"] == 1
    assert found["penstock_run_samples_unusable_total", "too_long"] == 2
    assert found["penstock_run_episodes_by_state", "ready"] == 3
    assert found["penstock_process_busy_seconds_total", "rollout-0", "rollout"] == 2
    assert found["penstock_process_cpu_seconds_total", "controller", "controller"] > 0
    assert found["penstock_process_up", "trainer-0", "trainer"] == 1
    assert found["penstock_process_restarts_total", "trainer-0", "trainer"] == 2
    assert ("penstock_run_loss",) not in found, "an unknown number has no sample"


async def test_counters_go_on_with_another_controller(tmp_path: Path) -> None:
    busy_run(tmp_path).close()
    with_second = Recorder(tmp_path)
    found, _ = await served(tmp_path, with_second)
    assert found["penstock_run_generated_tokens_total",] == 100 and found["penstock_run_episodes_total",] == 1
    assert found["penstock_run_step",] == 5


async def test_names_keep_the_rules_of_prometheus(tmp_path: Path) -> None:
    _, names = await served(tmp_path, Recorder(tmp_path))
    assert names and all(re.fullmatch(r"penstock_(run|process)_[a-z_]+", name) for name in names)
    assert not [name for name in names if re.search(r"_(s|ms|mb|percent|share)$", name)], "units are base units"


async def test_every_query_of_the_dashboard_names_a_metric_that_exists(tmp_path: Path) -> None:
    _, names = await served(tmp_path, busy_run(tmp_path))
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"penstock_\w+", query)}
    assert len(queries) > 20 and asked <= names, sorted(asked - names)


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    (source,) = dashboard["__inputs"]
    panels = dashboard["panels"]
    assert dashboard["title"] and dashboard["schemaVersion"] >= 38
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert panel["title"] and place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == f"${{{source['name']}}}"
            assert target["expr"].count("(") == target["expr"].count(")") and "$instance" in target["expr"]


async def test_without_the_setting_nothing_is_served(tmp_path: Path) -> None:
    async with metrics_endpoint(Config(), tmp_path, Recorder(tmp_path)):
        assert not [each for each in jsonl.read(tmp_path / "events.jsonl") if each["event"] == "metrics"]


async def test_a_port_that_is_taken_is_an_alarm_and_no_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    async with metrics_endpoint(Config.model_validate({"observe": {"metrics_port": 0}}), tmp_path, recorder):
        port = int(url_of(tmp_path).split(":")[2].partition("/")[0])
        second = Config.model_validate({"observe": {"metrics_port": port}})
        async with metrics_endpoint(second, tmp_path, recorder):
            (alarm,) = [each for each in jsonl.read(tmp_path / "events.jsonl") if each["event"] == "alarm"]
    assert f"127.0.0.1:{port}" in alarm["reason"] and "set observe.metrics_port" in alarm["reason"]


async def test_from_outside_a_key_is_needed(tmp_path: Path) -> None:
    observe = {"metrics_port": 0, "metrics_host": "0.0.0.0"}
    with pytest.raises(
        ValidationError, match=r"metrics_host 0\.0\.0\.0 is reachable from outside: set rollout\.api_key"
    ):
        Config.model_validate({"observe": observe})
    config = Config.model_validate({"observe": observe, "rollout": {"api_key": "a-key"}})
    async with metrics_endpoint(config, tmp_path, Recorder(tmp_path)), aiohttp.ClientSession() as session:
        for key, status in (("wrong", 401), ("a-key", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(url_of(tmp_path).replace("0.0.0.0", "127.0.0.1"), headers=headers) as response:
                assert response.status == status
