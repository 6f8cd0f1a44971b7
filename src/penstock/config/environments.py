"""Settings of what is played: environments, the data behind them, mixtures of several, and validation.

A *tag* says which environment plays a task. A run with one environment has one tag; a mixture names its tags, and what
an entry of it leaves open is taken from `env` and `data`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.config.section import Section
from penstock.types import Formulation, Purpose, Task

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
FILE_SOURCES = ("jsonl", "parquet", "huggingface")
OF_SOURCE = ("dataset", "options", "path", "split", "mode", "epochs", "keys", "eval_path", "eval_split")
BELONGING = {
    "name": ("options", "reward", "reward_options"),
    "reward": ("reward_options",),
    "dataset": ("options",),
    "path": ("eval_path",),
    "source": OF_SOURCE,
}
"""Whoever gives the first does not inherit the others."""


class DataConfig(Section):
    """Where tasks come from."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "huggingface", "seeds"] = "reasoning_gym"
    """`reasoning_gym` draws from a procedural dataset; `jsonl` and `parquet` read a file; `huggingface` reads a local
    directory, as `save_to_disk` leaves it or with data files in it (needs the extra `huggingface`); `seeds` only
    numbers the tasks (for games)."""
    dataset: str = "spell_backward"
    """Name of the reasoning-gym dataset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym dataset, as its own documentation names them."""
    path: str | None = None
    """Of the file or directory. Each row of it becomes a task's payload."""
    split: str = "train"
    """Of a Hugging Face dataset."""
    mode: Literal["traversal", "sample"] = "traversal"
    """How rows are taken. `traversal`: in their order. `sample`: in an order drawn anew for every epoch, each row once;
    of a Parquet file with several row groups, these are drawn, and then their rows."""
    epochs: int | None = Field(1, ge=1)
    """How often every row is taken; None is without end."""
    keys: list[str] = Field(default_factory=list)
    """That every row must have; one that lacks some ends the run with its place."""
    eval_path: str | None = None
    """Of the file or directory with held-out tasks."""
    eval_split: str | None = None
    """Of a Hugging Face dataset, with held-out tasks. Where neither is given, they are the last rows of `path`."""
    eval_tasks: int = Field(256, ge=0)
    """Held-out tasks played before and after training; never trained on."""

    @property
    def has_rows(self) -> bool:
        """Whether it reads rows, of which there are so many; else there is no end of tasks."""
        return self.source in FILE_SOURCES

    @property
    def is_endless(self) -> bool:
        """Whether there is always another task to train on."""
        return not self.has_rows or self.epochs is None

    @property
    def holds_out_apart(self) -> bool:
        """Whether held-out rows lie elsewhere than those that are trained on."""
        return self.eval_path is not None or self.eval_split is not None

    def num_held_out_of(self, other: DataConfig) -> int:
        """Rows of `other`'s file, the last of them, that are held out here."""
        own, others = (self.source, self.path, self.split), (other.source, other.path, other.split)
        return self.eval_tasks if self.has_rows and own == others and not self.holds_out_apart else 0

    @model_validator(mode="after")
    def _settings_fit_the_source(self) -> DataConfig:
        if self.has_rows and self.path is None:
            raise ValueError(f"data.source {self.source} needs data.path")
        for name in ("mode", "epochs", "keys", "eval_path") if not self.has_rows else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} is for rows of {', '.join(FILE_SOURCES)}, not for source {self.source}")
        for name in ("split", "eval_split") if self.source != "huggingface" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for source huggingface, not for {self.source}")
        return self


