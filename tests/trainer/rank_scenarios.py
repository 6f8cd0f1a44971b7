"""What ranks do in `test_ranks.py`: each scenario runs unchanged on one rank, in this process, or on several.

As a program this is one rank: `python rank_scenarios.py MODEL_DIR EXPERTS_DIR OUT_DIR RANK SIZE`. They meet in
`OUT_DIR`, and end with their input. What each scenario gave goes to `OUT_DIR/rank_<i>.pt`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_experts import EXPERT_MODELS
from made_roles import AllRoles
from made_samples import five_groups, with_drawn_experts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.groups.role import Rank
from penstock.model.files import has_weights
from penstock.model.load_policy import hollow_policy, load_policy, with_original_names
from penstock.trainer import output_layer
from penstock.trainer.prepare import prepare
from penstock.trainer.rank_balancing import Work, split_over_ranks
from penstock.trainer.ranks import RankLost, Ranks
from penstock.trainer.strategy import strategy_of
from penstock.trainer.warm_start import Imitation, warm_start

CPU = torch.device("cpu")
COPIES = {"name": "decoupled", "proximal": "snapshot", "proximal_every": 2, "kl_coef": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "max_grad_norm": 0.05, "tokens_per_microbatch": 64},
    "sequence": {"objective": {"name": "gspo"}, "scale_learning_rate": ["samples", "ess"]},
    "critic": {"critic": {"learning_rate": 1e-3}},
    "lora": {"lora": {"rank": 4}},
    "copies": {"objective": COPIES, "canaries": {"parity_every": 1}},
    "lora_copies": {"lora": {"rank": 4}, "objective": COPIES, "canaries": {"parity_every": 1}},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"critic": {"learning_rate": 1e-3}, "offload": ["optimizer"]},
    "noise": {},
    "chunked": {},
    "batch_mask": {"objective": {"name": "m2po"}, "tokens_per_microbatch": 64},
    "context": {"distributed": {"context_ranks": 2}, "activation_checkpointing": True},
    "context_copies": {
        "distributed": {"context_ranks": 2},
        "critic": {"learning_rate": 1e-3},
        "objective": COPIES,
        "canaries": {"parity_every": 1},
    },
    "context_mask": {"distributed": {"context_ranks": 2}, "objective": {"name": "m2po"}},
    "context_sequence": {"distributed": {"context_ranks": 4}, "objective": {"name": "gspo"}, "lora": {"rank": 4}},
}
"""Of the trainer, by scenario."""
HOW = ("activation_checkpointing", "offload", "tokens_per_microbatch", "distributed")
"""Settings that say how something is computed, and not what. One rank computes in the plainest way."""
NUM_DRAWN = 8


def drawn(number: int) -> dict[str, Any]:
    """Return settings of the trainer that were drawn at random."""
    draw = random.Random(number)
    name = draw.choice(["ppo", "cispo", "gspo", "tis", "decoupled"])
    objective = {
        "name": name,
        "normalize": draw.choice(["token", "sequence", "constant"]),
        "kl_coef": draw.choice([0.0, 0.1]),
        "proximal": "snapshot" if name == "decoupled" else "current",
    }
    return {
        "objective": objective,
        "critic": draw.choice([None, {"learning_rate": 1e-3}]),
        "lora": draw.choice([None, {"rank": 4}]),
        "canaries": {"parity_every": draw.choice([None, 1])},
        "activation_checkpointing": draw.random() < 0.5,
        "tokens_per_microbatch": draw.choice([16, 64, 8192]),
        "distributed": {"context_ranks": draw.choice([1, 2])},
        "offload": draw.choice([[], ["optimizer"]]),
    }


SETTINGS |= {f"drawn_{number}": drawn(number) for number in range(NUM_DRAWN)}
ALL_ROLES = {"critic": {"learning_rate": 1e-3}, "objective": {"kl_coef": 0.1}}
SAVED = ("critic", "copies", "lora_copies", "offloaded")
ROUNDED = ("all_roles", "lora_copies")
"""Which also compute in bfloat16."""
FEW = ("decay", "context", "context_sequence", "drawn_0", "drawn_1", "drawn_2")
"""What more than two ranks do: they share cores here."""
CHUNKED = ("chunked", "drawn_1", "drawn_3", "drawn_5")
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"tokens_per_microbatch": 64},
    "experts_recomputed": {"activation_checkpointing": True, "max_grad_norm": 0.05},
    "experts_copies": {"critic": {"learning_rate": 1e-3}, "objective": COPIES, "canaries": {"parity_every": 1}},
    "experts_lora": {"lora": {"rank": 4}, "objective": {"kl_coef": 0.1}},
    "experts_context": {"distributed": {"context_ranks": 2}, "activation_checkpointing": True},
    "experts_noise": {},
    "experts_replay": {"activation_checkpointing": True, "objective": COPIES, "canaries": {"parity_every": 1}},
    "experts_replay_context": {"activation_checkpointing": True, "distributed": {"context_ranks": 2}},
}
"""Of the trainer, by scenario, for a model with experts."""
EXPERTS = {name: {"learning_rate": 1e-3} | given for name, given in EXPERTS.items()}
RESUMED = {2: ("ddp_experts_1",), 4: ("ddp_experts_1", "spread_experts_2")}
"""Checkpoints from which so many ranks go on with spread experts."""
STRATEGIES = ("ddp", "fsdp")
NUM_STEPS = 3
WAIT_S = 60.0
"""How long a rank waits for the others in each call."""


def settings_of(num_ranks: int) -> tuple[str, ...]:
    """Which scenarios so many ranks play."""
    return tuple(SETTINGS) if num_ranks <= 2 else FEW


def strategies_of(num_ranks: int) -> tuple[str, ...]:
    """How so many ranks share the model. `hsdp`: `fsdp` with several groups of two ranks."""
    return STRATEGIES if num_ranks <= 2 else (*STRATEGIES, "hsdp")


def saved_of(num_ranks: int) -> tuple[str, ...]:
    """Of which they save checkpoints, and go on from those of others."""
    return SAVED if num_ranks <= 2 else ("critic",)


def of_experts(num_ranks: int) -> dict[str, tuple[str, ...]]:
    """Return which scenarios so many ranks play with experts, by strategy. `spread`: `fsdp` with expert parallelism."""
    match num_ranks:
        case 1:
            return {"ddp": tuple(EXPERTS)}
        case 2:
            return {
                "ddp": ("experts", "experts_replay"),
                "fsdp": ("experts", "experts_lora", "experts_replay"),
                "spread": tuple(EXPERTS),
            }
        case _:
            return {"spread_hsdp": ("experts_context", "experts_noise")}


@contextmanager
def in_chunks(*, wanted: bool) -> Iterator[None]:
    """Compute the logits of a few tokens at a time, if that is wanted."""
    usual = output_layer.CHUNK_ELEMENTS
    output_layer.CHUNK_ELEMENTS = 1000 if wanted else usual
    try:
        yield
    finally:
        output_layer.CHUNK_ELEMENTS = usual


def make_learner(
    ranks: Ranks, model_dir: Path, name: str, strategy: str, *, compute_dtype: torch.dtype = torch.float32
) -> AllRoles:
    torch.manual_seed(ranks.index)  # what is drawn at random must not differ
    knows_weights = strategy == "ddp" or ranks.is_first
    given = (SETTINGS | EXPERTS).get(name, ALL_ROLES)
    settings = (
        {"learning_rate": 1e-2, "warmup_steps": 0}
        | {key: value for key, value in given.items() if ranks.size > 1 or key not in HOW}
        | {"ranks": ranks.size, "distributed": {"strategy": "ddp" if strategy == "ddp" else "fsdp"}}
    )
    settings["distributed"]["context_ranks"] = context_ranks(name, ranks)
    if strategy.endswith("hsdp") and ranks.size > 2:
        settings["distributed"]["shard_ranks"] = 2
    settings["distributed"]["expert_parallel"] = strategy.startswith("spread") and ranks.size > 1
    return AllRoles(
        lambda: (
            load_policy(model_dir, weights=has_weights(model_dir), seed=0)
            if knows_weights
            else hollow_policy(model_dir)
        ),
        TrainerConfig.model_validate(settings),
        max_staleness=2,
        max_tokens=10,
        whole_step=20,
        measure_noise=name.endswith("noise"),
        base=str(model_dir),
        ranks=ranks,
        compute_dtype=compute_dtype,
    )


def context_ranks(name: str, ranks: Ranks) -> int:
    """How many of the ranks share their passes."""
    wanted = (SETTINGS | EXPERTS).get(name, {}).get("distributed", {}).get("context_ranks", 1)
    return min(wanted, ranks.size)


def part_of(batch: Batch, ranks: Ranks, work: Work, *, call: int, shared: int = 1) -> Batch:
    """This rank's part: balanced; then all of it rank 0's; then all of it the last one's; and so on. `shared`: ranks
    that share their passes, and so their part."""
    index, size = ranks.index // shared, ranks.size // shared
    match call % 3:
        case 0:
            return split_over_ranks(batch, size, work)[index]
        case 1:
            return batch if index == 0 else batch.select([])
        case _:
            return batch if index == size - 1 else batch.select([])


def train(
    learner: AllRoles,
    ranks: Ranks,
    *,
    steps: int,
    lagging: bool = False,
    in_turns: bool = False,
    experts: bool = False,
) -> list[dict[str, float]]:
    """The metrics of each step. Every step is two calls; `lagging`: its samples are of the version before. `in_turns`:
    between steps the device is others'. `experts`: samples have recorded ones."""
    metrics = []
    for step in range(steps):
        learner.resume()
        version = max(learner.policy_version - lagging, 0)
        groups = with_drawn_experts(five_groups()) if experts else five_groups()
        samples = [dataclasses.replace(s, versions=np.where(s.loss_mask, version, -1).astype(np.int32)) for s in groups]
        for call, part in enumerate((samples[:8], samples[8:])):
            batch = prepare(part, for_critic=True)[0]
            learner.accumulate(part_of(batch, ranks, learner.work(), call=step + call, shared=learner.num_sharing))
        metrics.append(learner.step().metrics)
        if in_turns:
            learner.release()
    return metrics


