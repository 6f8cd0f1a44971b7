"""The episodes of a run become traces, with real processes and a real collector. The collector may die."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_training_run import leftovers, lines, only_run, train

sys.path.insert(0, str(Path(__file__).parent.parent / "observe"))
from otlp_collector import Span, collecting

pytestmark = [pytest.mark.integration, pytest.mark.long]

LIMIT_S = 300
NUM_TASKS, GROUP_SIZE, PLAYED_BEFORE = 30, 4, 10
CONFIG = f"""
policy: {{name: random}}
data: {{source: seeds}}
env:
  name: "sums.py:Sums"
  options: {{gate: GATE}}
  group_size: {GROUP_SIZE}
  max_turns: 3
synthesis: {{tasks: {NUM_TASKS}}}
observe: {{progress: false}}
"""
ENVIRONMENT = f'''
import asyncio
from pathlib import Path

ADD = {{
    "type": "function",
    "function": {{
        "name": "add",
        "parameters": {{
            "type": "object",
            "properties": {{"a": {{"type": "integer"}}, "b": {{"type": "integer"}}}},
            "required": ["a", "b"],
        }},
    }},
}}


class Sums:
    """Three turns with a tool. Later tasks wait for the file `gate`."""

    tools = (ADD,)

    def __init__(self, task, gate):
        self.gate = Path(gate) if task.index >= {PLAYED_BEFORE} else None

    async def reset(self, seed):
        while self.gate is not None and not self.gate.exists():
            await asyncio.sleep(0.01)
        return "2 + 3", {{}}

    async def step(self, action):
        results = [{{"role": "tool", "content": str(call.arguments)}} for call in action.calls]
        return results or "call the tool", 0.25, False, False, {{}}
'''


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def penstock(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_goes_on_without_its_collector(tmp_path: Path) -> None:
    gate, config, num_first = tmp_path / "gate", tmp_path / "run.yaml", PLAYED_BEFORE * GROUP_SIZE
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    config.write_text(CONFIG.replace("GATE", str(gate)))
    with collecting() as collector:
        address = f"observe.opentelemetry={collector.url}"
        run = penstock("rollout", config, f"runs_dir={tmp_path / 'runs'}", address)
        try:
            spans = collector.wait_for(num_first, name="invoke_agent", limit_s=LIMIT_S)
        except BaseException:
            run.kill()
            raise
    gate.touch()
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    run_dir = only_run(tmp_path / "runs")
    assert leftovers(run_dir) == []
    rows = [row for path in (run_dir / "trajectories" / "rollout").glob("*.jsonl") for row in lines(path)]
    assert len(rows) == NUM_TASKS * GROUP_SIZE
    assert len({span.trace_id for span in spans}) == num_first
    assert {span.attributes["penstock.reward"] for span in spans} == {0.75}
    check_trees(collector.spans)
    assert any(span.name == "execute_tool add" for span in collector.spans)
    log = (run_dir / "logs" / "env-0.log").read_text()
    assert log.count("WARNING") == log.count(f"{collector.url} takes no spans") == 1


def test_the_episodes_of_a_training_are_traces(tmp_path: Path) -> None:
    short = ["model.warm_start.steps=10", "trainer.steps=3", "trainer.groups_per_step=4", "data.eval_tasks=8"]
    words = [*short, "scheduler.group_filter=[]", "observe.progress=false"]
    with collecting() as collector:
        result = train("tools", tmp_path, f"observe.opentelemetry={collector.url}", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    check_trees(collector.spans)
    roots = {span.span_id: span for span in collector.spans if not span.parent_id}
    counted = Counter(span.attributes["penstock.purpose"] for span in roots.values())
    assert counted["train"] >= 3 * 4 * 8 and counted["eval"] >= 8
    assert 0 in {span.attributes.get("penstock.policy_version.min") for span in roots.values()}
    answers = [span for span in collector.spans if span.name.startswith("chat ")]
    assert all(span.attributes["gen_ai.usage.input_tokens"] > 0 for span in answers)
    assert any(span.attributes["gen_ai.usage.output_tokens"] > 0 for span in answers)
    assert "WARNING" not in (only_run(tmp_path) / "logs" / "env-0.log").read_text()


def check_trees(spans: list[Span]) -> None:
    """Check that the children of each whole trace lie within its root."""
    roots = {span.span_id: span for span in spans if not span.parent_id}
    assert len({span.trace_id for span in roots.values()}) == len(roots)
    for span in spans:
        if span.parent_id in roots:
            root = roots[span.parent_id]
            assert root.trace_id == span.trace_id and span.resource == root.resource
            assert root.start - 1e-3 <= span.start <= span.end <= root.end + 1e-3, (span, root)
