"""Router replay: the learner computes each token with the experts with which the engine has computed it (R3, arXiv
2510.11370).

A layer with experts chooses them by one `torch.topk` over a score for each expert. While such a layer runs, that call
returns the recorded experts, with their own scores. So the weights of the experts and their gradients are those of the
learner's router, normalised as the architecture does it. Tokens without a record keep the router's choice.

The record of a pass stays in force until the next pass. So layers that are computed again in the backward pass, with
activation checkpointing, get the same experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.model.experts import ExpertLayer, expert_layers, recording
from penstock.trainer.packing import EXPERTS
from penstock.trainer.ranks import Ranks

logger = logging.getLogger(__name__)

ATTRIBUTE = "router_replay"
"""Where a model holds its replay, so that copies of the model have their own."""
TOPKS = (torch.topk, torch.Tensor.topk)
TRIED_TOKENS = 4


class RouterReplay:
    """The routers of a model, which can be made to repeat recorded choices."""

    def __init__(self, model: PreTrainedModel, layers: list[ExpertLayer]) -> None:
        self._model, self._layers = model, layers
        self._num_experts = layers[0].num_experts
        self.num_chosen = 0
        """Experts of a token in a layer; 0 if they cannot be chosen for the routers."""
        self.forced: Tensor | None = None  # [num_tokens, num_layers, k], -1 where a router chooses; None: everywhere
        """What is in force."""
        for number, layer in enumerate(layers):
            layer.block.forward = partial(self._run, number, layer.block.forward)

    def check(self, computing: Callable[[], AbstractContextManager[None]], ranks: Ranks) -> None:
        """Find out whether the routers do as they are told, by a pass over a few tokens. If not, they keep their own
        choices, and the log says so. `computing`: the context of passes. All ranks must call this."""
        with torch.no_grad(), computing():
            own = self._tried(None)
            obey = len({each.shape for each in own}) == 1
            if obey:
                wanted = (torch.stack(own, dim=1) + 1) % self._num_experts
                found = self._tried(wanted)
                obey = all(map(torch.equal, found, wanted.unbind(dim=1)))
        if ranks.total([float(obey)], "see if routers do as they are told") == [float(ranks.size)]:
            self.num_chosen = own[0].shape[-1]
        else:
            logger.warning(
                "the experts of a %s model cannot be chosen for its routers: trainer.router_replay does nothing",
                self._model.config.model_type,
            )

    def records(self, batch: Batch) -> npt.NDArray[np.int16] | None:
        """Return the recorded experts of a batch's tokens, [S, num_layers, k], -1 where none are. None without any.

        Foreign engines may also record layers that have no experts.
        """
        if not self.num_chosen or EXPERTS not in batch.names:
            return None
        numbers = [layer.number for layer in self._layers]
        num_layers = int(self._model.config.get_text_config().num_hidden_layers)
        lengths = [np.size(ids) for ids in batch["token_ids"]]
        found = np.full((sum(lengths), len(numbers), self.num_chosen), -1, dtype=np.int16)
        end = 0
        for num_tokens, flat in zip(lengths, batch[EXPERTS], strict=True):
            rows, end, known = found[end : end + num_tokens], end + num_tokens, None
            if flat.size == rows.size:
                known = flat.reshape(rows.shape)
            elif flat.size == num_tokens * num_layers * self.num_chosen:
                known = flat.reshape(num_tokens, num_layers, self.num_chosen)[:, numbers]
            if known is not None:
                np.copyto(rows, known, where=known < self._num_experts, casting="unsafe")
        return found if lengths else None

    def _tried(self, experts: Tensor | None) -> list[Tensor]:
        """Return the experts of a few tokens that a pass computes: of each layer, [num_tokens, k]."""
        ids = torch.arange(TRIED_TOKENS, device=self._model.device)[None]
        with restoring(self._model), recording(self._layers) as found:
            self.forced = experts
            self._model(input_ids=ids, use_cache=False)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator] # the record changes from pass to pass
    def _run(self, number: int, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Compute a block with the experts that are in force for it."""
        if self.forced is None:
            return forward(*given, **named)
        with _Chosen(self.forced[:, number], self._num_experts):
            return forward(*given, **named)


class _Chosen(TorchFunctionMode):
    """Makes `topk` over the scores of experts return given ones."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """`experts`: [num_tokens, k]. `topk` chooses all experts of a token of which one is -1, or one is there
        twice."""
        super().__init__()
        ordered = experts.sort(dim=-1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)
        self._is_given, self._experts = (ordered[:, 0] >= 0) & ~twice, experts
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPKS:
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._num_experts or found.indices.numel() != self._experts.numel():
            return found  # of groups of experts
        given, is_given = self._experts.view_as(found.indices), self._is_given.view(*found.indices.shape[:-1], 1)
        chosen = torch.where(is_given, given.long(), found.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def replay_of(model: Any) -> RouterReplay | None:
    """Return the replay of a model, if it has one."""
    found: RouterReplay | None = getattr(model, ATTRIBUTE, None)
    return found


def install(model: Any) -> None:
    """Make it possible to choose the experts of a model. A dense model stays as it is."""
    if layers := expert_layers(model):
        setattr(model, ATTRIBUTE, RouterReplay(model, layers))


def force(model: Any, experts: Tensor | None) -> None:
    """Make the next pass of a model compute its tokens with these experts; None: with those that its routers choose."""
    if (replay := replay_of(model)) is not None:
        replay.forced = experts


@contextmanager
def restoring(model: Any) -> Iterator[None]:
    """Restore after the body what is in force now, for the backward pass of the pass before."""
    replay = replay_of(model)
    forced = None if replay is None else replay.forced
    try:
        yield
    finally:
        force(model, forced)