def scenario(ranks: Ranks, model_dir: Path, name: str, strategy: str, *, in_turns: bool = False) -> dict[str, Any]:
    learner = make_learner(ranks, model_dir, name, strategy)
    with in_chunks(wanted=name in CHUNKED and ranks.size > 1):
        own = {"lagging": "copies" in name, "experts": "replay" in name}
        metrics = train(learner, ranks, steps=NUM_STEPS, in_turns=in_turns, **own)
    return {"metrics": metrics, "weights": learner.named_weights()}


def rounded(ranks: Ranks, model_dir: Path, name: str, strategy: str) -> dict[str, Any]:
    """Steps that compute in bfloat16, with logits in chunks. Trained weights are float32."""
    learner = make_learner(ranks, model_dir, name, strategy, compute_dtype=torch.bfloat16)
    with in_chunks(wanted=True):
        metrics = train(learner, ranks, steps=1 if name == "all_roles" else 2, lagging="copies" in name)[-1]
    trained = {parameter.dtype for parameter in learner.learner.model.parameters() if parameter.requires_grad}
    return {
        "metrics": metrics,
        "served": {weight.dtype for weight in learner.named_weights().values()},
        "trained": trained,
    }


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the dtypes of the products of experts, with their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "grouped_mm" in str(func):
            tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
            self.dtypes |= {each.dtype for each in tensors if each.is_floating_point()}
        return made


