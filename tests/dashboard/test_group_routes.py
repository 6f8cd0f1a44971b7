"""Groups and trajectories over HTTP, with the headers that keep foreign text from acting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_with_groups import MARKUP, ShownRun, turn
from starlette.testclient import TestClient

from penstock.dashboard import web_app
from penstock.dashboard.access import Access
from penstock.dashboard.served_runs import ServedRuns
from penstock.dashboard.web_app import STATIC, Dashboard, make_app
from penstock.observe import jsonl
from penstock.types import EpisodeState


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    with ShownRun(tmp_path / "runs" / "mine") as run:
        run.play(5)
        run.end(5, EpisodeState.FILTERED)
        run.decide("admission", "1 of 8 wait", group=5, task=MARKUP)
        run.decide("filter", MARKUP, group=5, dropped_by="zero_variance")
        run.play(6, turns=[turn(MARKUP, MARKUP, first=True)], task_id=MARKUP)
    jsonl.write_json(run.run_dir / "state.json", {"run_id": "mine", "status": "completed"})
    folder = tmp_path / "renderers"
    folder.mkdir()
    (folder / "Game.js").write_text("export const render = (episode, { h }) => h('p', {}, episode.row.task_id);\n")
    monkeypatch.chdir(tmp_path)
    dashboard = Dashboard(ServedRuns(tmp_path / "runs"))
    access = Access.of("127.0.0.1", "127.0.0.1", 80, "k" * 20)
    yield TestClient(make_app(dashboard, access), base_url="http://127.0.0.1")
    dashboard.opened.close()


def test_the_table(client: TestClient) -> None:
    page = client.get("/api/runs/mine/groups", params={"sort": "oldest", "status": "filtered"}).json()
    assert [(row["group"], row["reason"]) for row in page["groups"]] == [(5, MARKUP)] and page["total"] == 1
    assert client.get("/api/runs/mine/groups").json()["total"] == 2


@pytest.mark.parametrize("query", ["sort=x", "status=x", "limit=501", "limit=0", "limit=x", "offset=-1"])
def test_parameters_without_meaning(client: TestClient, query: str) -> None:
    answer = client.get(f"/api/runs/mine/groups?{query}")
    assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]["message"]


def test_a_group_with_the_decisions_about_it(client: TestClient) -> None:
    found = client.get("/api/runs/mine/groups/5").json()
    assert [(each["decider"], each["reason"]) for each in found["decisions"]] == [
        ("admission", "1 of 8 wait"),
        ("filter", MARKUP),
    ]
    assert found["decisions"][1]["inputs"] == {"dropped_by": "zero_variance"} and len(found["members"]) == 2


def test_the_earlier_decisions_about_a_group_are_told_and_can_be_asked_for(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_app, "MOST_DECISIONS", 3)
    path = "/api/runs/mine/groups/5"
    assert client.get(path).json()["decisions_before"] is None
    with (tmp_path / "runs" / "mine" / "timeline.jsonl").open("a") as file:
        for turn_ in range(5):
            decision = {"kind": "decision", "decider": "dispatch", "time": 2e9 + turn_, "reason": "next", "group": 5}
            file.write(json.dumps(decision) + "\n")
    found = client.get(path).json()
    decisions, before = found["decisions"], found["decisions_before"]
    assert [each["time"] for each in decisions] == [2e9 + 2, 2e9 + 3, 2e9 + 4]
    while before is not None:
        page = client.get("/api/runs/mine/decisions", params={"group": 5, "before": before, "limit": 3}).json()
        decisions, before = page["decisions"][::-1] + decisions, page["before"]
    assert [each["decider"] for each in decisions] == ["admission", "filter", *["dispatch"] * 5]


@pytest.mark.parametrize("path", ["groups/7", "groups/x", "groups/-1", "groups/5/episodes/9", "groups/5/episodes/x"])
def test_what_is_not_there(client: TestClient, path: str) -> None:
    answer = client.get(f"/api/runs/mine/{path}")
    assert answer.status_code == 404 and answer.json()["error"]["message"]
    assert client.get(f"/api/runs/other/{path}").status_code == 404


def test_a_trajectory_and_its_renderer(client: TestClient) -> None:
    answer = client.get("/api/runs/mine/groups/6/episodes/0")
    found = answer.json()
    assert (
        answer.headers["content-type"] == "application/json" and answer.headers["x-content-type-options"] == "nosniff"
    )
    assert [each["content"] for each in found["messages"]] == [MARKUP, MARKUP] and found["row"]["task_id"] == MARKUP
    assert (found["renderer"], found["rendered"]) == ("Game.js", None)
    script = client.get("/renderers/Game.js")
    assert script.status_code == 200 and script.headers["content-type"].startswith("text/javascript")
    assert client.get("/renderers/Other.js").status_code == 404
    assert client.get("/renderers/..%2Fruns%2Fmine%2Fconfig.yaml").status_code == 404


@pytest.mark.integration
def test_the_text_of_a_python_renderer(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "renderers" / "Game.js").unlink()
    path = tmp_path / "renderers" / "Game.py"
    path.write_text("def render(episode):\n    return episode['messages'][0]['content']\n")
    found = client.get("/api/runs/mine/groups/6/episodes/0", params={"render": 1}).json()
    assert (found["renderer"], found["rendered"]) == ("Game.py", MARKUP)
    path.write_text("def render(episode):\n    raise RuntimeError('<b>')\n")
    answer = client.get("/api/runs/mine/groups/6/episodes/0", params={"render": 1})
    assert answer.status_code == 500 and "RuntimeError: <b>" in answer.json()["error"]["message"]
    assert client.get("/api/runs/mine/groups/6/episodes/0").status_code == 200


def test_text_never_becomes_markup(client: TestClient) -> None:
    """The browser refuses to make markup of a string, and no script of ours tries to."""
    policy = client.get("/").headers["content-security-policy"]
    for rule in ("default-src 'self'", "require-trusted-types-for 'script'", "trusted-types 'none'", "base-uri 'none'"):
        assert rule in policy
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser"
    )
    for path in STATIC.rglob("*.js"):
        assert not forbidden.search(path.read_text()), path.name