class EnvironmentConfig(Section):
    """One environment."""

    name: str = "single_turn"
    """`single_turn`, `guess_number`, `path/to/file.py:Class` (beside the configuration file, or in the working
    directory), `package.module:Class`, or what another library knows by an id: `gym:FrozenLake-v1` (Gymnasium),
    `gem:game:GuessTheNumber-v0-easy` (GEM). With `atropos` the environments are programs of their own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(1, ge=1)
    """Steps of an episode at most (`max_steps` elsewhere)."""
    max_new_tokens: int = Field(64, ge=1)
    """Per turn."""
    turn_timeout_s: float | None = Field(None, gt=0)
    """For each turn: an answer, and the environment's step. For the reset as much. None: as long as the episode may
    last."""
    reward: str | None = None
    """What scores the policy's last answer, instead of the environment: `math`, `format`, `code`, `judge`,
    `path/to/file.py:Class` or `package.module:Class`; a function will do too. None: the environment itself does."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""
    reward_timeout_s: float = Field(30.0, gt=0)
    """For one reward. A process that takes longer is killed."""
    penalize_truncation: bool = True
    """An action cut at `max_new_tokens` earns nothing (as in UloRL, arXiv 2507.19766): otherwise partial credit can
    teach a policy never to end."""
    eval_temperature: float = Field(0.0, ge=0)
    """Of held-out tasks; 0 is greedy."""


class TagConfig(EnvironmentConfig):
    """The environment behind a tag, and its tasks. What is not given is as in `env` and `data`, except what belongs to
    something that is given: `options` to a `name`, all but `eval_tasks` to a `source`."""

    data: DataConfig = DataConfig()


class MixedConfig(TagConfig):
    """An environment that is trained beside others."""

    weight: int = Field(1, ge=1, le=10_000)
    """Groups of this tag, in proportion to those of the others. Every beginning of the stream of tasks is as close to
    these proportions as whole groups allow (Tijdeman's chairman assignment, 1980)."""


class EnvConfig(EnvironmentConfig):
    """What an episode is."""

    mixture: dict[str, MixedConfig] = Field(default_factory=dict)
    """Several environments that are trained together, by tag; none is the one described here."""
    group_size: int = Field(8, ge=1)
    """Episodes per task whose rewards are compared (G)."""
    redundancy: int = Field(0, ge=0)
    """Episodes played beside these. The first `group_size` that end without an error make the group, the others are
    given up (`discarded_surplus`): no group waits for its slowest or broken ones, and short episodes are preferred."""
    workers: int = Field(1, ge=0)
    """Environment worker processes that the run starts. With 0 it waits for others to attach:
    `python my_env.py serve --run RUN`."""
    formulation: Formulation = "trajectory"
    """What is trained as one sample: an episode as a whole, or each of its turns with all that came before as its
    prompt. Turns share the advantage of their episode."""
    reward_workers: int = Field(2, ge=1)
    """Processes of each environment worker that compute rewards, for each kind of reward."""
    temperature: float = Field(1.0, ge=1e-3)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """Keep only the likeliest tokens while sampling for training; 1 and 0 keep all. An objective that divides by the
    engine's probabilities refuses either: they are those of the whole vocabulary."""
    episode_timeout_s: float = Field(120.0, gt=0)
    """For an episode's generation and its environment; waiting for a place to generate costs nothing."""
    max_attempts: int = Field(3, ge=1)
    """An episode whose environment fails is tried this often before its group is given up."""
    seeds: Literal["hashed", "arithmetic"] = "hashed"
    """Of environments. `hashed`: from the run's seed, purpose, tag and the task's index. `arithmetic`: the run's seed
    + group + episode, where `trainer.groups_per_step` groups play one episode after the other, as other systems count;
    different tasks then often get the same seed."""

    @property
    def num_members(self) -> int:
        """Episodes that are played of each task."""
        return self.group_size + self.redundancy

    @model_validator(mode="after")
    def _tags_are_names(self) -> EnvConfig:
        _check_tags(self.mixture)
        return self