def multiplied(ranks: Ranks, model_dir: Path, strategy: str) -> dict[str, Any]:
    """A step that computes experts in bfloat16."""
    learner = make_learner(ranks, model_dir, "experts", strategy, compute_dtype=torch.bfloat16)
    with Products() as products:
        metrics = train(learner, ranks, steps=1)[-1]
    trained = {parameter.dtype for parameter in learner.learner.model.parameters()}
    published = with_original_names(learner.learner.model, learner.named_weights())
    return {"metrics": metrics, "products": products.dtypes, "trained": trained, "published": set(published)}


def crowded(ranks: Ranks) -> dict[str, float]:
    """Experts of one rank that get all tokens, by architecture and by the function that computes them: the largest
    difference of results and gradients from those of all experts on one rank, as a share of the largest value."""
    settings = {"ranks": ranks.size, "distributed": {"strategy": "fsdp", "expert_parallel": True}}
    found = {}
    for config, function in itertools.product(EXPERT_MODELS, ("eager", "batched_mm", "grouped_mm")):
        torch.manual_seed(3)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        plain.set_experts_implementation(function)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.normal_(std=0.3)
        placed = copy.deepcopy(plain)
        strategy_of(placed, TrainerConfig.model_validate(settings), ranks, torch.float32).place(placed)
        hidden = torch.randn(ranks.size, 5, config.hidden_size, requires_grad=True)
        weights = torch.rand(ranks.size, 5, 2, requires_grad=True)
        own = [each[ranks.index].detach().clone().requires_grad_() for each in (hidden, weights)]
        chosen = torch.tensor([[0, 1]]).expand(5, 2)  # of rank 0
        whole, part = (model.model.layers[0].mlp.experts for model in (plain, placed))
        expected = torch.stack([whole(hidden[rank], chosen, weights[rank]) for rank in range(ranks.size)])
        expected.square().sum().backward()
        mine = part(own[0], chosen, own[1])
        mine.square().sum().backward()
        given = [
            (each.grad, all_of_it.grad[ranks.index]) for each, all_of_it in zip(own, (hidden, weights), strict=True)
        ]
        pairs = [(mine, expected[ranks.index]), *given]
        pairs += [(each.grad.full_tensor(), whole.get_parameter(name).grad) for name, each in part.named_parameters()]
        found[f"{config.model_type}, {function}"] = max(
            float(((one - other).abs().max() / other.abs().max()).detach()) for one, other in pairs
        )
    return found


