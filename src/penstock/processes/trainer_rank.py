"""One rank of a role of the trainer, with its models and the methods that are called on all ranks.

Each call runs on all ranks at once, in the same order. Within a call, ranks may wait for each other. A rank without
work takes part with an empty batch. Roles that share processes form one group of ranks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial, wraps
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from penstock.config import Config, ConfigError, TrainerConfig
from penstock.groups.batch import Batch
from penstock.groups.collect import add, first, reduce
from penstock.groups.intent import PerRank, Shard
from penstock.groups.method import remote_method
from penstock.groups.modes import Execute, Mode
from penstock.groups.role import Rank
from penstock.model.load_policy import hollow_policy, load_policy, resolve_dtype
from penstock.model.low_rank import describe_adapters
from penstock.own_files import remove_tree
from penstock.processes.devices import device_of, num_threads, num_usable_cpus
from penstock.processes.layout import places, trainer_nodes
from penstock.processes.published_form import PublishedForm
from penstock.scheduler.segments import max_trained_tokens
from penstock.supervisor.child import ADDRESS
from penstock.supervisor.janitor import RUNTIME_DIR
from penstock.trainer.critic import Critic
from penstock.trainer.learner import Learner
from penstock.trainer.lora import plain_parameters, targets_of
from penstock.trainer.memory import decided
from penstock.trainer.model_role import ModelRole
from penstock.trainer.ranks import Ranks, Rendezvous
from penstock.trainer.reference import Reference
from penstock.trainer.saving import Rest
from penstock.trainer.shards import WeightRows
from penstock.trainer.strategy import is_sharded
from penstock.trainer.warm_start import Imitation
from penstock.types import AdaptersForm
from penstock.weights.live_weights import LiveWeights
from penstock.weights.publication import NotPublished, Publication, WeightsPublisher
from penstock.weights.row_transfer import RowsCopy, receive_rows, send_failure

LOOPBACK = "127.0.0.1"
Held = TypeVar("Held", Critic, Reference)


def of_held(method: Callable[..., Any], mode: Mode | None = None, **declaration: Any) -> Any:
    """Return a remote method that calls this method of the object that the rank holds."""

    @wraps(method)
    def call(rank: TrainerRank, *arguments: Any, **named: Any) -> Any:
        return getattr(rank._held, method.__name__)(*arguments, **named)

    return remote_method(mode, **declaration)(call)


class OpenedFolders(NamedTuple):
    """Folders of weights that are being written."""

    folder: Path
    """Of a version."""
    base: Path | None = None
    """Of the weights to which the version's adapters are added; None if they are written already, or there are none."""


class PublishedForms(NamedTuple):
    """The forms of what is published."""

    whole: PublishedForm
    """Of each version; with `adapters`, of their base."""
    adapters: PublishedForm | None
    """Of each version, if only adapters travel."""


@contextmanager
def _all_of(parts: Iterable[tuple[PublishedForm, Publication]]) -> Iterator[None]:
    """Keep all publications open for the body. An error of the body ends all of them."""
    with ExitStack() as stack:
        for _, publication in parts:
            stack.enter_context(publication)
        yield


def _rows_of(policy_version: int) -> str:
    return f"the rows of policy_version {policy_version}"


