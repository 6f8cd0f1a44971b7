"""One clear error per mistake: the key, its place, the remedy."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from penstock.config import Config, ConfigError, default_config, load_config
from penstock.scheduler.trigger import Trigger

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*/run.yaml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {steps: 7, learning_rate: 1e-4}\n")
    return path


def test_overrides_win_and_exponents_are_numbers(file: Path) -> None:
    config = load_config(file, ["trainer.steps=9", "env.name=guess_number"])
    assert config.trainer.steps == 9
    assert config.trainer.learning_rate == 1e-4
    assert config.env.name == "guess_number"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["env.options={}"], {}),
        (["env={options: {}}"], {}),
        (["env.options={}", "env.options.high=1"], {"high": 1}),
        (["env.options.high=1", "env.options={}"], {}),
        (["env.options={high: 1}"], {"low": {"at": 2}, "high": 1}),
        (["env.options.low={}"], {"low": {}}),
        (["env.options.high=1", "env.options={low: 3}"], {"low": 3, "high": 1}),
    ],
)
def test_a_mapping_is_merged_and_an_empty_one_empties(tmp_path: Path, overrides: list[str], expected: object) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: {name: a.b:C, options: {low: {at: 2}}}\n")
    options = load_config(path, overrides).env.options
    assert options == expected
    assert yaml.safe_load(yaml.safe_dump(options)) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.lerning_rate=1",
            "unknown key trainer.lerning_rate on the command line: did you mean trainer.learning_rate?",
        ),
        ("trainr.steps=1", "unknown key trainr on the command line: did you mean trainer?"),
        ("scheduler.trigger.min_sample=1", "did you mean scheduler.trigger.min_samples?"),
        ("trainer.xyzzy=1", "valid keys of trainer: steps"),
        ("trainer.steps=many", "bad value for trainer.steps on the command line"),
        ("trainer.steps=0", "bad value for trainer.steps"),
        ("trainer.steps=true", "bad value for trainer.steps"),
        ("trainer.steps='7'", "bad value for trainer.steps"),
        ("trainer.learning_rate=.inf", "bad value for trainer.learning_rate"),
        ("trainer=3", "bad value for trainer on the command line: it is a section; its settings are trainer.steps,"),
        ("scheduler.dispatch=sjf", "it is a section; did you mean scheduler.dispatch.policy=sjf?"),
        ("trainer.objective=gspo", "did you mean trainer.objective.name=gspo?"),
        ("steps", "not of the form section.key=value"),
        ("trainer.steps=[1", "override 'trainer.steps=[1'"),
        ("env.group_size=1", "use at least 2"),
        ("scheduler.group_filter=[over_long, over_long]", "group_filter names a filter twice: over_long, over_long"),
        ("scheduler.group_filter={name: over_long, option: 1}", "unknown key scheduler.group_filter.0.option"),
        ("scheduler.group_filter=[3]", "bad value for scheduler.group_filter.0"),
        ("scheduler.trigger.min_samples=100000", "exceeds the samples of a step"),
        ("scheduler.max_running=2", "no group could ever start"),
        ("env.top_p=0.9", "sample from fewer tokens than the probabilities that trainer.objective ppo divides by"),
        ("trainer.objective.name=grpo2", "bad value for trainer.objective.name"),
        ("trainer.objective.clip=0.1", "unknown key trainer.objective.clip"),
        ("trainer.objective={name: icepop, mask_low: 9.0}", "mask_low (9) must be below mask_high (5)"),
        ("trainer.objective.proximal=snapshot", "ppo does not read proximal; decoupled, icepop do"),
        ("trainer.objective.second_moment_over=sample", "ppo does not read second_moment_over; m2po do"),
        (
            "trainer.objective={name: m2po, second_moment_over: step}",
            "bad value for trainer.objective.second_moment_over",
        ),
        ("trainer.objective={name: icepop, proximal: interpolated}", "icepop has no interpolated proximal policy"),
        ("trainer.critic={}", "scheduler.group_filter zero_variance drops: set it to []"),
        ("trainer.split=[critic]", "split names critic, and there is none: set trainer.critic, or leave it out"),
        ("trainer.split=[reference]", "there is none: set trainer.objective.kl_coef, or leave it out of split"),
        ("trainer={split: [reference, reference], objective: {kl_coef: 0.1}}", "split names a role twice"),
        ("trainer.split=[actor]", "bad value for trainer.split.0"),
        ("trainer.lora={rank: 0}", "bad value for trainer.lora.rank"),
        ("trainer.critic.trace=2", "bad value for trainer.critic.trace"),
        ("observe.trackers=[tensorbord]", "bad value for observe.trackers"),
        ("scheduler.trigger.feedback.fewest_samples=100000", "exceeds the samples of a step"),
        ("scheduler.trigger.feedback={fewest_samples: 9, most_samples: 8}", "exceeds most_samples (8)"),
        ("scheduler.trigger.feedback={shortest_wait: 9s, longest_wait: 8s}", "exceeds longest_wait (8s)"),
        ("rollout.slots=0", "bad value for rollout.slots"),
        (
            "scheduler={segment_length: 20, global_max_length: 10}",
            "segment_length (20) is longer than global_max_length",
        ),
        ("scheduler.max_segment_count=3", "has no effect without segment_length"),
        ("scheduler.mode=synchronous", "mode synchronous is on-policy: set max_staleness to 0 (it is 2)"),
        ("scheduler={mode: one_step_off, max_staleness: 0}", "set max_staleness to 1 or more"),
        (
            "scheduler={mode: colocated, max_staleness: 0, trigger: {use: step}}",
            "trigger.use step belongs to mode asynchronous: colocated trains whole batches",
        ),
        ("scheduler.trigger={use: batch, feedback: {signal: entropy}}", "which use batch does not have"),
        ("scheduler.trigger={feedback: {signal: time, fewest_samples: 100}}", "is below feedback.fewest_samples (100)"),
        (
            "trainer={ranks: 17, groups_per_step: 2}",
            "trainer.ranks (17) exceeds the samples of a step (trainer.groups_per_step * env.group_size = 16)",
        ),
        (
            "trainer={ranks: 34, distributed: {context_ranks: 2}, groups_per_step: 2}",
            "trainer.ranks / distributed.context_ranks (17) exceeds the samples of a step",
        ),
        ("scheduler.over_sampling=1.5", "over_sampling belongs to mode colocated"),
        ("scheduler={mode: colocated, over_sampling: 2.0, max_staleness: 0}", "carries answers over an update"),
        ("scheduler.dispatch.policy=random", "bad value for scheduler.dispatch.policy"),
        ("data.source=jsonl", "needs data.path"),
        ("simulator.workload.source=trace", "needs workload.path"),
        ("env.max_new_tokens=600", "the prompt needs room too"),
        ("rollout.host=0.0.0.0", "PENSTOCK_API_KEY"),
        ("rollout.api_key=sesame", "PENSTOCK_API_KEY"),
        ("rollout.admin_api_key=sesame", "PENSTOCK_ADMIN_API_KEY"),
        ("run_id=a/b", "bad value for run_id"),
        ("env.temperature=1e-4", "bad value for env.temperature"),
        ("model.tiny.num_kv_heads=3", "must be a multiple of num_kv_heads"),
        ("model.tiny.hidden_size=130", "must be a multiple of 2 * num_heads"),
    ],
)
def test_mistakes_on_the_command_line(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file, [override])
    assert message in str(error.value)


def test_an_override_below_a_value_of_another_override_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="goes below 'dispatch', which another override sets to a value"):
        load_config(file, ["scheduler.dispatch=sjf", "scheduler.dispatch.look_ahead=4"])


def test_weights_are_not_given_out_to_servers_without_a_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    overrides = ["cluster.address=auto", "rollout.urls=[http://10.0.0.1:1]"]
    with pytest.raises(ConfigError, match=r"rollout\.urls: .* environment variable PENSTOCK_API_KEY"):
        load_config(file, overrides)
    monkeypatch.setenv("PENSTOCK_API_KEY", "play")
    assert load_config(file, overrides).rollout.control_key == "play"


@pytest.mark.parametrize("pipeline", ["eval", "rollout"])
@pytest.mark.parametrize(
    "override",
    [
        "env.top_p=0.9",
        "env.top_k=20",
        "env.group_size=1",
        "scheduler.trigger.min_samples=100000",
        "scheduler.trigger.feedback.fewest_samples=100000",
    ],
)
def test_what_only_training_cannot_do_with_is_no_mistake_elsewhere(file: Path, pipeline: str, override: str) -> None:
    assert load_config(file, [f"pipeline={pipeline}", override]).pipeline == pipeline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {stps: 1}", "unknown key trainer.stps in"),
        ("trainer: [", "is not valid YAML"),
        ("- 1", "must hold sections"),
        ("trainer:\n  steps: 1\nseed: 1\ntrainer:\n  steps: 2", "trainer is given twice, in lines 1 and 4"),
        ("trainer: {steps: 1, steps: 1}", "steps is given twice, in lines 1 and 1"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml") as error:
        load_config(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], 64), (["trainer.groups_per_step=4"], 32), (["scheduler.trigger.min_samples=16"], 16)],
)
def test_the_trigger_never_asks_for_more_than_a_step_unless_told(
    file: Path, overrides: list[str], expected: int
) -> None:
    config = load_config(file, overrides)
    whole = {"group_size": config.env.group_size, "groups_per_step": config.trainer.groups_per_step}
    assert Trigger(config.scheduler.trigger, **whole).min_samples == expected
    with pytest.raises(ConfigError, match=r"min_samples \(33\) exceeds the samples of a step"):
        load_config(file, ["trainer.groups_per_step=4", "scheduler.trigger.min_samples=33"])


def test_a_contradiction_says_where_each_setting_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {max_context: 64}\nscheduler: {dispatch: {}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path, ["env.max_new_tokens=70"])
    assert f"(env.max_new_tokens on the command line, model.max_context in {path})" in str(error.value)
    with pytest.raises(ConfigError) as error:
        load_config(path, ["scheduler.max_segment_count=3"])
    assert str(error.value).startswith("contradictory settings of scheduler: max_segment_count")
    assert "(scheduler.max_segment_count on the command line)" in str(error.value)


def test_ports_beyond_the_last_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.port \(65535\) leaves no room"):
        load_config(file, ["rollout.port=65535", "rollout.servers=2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.options.prot=1", r"env\.options of env\.name atropos are port; prot: Extra inputs"),
        ("data.eval_tasks=4", r"data\.eval_tasks is 4, .* it must be 0: such environments evaluate by themselves"),
        ("validation.tasks=2", r"validation\.tasks is 2, .* it must be 0"),
        ("validation.mixture={other: {name: guess_number}}", "remove env.mixture and validation.mixture"),
        ("env.mixture={other: {name: guess_number}}", "remove env.mixture and validation.mixture"),
        ("env.workers=2", r"env\.workers is 2, .* it must be 1"),
        ("model.warm_start.steps=3", r"warm_start\.steps is 3, .* show no demonstrations"),
        ("scheduler.segment_length=4", r"segment_length is 4, .* must be null"),
        ("scheduler.dispatch.policy=probe", "probe plays single members first"),
    ],
)
def test_what_atropos_environments_cannot_do_is_refused(override: str, message: str) -> None:
    (example,) = (path for path in EXAMPLES if path.parent.name == "atropos")
    with pytest.raises(ConfigError, match=message):
        load_config(example, [override])


@pytest.mark.parametrize("section", ["env", "validation"])
def test_atropos_is_no_part_of_a_mixture(file: Path, section: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.name atropos is for a run of its own"):
        load_config(file, [f"{section}.mixture={{ours: {{name: guess_number}}, theirs: {{name: atropos}}}}"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_key_comes_from_the_environment_and_is_not_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "sesame")
    config = load_config(file, ["rollout.host=0.0.0.0"])
    assert config.rollout.api_key == "sesame"
    assert "sesame" not in repr(config)
    assert config.rollout.control_key == "sesame"
    monkeypatch.setenv("PENSTOCK_ADMIN_API_KEY", "alibaba")
    config = load_config(file, [])
    assert (config.rollout.api_key, config.rollout.control_key) == ("sesame", "alibaba")
    assert "alibaba" not in repr(config)


def test_a_rewards_file_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "run.yaml").write_text("env: {reward: 'mine.py:Length', name: 'mine.py:World'}\n")
    env = load_config(tmp_path / "run.yaml").env
    assert (env.reward, env.name) == (f"{tmp_path}/mine.py:Length", f"{tmp_path}/mine.py:World")


@pytest.mark.parametrize("setting", ["trainer.critic={}", "trainer.scale_learning_rate=[samples]"])
def test_turns_as_samples_are_refused_where_their_number_matters(file: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.formulation step shares a group's advantages"):
        load_config(file, [setting, "env.formulation=step", "scheduler.group_filter=[]"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_examples_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefgh")
)
CHAIN = "a0: &a0 {}\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(120))
MERGES = "a0: &a0 {b: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10_000, "more than 100 levels"),
        ("a: " + "[" * 150 + "]" * 150, "more than 100 levels"),
        ("a: &a [*a]", "more than 100 levels"),
        ("model: &m {<<: *m}", "more than 100 levels"),
        (CHAIN, "more than 100 levels"),
        (BOMB, "more than 100 levels or 100000 values, aliases included"),
        (MERGES, "aliases included"),
        ("seed: 0\nmodel: !!timestamp x", "the value in line 2 is not a valid timestamp"),
        ("seed: 2001-99-99", "line 1 is not a valid timestamp"),
        ("seed: !!int ''", "line 1 is not a valid int"),
        ("seed: !!int x", "line 1 is not a valid int"),
        ("seed: !!float x", "line 1 is not a valid float"),
        ("seed: !!bool x", "line 1 is not a valid bool"),
        ("seed: !!map [a]", "not valid YAML: expected a mapping node"),
        ('rollout: {host: "\\ud800"}', "line 1 is not a valid str"),
        ("seed: !!binary 'a'", "not valid YAML"),
        ("seed: !!float 1" + ":59" * 30, "not valid|bad value"),
        ("seed: " + "9" * 4_001, "line 1 has more than 100 characters"),
        ("seed: 1" + ":59" * 20_000, "line 1 has more than 100 characters"),
        ("seed: 0x" + "f" * 20_000, "line 1 has more than 100 characters"),
    ],
    ids=lambda text: text[:20],
)
def test_odd_yaml_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 300


@pytest.mark.parametrize("value", ["!!timestamp x", "[" * 2_000, "1" + ":59" * 20_000, "&a [*a]"])
def test_odd_yaml_on_the_command_line_is_one_error(file: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config(file, [f"seed={value}"])


def test_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: {options: {a: &a {x: 1}, b: *a, c: {<<: *a, y: 2}}}\n")
    assert load_config(path).env.options == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("rollout", "broadcasts", "shares"),
    [
        ("{engine: penstock}", False, False),
        ("{engine: penstock, urls: ['http://a:1']}", False, False),
        ("{engine: vllm}", False, False),
        ("{engine: vllm, urls: ['http://a:1']}", False, True),
        ("{engine: vllm, direct_weights: true}", True, False),
        ("{engine: vllm, direct_weights: true, urls: ['http://a:1']}", True, False),
        ("{engine: sglang}", True, False),
        ("{engine: sglang, direct_weights: true, update_mode: drain}", False, False),
        ("{engine: sglang, urls: ['http://a:1']}", True, False),
        ("{engine: sglang, update_mode: drain}", False, False),
        ("{engine: sglang, update_mode: drain, urls: ['http://a:1']}", False, True),
    ],
)
def test_only_engines_that_the_run_has_not_started_need_a_shared_folder(
    rollout: str, broadcasts: bool, shares: bool
) -> None:
    config = default_config([f"rollout={rollout}"])
    assert (config.broadcasts_to_engines, config.shares_weights_folder) == (broadcasts, shares)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.engine=penstock"], "our own servers map the file"),
        (["trainer.ranks=2"], "trainer.ranks is 2, so rollout.direct_weights must be false: no single rank has all"),
        (["model.device=cpu"], "the weights are on no CUDA device"),
        (["scheduler={mode: colocated, max_staleness: 0}"], "the weights have left the device by then"),
        (["trainer.lora={rank: 4}", "model.path=/a"], "the engines read adapters from files"),
    ],
)
def test_direct_weights_that_two_sides_cannot_share_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        default_config(["rollout.engine=vllm", "rollout.direct_weights=true", *words])
