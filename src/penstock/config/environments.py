"""Settings of environments, of the data behind them, of mixtures of environments, and of validation.

A *tag* names the environment that runs a task. A run with one environment has one tag. A mixture names its tags; an
entry of a mixture takes settings that it leaves out from `env` and `data`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from penstock.config.section import Section
from penstock.types import Formulation, Purpose, Task

SINGLE_TURN = "single_turn"
ATROPOS = "atropos"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
FILE_SOURCES = ("jsonl", "parquet", "huggingface")
OF_SOURCE = ("dataset", "options", "path", "split", "mode", "epochs", "keys", "eval_path", "eval_split")
BELONGING = {
    "name": ("options", "manager", "manager_options", "reward", "reward_options"),
    "manager": ("manager_options",),
    "reward": ("reward_options",),
    "dataset": ("options",),
    "path": ("eval_path",),
    "source": OF_SOURCE,
}
"""An entry that gives the key does not inherit the settings listed after it."""


class DataConfig(Section):
    """Source of the tasks."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "huggingface", "seeds"] = "reasoning_gym"
    """Unset: `reasoning_gym` for `env.name` single_turn, or if `dataset` or `options` is given; `seeds` for other
    environments. `reasoning_gym` draws from a procedural dataset. `jsonl` and `parquet` read a file. `huggingface`
    reads a local directory, either written by `save_to_disk` or with data files in it (needs the extra `huggingface`).
    `seeds` only numbers the tasks (for games)."""
    dataset: str = "spell_backward"
    """Name of the reasoning-gym dataset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym dataset, as its own documentation names them."""
    path: str | None = None
    """Path of the file or directory with the tasks. Each row becomes the payload of one task."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    mode: Literal["traversal", "sample"] = "traversal"
    """Order of the rows. `traversal`: the order of the file. `sample`: a new random order for every epoch, each row
    once. In a Parquet file with several row groups, `sample` first draws a row group and then draws its rows."""
    epochs: int | None = Field(1, ge=1)
    """Number of times every row is taken; None repeats without end."""
    keys: list[str] = Field(default_factory=list)
    """Keys that every row must have. A row that lacks one ends the run; the error names the row's position."""
    eval_path: str | None = None
    """Path of the file or directory with held-out tasks."""
    eval_split: str | None = None
    """Split of a Hugging Face dataset with held-out tasks. If neither `eval_path` nor `eval_split` is given, the
    held-out tasks are the last rows of `path`."""
    eval_tasks: int = Field(256, ge=0)
    """Number of held-out tasks, evaluated before and after training; never trained on."""

    @property
    def has_rows(self) -> bool:
        """Return whether the source reads rows, which are finite in number; other sources never run out of tasks."""
        return self.source in FILE_SOURCES

    @property
    def is_endless(self) -> bool:
        """Return whether the training tasks never run out."""
        return not self.has_rows or self.epochs is None

    @property
    def holds_out_apart(self) -> bool:
        """Return whether the held-out rows come from another file or split than the training rows."""
        return self.eval_path is not None or self.eval_split is not None

    def num_held_out_of(self, other: DataConfig) -> int:
        """Return how many of the last rows of `other`'s file this configuration holds out."""
        own, others = (self.source, self.path, self.split), (other.source, other.path, other.split)
        return self.eval_tasks if self.has_rows and own == others and not self.holds_out_apart else 0

    def contradictions(self) -> Iterator[str]:
        if self.has_rows and self.path is None:
            yield f"data.source {self.source} needs data.path"
        for name in ("mode", "epochs", "keys", "eval_path") if not self.has_rows else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                yield f"{name} is for rows of {', '.join(FILE_SOURCES)}, not for source {self.source}"
        for name in ("split", "eval_split") if self.source != "huggingface" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name} is for source huggingface, not for {self.source}"


class EnvironmentConfig(Section):
    """Settings of one environment."""

    name: str = SINGLE_TURN
    """`single_turn`, `guess_number`, `path/to/file.py:Class` (beside the configuration file, or in the working
    directory), `package.module:Class`, or the id of an environment of another library: `gym:FrozenLake-v1` (Gymnasium),
    `gem:game:GuessTheNumber-v0-easy` (GEM). With `atropos` the environments are separate programs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of turns of an episode (`max_steps` in other systems)."""
    max_new_tokens: int = Field(64, ge=1)
    """Maximum number of tokens generated per turn."""
    turn_timeout_s: float | None = Field(None, gt=0)
    """Time limit in seconds for each turn (the answer and the environment's step), and for the reset. None: the limit
    of the whole episode."""
    manager: str | None = None
    """Class that runs the loop of an episode in place of the built-in one, `path/to/file.py:Class` or
    `package.module:Class` (`ports/episode_manager.py`): what the policy sees in each turn, and which of its tokens are
    trained."""
    manager_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the manager."""
    reward: str | None = None
    """Reward that scores the policy's last answer instead of the environment: `math`, `format`, `code`, `judge`,
    `reasoning_gym`, `path/to/file.py:Class` or `package.module:Class`; a function is accepted too. None: the
    environment gives the reward."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""
    reward_timeout_s: float = Field(30.0, gt=0)
    """Time limit in seconds for computing one reward. A process that takes longer is killed."""
    penalize_truncation: bool = True
    """Give no reward for an action cut at `max_new_tokens` (as in UloRL, arXiv 2507.19766). Otherwise partial credit
    can teach a policy never to end its answer."""
    eval_temperature: float = Field(0.0, ge=0)
    """Sampling temperature for held-out tasks; 0 is greedy."""