def saved(ranks: Ranks, model_dir: Path, directory: Path, name: str, strategy: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more."""
    learner = make_learner(ranks, model_dir, name, strategy)
    train(learner, ranks, steps=2)
    directory.mkdir(exist_ok=True)
    learner.write(directory)
    return {"metrics": train(learner, ranks, steps=2), "weights": learner.named_weights()}


def resumed(ranks: Ranks, model_dir: Path, directory: Path, name: str, strategy: str) -> dict[str, Any]:
    """Two steps after another run's checkpoint; the steps before it leave no trace."""
    learner = make_learner(ranks, model_dir, name, strategy)
    train(learner, ranks, steps=1)
    learner.read(directory)
    return {"metrics": train(learner, ranks, steps=2), "weights": learner.named_weights()}


def poisoned(ranks: Ranks, model_dir: Path, strategy: str) -> dict[str, Any]:
    """A step in which one rank's samples make no sense."""
    learner = make_learner(ranks, model_dir, "plain", strategy)
    before = {name: weight.clone() for name, weight in learner.named_weights().items()}
    batch = part_of(prepare(five_groups(), for_critic=True)[0], ranks, learner.work(), call=0)
    if ranks.index == ranks.size - 1:
        batch.columns["advantages"] = np.full_like(batch["advantages"], np.nan)
    learner.accumulate(batch)
    skipped = learner.step().metrics["skipped"]
    after = learner.named_weights()
    return {"skipped": skipped, "same": all(torch.equal(before[name], after[name]) for name in before)}


def imitated(ranks: Ranks, model_dir: Path) -> dict[str, Any]:
    """Few demonstrations: with many ranks some have none."""
    model = load_policy(model_dir, weights=False, seed=0)
    imitation = Imitation(model, ranks)
    losses = []

    def step(batch: Batch, learning_rate: float) -> dict[str, float]:
        done = imitation.step(batch.chunk(ranks.size)[ranks.index], learning_rate)
        done = dict(zip(done, ranks.total(list(done.values()), "add up"), strict=True))
        losses.append(done["loss"])
        return done

    examples = [([2, 10 + i, 3, 10 + i, 4][: 4 + i % 2], [0, 0, 0, 1, 1][: 4 + i % 2]) for i in range(9)]
    warm_start(step, lambda: iter(examples), steps=3, batch_size=3, learning_rate=1e-2)
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def lost(ranks: Ranks, model_dir: Path) -> dict[str, Any]:
    """The last rank comes to no step."""
    learner = make_learner(ranks, model_dir, "plain", "ddp")
    learner.accumulate(part_of(prepare(five_groups(), for_critic=True)[0], ranks, learner.work(), call=0))
    if ranks.index == ranks.size - 1:
        print("waiting", flush=True)
        sys.stdin.read()
    start = time.monotonic()
    try:
        learner.step()
    except RankLost as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    raise AssertionError("the step went on without a rank")


def every(ranks: Ranks, model_dir: Path, experts_dir: Path, out: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """All scenarios of several ranks, by name. Those that resume read what fewer or more ranks left in `out`."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for strategy in strategies_of(ranks.size):
        for name in settings_of(ranks.size):
            found[f"{strategy}/{name}"] = lambda n=name, s=strategy: scenario(ranks, model_dir, n, s)
        for name in saved_of(ranks.size):
            found[f"{strategy}/in_turns/{name}"] = lambda n=name, s=strategy: scenario(
                ranks, model_dir, n, s, in_turns=True
            )
        found[f"{strategy}/poisoned"] = lambda s=strategy: poisoned(ranks, model_dir, s)
        for name in ROUNDED:
            found[f"{strategy}/rounded_{name}"] = lambda n=name, s=strategy: rounded(ranks, model_dir, n, s)
        for name in saved_of(ranks.size):
            directory = out / f"saved_{strategy}_{name}_{ranks.size}"
            found[f"{strategy}/saved/{name}"] = lambda d=directory, n=name, s=strategy: saved(ranks, model_dir, d, n, s)
            for origin in sorted(out.glob(f"saved_*_{name}_*")):
                found[f"{strategy}/resumed/{origin.name}"] = lambda d=origin, n=name, s=strategy: resumed(
                    ranks, model_dir, d, n, s
                )
    found |= every_of_experts(ranks, experts_dir, out)
    found["imitated"] = lambda: imitated(ranks, model_dir)
    if ranks.size > 1:
        found["lost"] = lambda: lost(ranks, model_dir)
    return found


def every_of_experts(ranks: Ranks, experts_dir: Path, out: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """The scenarios of a model with experts."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for strategy, names in of_experts(ranks.size).items():
        for name in names:
            found[f"{strategy}/{name}"] = lambda n=name, s=strategy: scenario(ranks, experts_dir, n, s)
        directory = out / f"saved_{strategy}_experts_{ranks.size}"
        found[f"{strategy}/saved/experts"] = lambda d=directory, s=strategy: saved(ranks, experts_dir, d, "experts", s)
        if strategy != "ddp":
            found[f"{strategy}/multiplied"] = lambda s=strategy: multiplied(ranks, experts_dir, s)
        if not strategy.startswith("spread"):
            continue
        if ranks.size == 2:
            found[f"{strategy}/poisoned"] = lambda s=strategy: poisoned(ranks, experts_dir, s)
            found[f"{strategy}/in_turns/experts"] = lambda s=strategy: scenario(
                ranks, experts_dir, "experts", s, in_turns=True
            )
        for origin in [out / f"saved_{each}" for each in RESUMED[ranks.size]]:
            found[f"{strategy}/resumed/{origin.name}"] = lambda d=origin, s=strategy: resumed(
                ranks, experts_dir, d, "experts", s
            )
    if ranks.size == 2:
        found["crowded"] = lambda: crowded(ranks)
    return found


def main(model_dir: Path, experts_dir: Path, out: Path, index: int, size: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(Rank(index, size), timeout_s=WAIT_S)
    ranks.join(out / f"rendezvous_{size}", CPU)
    results = {}
    for name, run in every(ranks, model_dir, experts_dir, out).items():
        results[name] = run()
        torch.save(results, out / f"rank_{index}_of_{size}.pt")
    sys.stdin.read()  # the others may still ask rank 0 who had come


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