class ValidationConfig(Section):
    """Playing held-out tasks: before and after training, and beside it."""

    every: int = Field(0, ge=0)
    """Optimizer steps from one to the next, beside training; 0 plays them only before and after."""
    mixture: dict[str, TagConfig] = Field(default_factory=dict)
    """Environments and data of its own, by tag; none takes the held-out tasks of all that is trained."""
    tasks: int | None = Field(None, ge=-1)
    """Of each tag. None is `data.eval_tasks`; -1 is every task there is, which a source without end does not allow."""
    samples: int = Field(1, ge=1)
    """Episodes per task (k), for pass@k; more than one needs a temperature above 0."""
    solved_at: float = 1.0
    """A reward from here on counts as solved, for pass@k."""

    @model_validator(mode="after")
    def _tags_are_names(self) -> ValidationConfig:
        _check_tags(self.mixture)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """All environments of a run, by purpose and tag."""

    train: Mapping[str, MixedConfig]
    eval: Mapping[str, TagConfig]
    by_key: Mapping[str, TagConfig]
    """By the dotted name under which each is configured."""

    @classmethod
    def of(cls, env: EnvConfig, data: DataConfig, validation: ValidationConfig) -> Environments:
        """Of the sections of a configuration."""
        only = _only(env, data)
        train = env.mixture or {tag_of(env.name): only}
        trained = {f"env.mixture.{tag}": settings for tag, settings in env.mixture.items()} or {"env": only}
        validated = {f"validation.mixture.{tag}": settings for tag, settings in validation.mixture.items()}
        return cls(train=train, eval=validation.mixture or train, by_key=trained | validated)

    def tagged(self, purpose: Purpose) -> Mapping[str, TagConfig]:
        return self.train if purpose == "train" else self.eval

    def of_task(self, task: Task) -> TagConfig:
        """What plays `task`."""
        return self.find(task.tag, task.purpose)

    def find(self, tag: str, purpose: Purpose = "train") -> TagConfig:
        """The environment behind `tag`. Where there is but one, it plays whatever comes."""
        tagged = self.tagged(purpose)
        return next(iter(tagged.values())) if len(tagged) == 1 else tagged[tag]

    @property
    def names(self) -> list[str]:
        """Of all environment classes."""
        return list(dict.fromkeys(settings.name for settings in self.by_key.values()))


def tag_of(name: str) -> str:
    """The tag of an only environment: its name, or that of its class."""
    return name.rpartition(":")[2] or name


def with_fallbacks(tree: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every entry of a mixture made whole: values of its own, else of `env` and `data`; for
    validation, of what is trained under the same tag. Whatever is not even of the right shape is left as it is."""
    env, data, validation = (_tree(tree.get(name)) for name in ("env", "data", "validation"))
    base = {name: env[name] for name in EnvironmentConfig.model_fields if name in env} | {"data": data}
    trained = {tag: _merged(base, entry) for tag, entry in _tree(env.get("mixture")).items()}
    validated = {
        tag: _merged(_without_weight(trained.get(tag, base)), entry)
        for tag, entry in _tree(validation.get("mixture")).items()
    }
    whole = dict(tree)
    if trained:
        whole["env"] = env | {"mixture": trained}
    if validated:
        whole["validation"] = validation | {"mixture": validated}
    return whole


def _merged(base: Any, entry: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(entry, dict)):
        return entry
    merged = _inherited(base, entry) | entry
    if isinstance(data := entry.get("data", {}), dict):
        merged["data"] = _inherited(_tree(base.get("data")), data) | data
    return merged


def _inherited(base: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """What of `base` still makes sense beside `entry`."""
    gone = {name for owner, names in BELONGING.items() if owner in entry for name in names}
    return {key: value for key, value in base.items() if key not in gone}


def _without_weight(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != "weight"} if isinstance(entry, dict) else entry


def _tree(value: Any) -> dict[str, Any]:
    """Nothing, where there should be a section and is something else."""
    return value if isinstance(value, dict) else {}


def _only(env: EnvConfig, data: DataConfig) -> MixedConfig:
    """The one environment that `env` describes."""
    return MixedConfig(**{name: getattr(env, name) for name in EnvironmentConfig.model_fields}, data=data)


def _check_tags(mixture: Mapping[str, object]) -> None:
    for tag in mixture:
        if not TAG.fullmatch(tag):
            raise ValueError(f"mixture: the tag {tag!r} is no name: use letters, digits, and _ . - between them")