class AtroposOptions(Section):
    """`env.options` of `env.name: atropos`: the environments are separate programs that run their episodes
    themselves."""

    port: int = Field(8000, ge=0, le=65535)
    """Port of the trajectory API and of inference, on loopback. 8000 is the default port of Atropos environments. 0
    lets the system choose; `atropos.json` in the run's directory then holds the port."""


class TagConfig(EnvironmentConfig):
    """The environment behind a tag, and its tasks. Settings that are left out come from `env` and `data`. Settings that
    depend on a given one are not inherited: `options` are not if `name` is given; nothing but `eval_tasks` is if
    `source` is given."""

    data: DataConfig = DataConfig()


class MixedConfig(TagConfig):
    """One environment of a training mixture."""

    weight: int = Field(1, ge=1, le=10_000)
    """Share of this tag's groups, relative to the weights of the other tags. At every point of the task stream the
    numbers of groups are as close to these proportions as whole groups allow (Tijdeman's chairman assignment, 1980)."""


class EnvConfig(EnvironmentConfig):
    """Settings of episodes and groups."""

    mixture: dict[str, MixedConfig] = Field(default_factory=dict)
    """Environments that are trained together, by tag. If it is empty, the run trains the one environment described in
    this section."""
    group_size: int = Field(8, ge=1)
    """Episodes per task (G). The advantages compare their rewards."""
    redundancy: int = Field(0, ge=0)
    """Extra episodes per task, beyond `group_size`. The first `group_size` episodes that end without an error form the
    group; the scheduler drops the other episodes (`discarded_surplus`). No group waits for its slowest or broken
    episodes; short episodes are preferred as a result."""
    workers: int = Field(1, ge=0)
    """Number of environment worker processes that the run starts. With 0 the run waits for external workers to attach:
    `python my_env.py serve --run RUN`."""
    formulation: Formulation = "branches"
    """Unit of training. `branches`: a whole episode is one sample; if an agent branches off or rewrites its history,
    each branch is one, and what it shares with an earlier branch is part of its prompt. `trajectory`: only the last
    branch. `step`: each turn is one sample, and all turns before it are its prompt. No token is trained twice. Samples
    share the advantage of their episode."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "none"] = "auto"
    """What confines the programs that the policy writes (`penstock.sandbox`). `auto`: the best that works on the
    machine, bubblewrap before plain Linux namespaces; a run that needs a sandbox is refused where neither works.
    `none`: nothing confines them: they run as your user, with all of its files and the network."""
    reward_workers: int = Field(2, ge=1)
    """Number of processes per environment worker that compute rewards, for each kind of reward."""
    temperature: float = Field(1.0, ge=1e-3)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: int = Field(0, ge=0)
    """Restrict sampling for training to the likeliest tokens; `top_p` 1 and `top_k` 0 keep all tokens. An objective
    that divides by the engine's probabilities refuses other values, because those probabilities are taken over the
    whole vocabulary."""
    episode_timeout_s: float = Field(120.0, gt=0)
    """Time limit in seconds for an episode: generation plus environment. Time spent waiting for a slot to generate does
    not count."""
    refused_requests: Literal["count", "fail"] = "count"
    """Agents: treatment of an episode in which the policy's endpoint refused a request, for a reason other than its
    limits of turns and tokens. `count`: the metric `refused_requests_total` counts the request, the worker's log says
    the reason once, and the episode goes on. `fail`: the episode fails with the reason, whatever its agent returns."""
    max_attempts: int = Field(3, ge=1)
    """Number of attempts at an episode with a failing environment, before the scheduler drops its group."""
    seeds: Literal["hashed", "arithmetic"] = "hashed"
    """Seeds of environments. `hashed`: computed from the run's seed, purpose, tag and the task's index. `arithmetic`:
    the run's seed + group + episode, where `trainer.groups_per_step` groups run one episode after the other, as in
    other systems. With `arithmetic`, different tasks often get the same seed."""

    @property
    def num_members(self) -> int:
        """Return the number of episodes per task, redundancy included."""
        return self.group_size + self.redundancy

    def contradictions(self) -> Iterator[str]:
        yield from _wrong_tags(self.mixture)


class ValidationConfig(Section):
    """Evaluation on held-out tasks: before, during and after training."""

    every: int = Field(0, ge=0)
    """Optimizer steps between two validations during training; 0 validates only before and after training."""
    mixture: dict[str, TagConfig] = Field(default_factory=dict)
    """Environments and data for validation, by tag. If it is empty, validation uses the held-out tasks of all training
    environments."""
    tasks: int | None = Field(None, ge=-1)
    """Number of held-out tasks of each tag. None uses `data.eval_tasks`. -1 uses every task; a source without end does
    not allow -1."""
    samples: int = Field(1, ge=1)
    """Episodes per task (k), for pass@k; more than one needs a temperature above 0."""
    solved_at: float = 1.0
    """Lowest reward that counts as solved, for pass@k."""

    def contradictions(self) -> Iterator[str]:
        yield from _wrong_tags(self.mixture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """All environments of a run, by purpose and tag."""

    train: Mapping[str, MixedConfig]
    eval: Mapping[str, TagConfig]
    by_key: Mapping[str, TagConfig]
    """All environments, by the dotted name of their section in the configuration."""

    @classmethod
    def of(cls, env: EnvConfig, data: DataConfig, validation: ValidationConfig) -> Environments:
        """Return the environments that these sections of a configuration describe."""
        only = MixedConfig(**{name: getattr(env, name) for name in EnvironmentConfig.model_fields}, data=data)
        tag = env.name.rpartition(":")[2] or env.name
        train = env.mixture or {tag: only}
        trained = {f"env.mixture.{tag}": settings for tag, settings in env.mixture.items()} or {"env": only}
        validated = {f"validation.mixture.{tag}": settings for tag, settings in validation.mixture.items()}
        return cls(train=train, eval=validation.mixture or train, by_key=trained | validated)

    def tagged(self, purpose: Purpose) -> Mapping[str, TagConfig]:
        return self.train if purpose == "train" else self.eval

    def of_task(self, task: Task) -> TagConfig:
        """Return the environment that runs `task`."""
        return self.find(task.tag, task.purpose)

    def find(self, tag: str, purpose: Purpose = "train") -> TagConfig:
        """Return the environment behind `tag`. If there is only one environment, it runs tasks of any tag."""
        tagged = self.tagged(purpose)
        return next(iter(tagged.values())) if len(tagged) == 1 else tagged[tag]

    @property
    def names(self) -> list[str]:
        """Return the names of all environment classes, each once."""
        return list(dict.fromkeys(settings.name for settings in self.by_key.values()))


def with_fallbacks(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with every entry of a mixture completed. Values come from the entry, else from `env` and
    `data`. An entry of the validation mixture inherits from the training entry with the same tag. Values of a wrong
    shape stay as they are."""
    env, data, validation = (_section(tree.get(name)) for name in ("env", "data", "validation"))
    base = {name: env[name] for name in EnvironmentConfig.model_fields if name in env} | {"data": data}
    trained = {tag: _merged(base, entry) for tag, entry in _section(env.get("mixture")).items()}
    validated = {tag: _merged(trained.get(tag, base), own) for tag, own in _section(validation.get("mixture")).items()}
    whole = _with_source(tree, env) if "env" in tree else tree
    for name, section, entries in (("env", env, trained), ("validation", validation, validated)):
        if entries:
            mixture = {tag: _with_source(entry, _section(entry)) for tag, entry in entries.items()}
            whole = whole | {name: section | {"mixture": mixture}}
    return whole