class TrainerRank:
    """One rank of any role."""

    _held: ModelRole
    """The object that holds this role's data on the device."""

    def __init__(self, rank: Rank, roles: Mapping[str, Any], *, config: Config, place: int) -> None:
        """`roles`: the roles that this process already has. `place`: number of the trainer's place to which the process
        belongs."""
        self._config = config
        beside: TrainerRank | None = next(iter(roles.values()), None)
        self._ranks: Ranks = Ranks(rank) if beside is None else beside._ranks
        number = place * rank.size + rank.index
        self._here = next(node.numbers for node in trainer_nodes(config) if number in node.numbers)
        """Numbers of the trainer processes on this node, including this one."""
        self._place = place
        self._share_node = all(place * rank.size + index in self._here for index in range(rank.size))
        """Whether all ranks of this role are on this node."""
        self._device = device_of(number, config)
        self._dtype = resolve_dtype(config.model.dtype, self._device)
        self._set_threads()

    @remote_method(execute=Execute.RANK_ZERO)
    def open_rendezvous(self) -> Rendezvous:
        """Return where the ranks meet. On one node this is a directory, below the runtime directory and so removed with
        it. Those of earlier lives of this role are removed now."""
        if not self._share_node:
            return self._ranks.listen(os.environ[ADDRESS])
        runtime_dir, prefix = Path(os.environ[RUNTIME_DIR]), f"ranks-{self._place}."
        for earlier in runtime_dir.glob(f"{prefix}*"):
            remove_tree(earlier)
        return Path(mkdtemp(prefix=prefix, dir=runtime_dir))

    @remote_method()
    def join(self, rendezvous: Rendezvous) -> None:
        """Connect the ranks. Where there are several ranks, only `open_rendezvous` comes before this call. It is made
        on one role of each process."""
        backend = self._config.trainer.distributed.backend
        address = LOOPBACK if self._share_node else os.environ[ADDRESS]
        self._ranks.join(rendezvous, self._device, backend, address=address)

    @remote_method()
    def release(self) -> None:
        """Free the device for other processes until `resume`. Does nothing on the CPU, which all processes share
        anyway."""
        if self._device.type != "cpu":
            self._held.release()
            torch.get_device_module(self._device).empty_cache()

    @remote_method()
    def resume(self) -> None:
        """Use the released device again."""
        if self._device.type != "cpu":
            self._held.resume()

    write = of_held(ModelRole.write)
    is_written = of_held(ModelRole.is_written, collect=all)

    def _settings(self, model: PreTrainedModel) -> TrainerConfig:
        """Return the trainer's settings, with all that depends on the device decided. Nothing leaves a CPU for main
        memory, which is the same."""
        settings, capacity = self._config.trainer, None
        if self._device.type == "cpu":
            settings = settings.model_copy(update={"offload": []})
        else:  # the ranks must decide alike
            own = torch.get_device_module(self._device).mem_get_info(self._device)[1]
            capacity = -int(self._ranks.largest([-own], "find the smallest device")[0])
        return decided(
            model.config,
            settings,
            longest=self._config.model.max_context,
            dtype=self._dtype,
            roles=list(places(self._config).values())[self._place],
            capacity=capacity,
        )

    def _policy(self, directory: Path, *, weights: bool = True, whole: bool = False) -> PreTrainedModel:
        """Return the policy in the form that `strategy_of` takes.

        For sharding only rank 0 reads the weights, to the CPU, so that no device needs room for the whole policy. With
        `whole` every rank loads the policy onto its device. Without `weights` they are random.
        """
        if self._ranks.size > 1 and not whole:
            hollow = hollow_policy(directory)
            if is_sharded(hollow, self._config.trainer, self._ranks):
                is_first = self._ranks.is_first
                return load_policy(directory, weights=weights, seed=self._config.seed) if is_first else hollow
        return load_policy(directory, device=self._device, weights=weights, seed=self._config.seed)

    def _set_threads(self) -> None:
        threads = num_threads(self._config, self._config.trainer.torch_threads, num_sharing=len(self._here))
        torch.set_num_threads(threads)


