"""What may change when a run is resumed, and what may not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock.config import Config, ConfigError, parse_overrides
from penstock.config.lineage import changes, check_lineage, lineage

BASE: dict[str, Any] = {"run_id": "mine", "env": {"options": {"prompt": "{question}"}}}


def changed(override: str) -> Config:
    document = json.loads(json.dumps(BASE))
    for section, value in parse_overrides([override]).items():
        known = document.get(section)
        document[section] = known | value if isinstance(known, dict) else value
    return Config.model_validate(document)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.steps=7",
        "trainer.learning_rate=1e-5",
        "trainer.checkpoint_every=3",
        "supervisor.hang_s=5",
        "observe.plots=false",
        "rollout.port=4000",
        "rollout.servers=3",
        "rollout.slots=8",
        "rollout.request_timeout_s=3",
        "env.workers=4",
        "env.episode_timeout_s=5",
        "env.turn_timeout_s=5",
        "env.reward_timeout_s=5",
        "env.reward_workers=1",
        "model.device=cpu",
        "scheduler.max_staleness=1",
    ],
)
def test_how_long_how_fast_and_where_may_change(override: str) -> None:
    before = Config.model_validate(BASE)
    check_lineage(lineage(before), changed(override), before=before)


def test_how_fast_each_of_a_mixture_is_may_change_and_nothing_else_of_it() -> None:
    def of(**settings: Any) -> Config:
        return Config.model_validate({"env": {"mixture": {"a.b": settings, "c": {}}}})

    check_lineage(lineage(of()), of(turn_timeout_s=5.0, reward_timeout_s=5.0), before=of())
    with pytest.raises(ConfigError, match=r"env\.mixture\.a\.b\.max_turns was 1 and cannot become 2"):
        check_lineage(lineage(of()), of(max_turns=2), before=of())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=1", "seed was 0 and cannot become 1"),
        ("run_id=other", "run_id was 'mine' and cannot become 'other'"),
        ("model.max_context=1024", "model.max_context was 512 and cannot become 1024"),
        ("model.tiny.num_layers=5", "model.tiny.num_layers was 4 and cannot become 5"),
        ("data.dataset=lcm", "data.dataset was 'spell_backward' and cannot become 'lcm'"),
        ("env.group_size=4", "env.group_size was 8 and cannot become 4"),
        ("env.options={}", "env.options.prompt was '{question}' and cannot become None"),
        ("trainer.lora={rank: 8}", "trainer.lora.rank was None and cannot become 8"),
    ],
)
def test_what_data_and_weights_rest_on_may_not(override: str, message: str) -> None:
    begun_with = json.loads(json.dumps(lineage(Config.model_validate(BASE))))
    with pytest.raises(ConfigError) as refusal:
        check_lineage(begun_with, changed(override), before=Config.model_validate(BASE))
    assert message in str(refusal.value).splitlines()
    assert "resume it without this, or begin another" in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({}, "model.warm_start.noise", 0.5),
        ({"trainer": {"critic": {}}, "scheduler": {"group_filter": []}}, "trainer.critic.clip", 0.5),
        ({"trainer": {"lora": {"rank": 8}}}, "trainer.lora.alpha", 5),
        ({"env": {"mixture": {"a": {}}}}, "env.mixture.a.max_turns", 2),
    ],
)
def test_a_setting_that_an_earlier_release_did_not_know_had_its_default(
    settings: dict[str, Any], name: str, value: float
) -> None:
    before = Config.model_validate(settings)
    begun_with = lineage(before)
    del begun_with[name]
    check_lineage(begun_with, before, before=before)
    section, _, last = name.rpartition(".")
    document = json.loads(before.model_dump_json())
    within = document
    for key in section.split("."):
        within = within[key]
    within[last] = value
    with pytest.raises(ConfigError, match=f"{re.escape(name)} was .* and cannot become {value}"):
        check_lineage(begun_with, Config.model_validate(document), before=before)


def test_changes_are_named_with_both_values() -> None:
    before = Config.model_validate(BASE)
    assert changes(before, changed("trainer.steps=7")) == {"trainer.steps": (100, 7)}
    assert changes(before, before) == {}