def _with_source(tree: Any, env: dict[str, Any]) -> Any:
    """Return `tree` with the source that its `data` leaves out. Only single_turn takes questions from a dataset; other
    environments make their tasks from a seed."""
    data = _section(tree).get("data", {})
    is_open = isinstance(data, dict) and not {"source", "dataset", "options"} & data.keys()
    if env.get("name") in (None, SINGLE_TURN) or not is_open:
        return tree
    return tree | {"data": data | {"source": "seeds"}}


def _merged(base: Any, entry: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(entry, dict)):
        return entry
    merged = _inherited(base, entry) | entry
    if isinstance(data := entry.get("data", {}), dict):
        merged["data"] = _inherited(_section(base.get("data")), data) | data
    return merged


def _inherited(base: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `base` that `entry` inherits."""
    own = {"weight", *(name for owner, names in BELONGING.items() if owner in entry for name in names)}
    return {key: value for key, value in base.items() if key not in own}


def _section(value: Any) -> dict[str, Any]:
    """Return `value` if it is a section, else an empty section."""
    return value if isinstance(value, dict) else {}


def _wrong_tags(mixture: Iterable[str]) -> Iterator[str]:
    for tag in mixture:
        if not TAG.fullmatch(tag):
            yield f"mixture: the tag {tag!r} is not a name: use letters, digits, and _ . - between them"