class Actor(TrainerRank):
    """One rank of the actor. The first method call that needs the learner builds it around the policy."""

    def __init__(
        self,
        rank: Rank,
        roles: Mapping[str, Any],
        *,
        config: Config,
        place: int,
        model_dir: Path,
        weights_dir: Path,
        live: LiveWeights | None = None,
    ) -> None:
        """`model_dir`: directory of the policy. `weights_dir`: where rank 0 publishes the weights. `live`: lends the
        weights of the only rank. For the other arguments see `TrainerRank`."""
        super().__init__(rank, roles, config=config, place=place)
        trains_first = config.model.warm_start.steps > 0
        self._model = self._policy(model_dir, weights=config.model.path != "tiny", whole=trains_first)
        locks = self._config.rollout.engine == "penstock"
        self._publisher = WeightsPublisher(weights_dir, recycles=locks) if self._ranks.is_first else None
        self._model_dir, self._live = model_dir, live
        self._first_version = 0

    @remote_method(dispatch={"batch": Shard(uneven="allow")}, collect=reduce(add))
    def imitate(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """Take one step of the warm start."""
        return self._imitation.step(batch, learning_rate)

    @remote_method()
    def begin(self, policy_version: int) -> None:
        """End the warm start, if there was one, and give the current policy this version."""
        self._first_version = policy_version
        self.__dict__.pop("_imitation", None)
        self._set_threads()

    accumulate = of_held(Learner.accumulate, dispatch={"batch": PerRank()}, collect=reduce(add))
    step = of_held(Learner.step, collect=first)
    work = of_held(Learner.work, collect=first)
    join_shards = of_held(Learner.join_shards)
    write_policy = of_held(Learner.write_policy)

    @remote_method(collect=first)
    def open_weights(self) -> OpenedFolders | None:
        """On rank 0, make the files of the present weights, in the form that servers load, and return their folders.
        The weights before are complete by then."""
        self._held.await_published()
        forms, version, publisher = self._forms, self._held.policy_version, self._publisher
        if publisher is None:
            return None
        if forms.adapters is None:
            return OpenedFolders(publisher.open(forms.whole.layout, version).folder)
        has_base = self._config.engine_serves_adapters or publisher.base() is not None
        base = None if has_base else publisher.open_base(forms.whole.layout).folder
        folder = publisher.open(forms.adapters.layout, version, adapters=True).folder
        lora = self._config.trainer.lora
        assert lora is not None
        describe_adapters(forms.adapters.layout, folder, rank=lora.rank, alpha=lora.alpha, base=str(self._model_dir))
        return OpenedFolders(folder, base)

    @remote_method()
    def publish(self, opened: OpenedFolders) -> None:
        """Write the present weights to the files that `open_weights` made.

        If every rank can convert its own rows, this only begins it, and other calls may follow at once. Ranks on other
        machines than rank 0 send it their rows. Else rank 0 writes the weights one by one, gathered from all ranks.
        """
        held, forms = self._held, self._forms
        parts: list[tuple[PublishedForm, Publication]] = []
        if forms.adapters is None or opened.base is not None:
            parts.append((forms.whole, Publication(opened.base or opened.folder, forms.whole.layout)))
        if forms.adapters is not None:
            parts.append((forms.adapters, Publication(opened.folder, forms.adapters.layout, adapters=True)))
        is_merged = self._config.trainer.lora is not None and forms.adapters is None
        if not is_merged and all(form.names is not None for form, _ in parts):
            if self._far_shards:
                self._ranks.open_transfers()
            is_far = held.shard.number in self._far_shards
            held.read_rows(partial(self._copy_rows if is_far else self._write_rows, parts, held.policy_version))
            return
        if not self._ranks.is_first:  # it only takes part
            for form, _ in parts:
                deque(held.gathered_weights(form.part), maxlen=0)
            return
        with _all_of(parts):
            for form, publication in parts:
                weights = form.converted(held.gathered_weights(form.part))
                publication.write_whole(weights, held.policy_version, adapters=self._adapters(form))

    def _write_rows(
        self, parts: Sequence[tuple[PublishedForm, Publication]], policy_version: int, weights: list[WeightRows]
    ) -> Rest | None:
        """Write this rank's rows. Rank 0 returns what completes the files, which needs the weights no more."""
        shard = self._held.shard
        if not shard.is_saved:
            return None
        with _all_of(parts):
            for form, publication in parts:
                for name, weight in form.renamed(weights):
                    publication.write(name, weight.rows, weight.first_row)
                publication.written(shard.number)
        if self._live is not None:
            named = (pair for form, _ in parts for pair in form.renamed(weights))
            self._live.hold(policy_version, {name: weight.rows for name, weight in named})
        if shard.number > 0:
            return None
        what = _rows_of(policy_version)
        far = {number: partial(self._ranks.receive, source=number, what=what) for number in self._far_shards}

        def finish() -> None:
            with _all_of(parts):
                for form, publication in parts:
                    receive_rows(publication, far)
                    publication.finish(policy_version, shard.num_shards, adapters=self._adapters(form))

        return finish

    def _copy_rows(
        self, parts: Sequence[tuple[PublishedForm, Publication]], policy_version: int, weights: list[WeightRows]
    ) -> Rest | None:
        """Copy this rank's rows in the memory of its machine. Return what sends the copy to rank 0."""
        if not self._held.shard.is_saved:
            return None
        send = partial(self._ranks.send, to=0, what=_rows_of(policy_version))
        copies: list[RowsCopy] = []
        try:
            for form, publication in parts:
                copies.append(RowsCopy())
                for name, weight in form.renamed(weights):
                    for start, data in publication.pieces(name, weight.rows, weight.first_row):
                        copies[-1].add(start, data)
        except Exception as error:  # rank 0 waits for the rows, or for the reason why there are none
            return partial(send_failure, send, error)

        def send_all() -> None:
            for copy in copies:
                copy.send(send)

        return send_all

    @cached_property
    def _far_shards(self) -> list[int]:
        """Numbers of the shards on other machines than that of rank 0. Rank `i` has shard `i` of the first copy of the
        model."""
        first = self._place * self._ranks.size
        near = next(node.numbers for node in trainer_nodes(self._config) if first in node.numbers)
        return [number for number in range(self._held.shard.num_shards) if first + number not in near]

    def _adapters(self, form: PublishedForm) -> AdaptersForm | None:
        """Return what a handle says about weights of this form, on rank 0, when their base is complete."""
        if form.part != "adapters":
            return None
        lora, targets = self._config.trainer.lora, targets_of(self._held.model)
        base = None if self._publisher is None else self._publisher.base()
        if base is None and not self._config.engine_serves_adapters:
            raise NotPublished("the weights to which the adapters are added could not be written")
        assert lora is not None and targets is not None
        return AdaptersForm(base=base, rank=lora.rank, alpha=lora.alpha, targets=targets)

    @remote_method()
    def read(self, directory: Path, policy_version: int) -> None:
        """Restore the state that `write` saved. Its version becomes `policy_version`."""
        self._held.read(directory)
        self._held.policy_version = policy_version

    @cached_property
    def _imitation(self) -> Imitation:
        """The warm start. No other process computes during it, so the actor's ranks share all cores."""
        num_sharing = sum(number < self._ranks.size for number in self._here)
        torch.set_num_threads(max(torch.get_num_threads(), num_usable_cpus() // num_sharing))
        return Imitation(self._model, self._ranks)

    @cached_property
    def _held(self) -> Learner:  # type: ignore[override] # only read
        """The learner. It is built after the warm start, which trains the whole model and leaves no optimizer state
        behind."""
        config = self._config
        return Learner(
            self._model,
            self._settings(self._model),
            max_staleness=config.scheduler.max_staleness,
            policy_version=self._first_version,
            max_tokens=max_trained_tokens(config),
            whole_step=config.trainer.groups_per_step * config.env.group_size,
            compute_dtype=self._dtype,
            measure_noise=config.scheduler.trigger.feedback.signal == "noise_scale",
            base=None if config.model.path == "tiny" or config.model.warm_start.steps else config.model.path,
            ranks=self._ranks,
            before_change=None if self._live is None else self._live.withdraw,
        )

    @cached_property
    def _forms(self) -> PublishedForms:
        """The forms of what is published. Adapters travel alone if the servers can add them to their weights."""
        config, model = self._config, self._held.model
        sends_adapters = config.sends_adapters and targets_of(model) is not None
        if config.engine_serves_adapters and not sends_adapters:
            raise ConfigError(
                f"trainer.lora.targets: {config.rollout.engine} serves adapters of linear layers only: use "
                "rollout.engine penstock, or servers at rollout.urls, which get whole weights"
            )
        whole = PublishedForm.of(
            self._model,
            dict(plain_parameters(model)),
            engine=config.rollout.engine,
            dtype=self._dtype,
            part="base" if sends_adapters else "merged",
        )
        return PublishedForms(whole, PublishedForm.of_adapters(model) if sends_adapters else None)


class PolicyCopyRank(TrainerRank, Generic[Held]):
    """A role with its own model, which started as a copy of the policy."""

    _kind: type[Held]
    _held: Held
    """Set by `begin`."""
    _loaded: PreTrainedModel
    """Set by `load`, removed by `begin`."""

    @remote_method()
    def load(self, directory: Path) -> None:
        """Load the policy in `directory`. Ranks do not wait for each other here, because rank 0 may read for longer
        than their timeout."""
        self._loaded = self._policy(directory)

    @remote_method()
    def begin(self) -> None:
        """Build the role's model from the loaded policy."""
        config = self._config
        self._held = self._kind(
            self._loaded,
            self._settings(self._loaded),
            max_staleness=config.scheduler.max_staleness,
            compute_dtype=self._dtype,
            ranks=self._ranks,
        )
        del self._loaded

    read = of_held(ModelRole.read)

    @remote_method(collect=sum)
    def busy_s(self) -> float:
        """Return the seconds of model compute since the last call, divided by the number of ranks: the sum over ranks
        is their mean."""
        return self._held.busy.take_seconds() / self._ranks.size


class CriticRank(PolicyCopyRank[Critic]):
    """One rank of the critic, which holds the value function."""

    _kind = Critic
    values = of_held(Critic.values, Mode.DP_COMPUTE, blocking=False)
    learn = of_held(Critic.learn, dispatch={"batch": PerRank()}, blocking=False)
    step = of_held(Critic.step, collect=first, blocking=False)


class ReferenceRank(PolicyCopyRank[Reference]):
    """One rank of the reference policy: the policy as it was when training began."""

    _kind = Reference
    logprobs = of_held(Reference.logprobs, dispatch={"batch": PerRank()}, blocking=False)
