"""The output layer in chunks: log-probabilities and entropies of tokens, without the logits of all tokens at once.

With a large vocabulary the logits of a long answer need more memory than the rest of the model: 20 GB in float32 for
32k tokens and 150k entries. Here they are computed for some tokens at a time, and again in the backward pass. So the
peak does not depend on the number of tokens. This is the output layer of prime-rl, and of Liger's fused cross entropy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import Linear, Module
from transformers.modeling_outputs import MoeModelOutputWithPast

CHUNK_ELEMENTS = 2**26
"""Number of logits in a chunk, in float32. A chunk in half precision has twice as many."""
PROBE_WIDTH = 8
"""Width and vocabulary of the small output layer that shows what a model does to its logits."""
NAMED_FACTORS: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda value: value,  # Cohere
    "logits_scaling": lambda value: 1.0 / value,  # Granite
    "lm_head_multiplier": lambda value: value,  # Falcon-H1
}
"""The factor with which a model multiplies its logits, by the name of the setting and as a function of its value."""
NAMED_CAPS = ("final_logit_softcapping", "logits_soft_cap")

logger = logging.getLogger(__name__)


def needs_chunks(num_tokens: int, vocab: int) -> bool:
    """Return whether the logits of so many tokens are better computed in chunks."""
    return num_tokens * vocab > CHUNK_ELEMENTS


class Scaling(NamedTuple):
    """What a model does to the logits of its output layer: `cap * tanh(factor * logits / cap)`."""

    factor: float = 1.0
    cap: float | None = None
    """None: no cap."""

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits if self.factor == 1.0 else logits * self.factor
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


class OutputLayer(NamedTuple):
    """The output layer of a model, and what the model does to its logits."""

    head: Linear
    scaling: Scaling
    is_compiled: bool = False
    """Whether all that is computed between the matrix products is compiled."""

    @classmethod
    def of(cls, model: Any) -> OutputLayer | None:
        """Return the output layer of a model. None if it is no plain linear layer, or if the model does something else
        to its logits: then they must be computed by the model itself."""
        head = model.get_output_embeddings()
        if type(head) is not Linear or not any(child is head for child in model.children()):
            return None
        if model not in _SCALINGS:
            _SCALINGS[model] = _scaling_of(model)
        scaling = _SCALINGS[model]
        return cls(head, scaling, is_compiled=model in _COMPILED) if scaling is not None else None

    def statistics(
        self,
        hidden: Tensor,  # [num_tokens, width]
        chosen: Tensor,  # [num_tokens], token ids
        *,
        temperature: float | Tensor = 1.0,  # of all tokens, or [num_tokens]
    ) -> tuple[Tensor, Tensor]:
        """Return (log pi(chosen), H(pi)), both [num_tokens] in float32, as `token_statistics` does."""
        divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        arguments = (hidden, self.head.weight, self.head.bias, chosen, divisor, self.scaling, self.is_compiled)
        found: tuple[Tensor, Tensor] = _Chunks.apply(*arguments)  # type: ignore[no-untyped-call]
        return found


def gathered(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log pi(chosen), H(pi)) with pi = softmax(logits). `logits`: [n, vocab] in float32; `chosen`: [n]."""
    log_pi = torch.log_softmax(logits, dim=-1)
    del logits  # frees their memory before the next large tensor
    return log_pi.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropies(log_pi.detach())


def entropies(log_pi: Tensor) -> Tensor:
    """Return the entropy of each row of log-probabilities, in nats. [n, vocab] -> [n]"""
    return torch.cat([_entropies(log_pi[rows]) for rows in _chunks(log_pi)])


def compile_output_layer(model: Any) -> None:
    """Compile what lies between the products of the output layer of `model`, when it is first used."""
    _COMPILED.add(model)


class _Chunks(torch.autograd.Function):
    """Log-probabilities and entropies from hidden states. Only the log-probabilities carry a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [num_tokens, width], in the dtype of the product
        weight: Tensor,  # [vocab, width]
        bias: Tensor | None,  # [vocab]
        chosen: Tensor,  # [num_tokens]
        divisor: float | Tensor,  # [num_tokens, 1]
        scaling: Scaling,
        is_compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, chosen, divisor if isinstance(divisor, Tensor) else None)
        ctx.divisor, ctx.scaling, ctx.is_compiled = divisor, scaling, is_compiled
        used = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        statistics = _compiled(_statistics) if is_compiled else _statistics
        parts = [
            statistics(nn.functional.linear(hidden[rows], *used), chosen[rows], _of_rows(divisor, rows), scaling)
            for rows in _chunks(hidden, len(weight))
        ]
        logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, chosen, divisors = ctx.saved_tensors
        divisor, scaling = ctx.divisor if divisors is None else divisors, ctx.scaling
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        used = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        flows = _compiled(_flow) if ctx.is_compiled else _flow
        for rows in _chunks(hidden, len(weight)):
            part = hidden[rows]
            flow = flows(
                nn.functional.linear(part, *used), chosen[rows], _of_rows(divisor, rows), scaling, grad[rows, None]
            )
            if grad_hidden is not None:
                torch.mm(flow, used[0], out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += flow.T @ part
            if grad_bias is not None:
                grad_bias += flow.sum(dim=0)
        return grad_hidden, _like(grad_weight, weight), _like(grad_bias, bias), None, None, None, None


def _like(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(parameter.dtype)


def _statistics(
    product: Tensor,  # [n, vocab], of hidden states and weights, in their dtype
    chosen: Tensor,  # [n]
    divisor: float | Tensor,  # [n, 1]
    scaling: Scaling,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of a chunk, both [n] in float32."""
    log_pi = torch.log_softmax(_divided(scaling(product.float()), divisor), dim=-1)
    return log_pi.gather(1, chosen[:, None])[:, 0], _entropies(log_pi)


def _flow(product: Tensor, chosen: Tensor, divisor: float | Tensor, scaling: Scaling, grad: Tensor) -> Tensor:
    """Return the gradient of a chunk's products from that of its log-probabilities, [n, 1], in the products' dtype."""
    logits = scaling(product.float())
    slope = None if scaling.cap is None else 1.0 - (logits / scaling.cap) ** 2
    pi = torch.softmax(_divided(logits, divisor), dim=-1)
    del logits
    of_chosen = 1.0 - pi.gather(1, chosen[:, None])  # d log pi(chosen) / d logits = one-hot - pi
    grad = _divided(grad * scaling.factor, divisor)
    flow, of_chosen = pi.neg_().mul_(grad), of_chosen * grad
    if slope is not None:
        flow, of_chosen = flow.mul_(slope), of_chosen * slope.gather(1, chosen[:, None])
    return flow.to(product.dtype).scatter_(1, chosen[:, None], of_chosen.to(product.dtype))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _entropies(log_pi: Tensor) -> Tensor:
    return -log_pi.exp().mul_(log_pi).nan_to_num_(nan=0.0).sum(dim=-1)  # 0 * log 0 = 0


def _of_rows(divisor: float | Tensor, rows: slice) -> float | Tensor:
    return divisor[rows] if isinstance(divisor, Tensor) else divisor


def _divided(values: Tensor, divisor: float | Tensor) -> Tensor:
    return values / divisor if isinstance(divisor, Tensor) or divisor != 1.0 else values


def _chunks(values: Tensor, vocab: int | None = None) -> Iterator[slice]:
    """Yield the rows of each chunk of `values`, [n, width]; one empty chunk if there is no row."""
    elements = CHUNK_ELEMENTS * torch.float32.itemsize // values.dtype.itemsize
    size = max(elements // (vocab or values.shape[1]), 1)
    for start in range(0, max(len(values), 1), size):
        yield slice(start, start + size)


def same_as(model: Any, other: Any) -> None:
    """Let `model` do to its logits what `other` does, as far as `OutputLayer.of` found that out, without a probe."""
    if other in _SCALINGS:
        _SCALINGS[model] = _SCALINGS[other]


_SCALINGS: WeakKeyDictionary[Module, Scaling | None] = WeakKeyDictionary()
"""Results of `_scaling_of`."""
_COMPILED: WeakSet[Module] = WeakSet()
"""Models for which `compile_output_layer` was called."""


def _scaling_of(model: Any) -> Scaling | None:
    """Return what a model does to its logits, by its settings, if a probe shows just that. None: something else."""
    config = model.config.get_text_config()
    factors = [factor(value) for name, factor in NAMED_FACTORS.items() if (value := getattr(config, name, None))]
    cap = next((value for name in NAMED_CAPS if (value := getattr(config, name, None))), None)
    candidates = dict.fromkeys((Scaling(factors[0] if factors else 1.0, cap), Scaling()))
    with torch.no_grad():
        found = next((each for each in candidates if _is_shown(model, each)), None)
    if found is None:
        logger.warning(
            f"{type(model).__name__} does more to its logits than to scale or cap them, as far as a probe shows: it "
            "computes them for all tokens at once, which takes much memory for long answers"
        )
    return found


def _is_shown(model: Any, scaling: Scaling) -> bool:
    """Return whether the model does this to the logits of its output layer. A small layer takes the place of the output
    layer, and known hidden states that of the body."""
    head = model.get_output_embeddings()
    (name,) = [name for name, child in model.named_children() if child is head]
    others = [name for name, child in model.named_children() if child is not head]
    body = model.base_model_prefix if model.base_model_prefix in others else others[0]
    hidden = torch.linspace(-PROBE_WIDTH, PROBE_WIDTH, PROBE_WIDTH * PROBE_WIDTH).view(1, PROBE_WIDTH, PROBE_WIDTH)
    same = Linear(PROBE_WIDTH, PROBE_WIDTH, bias=False)
    same.weight.copy_(torch.eye(PROBE_WIDTH))
    cls: Any = next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))
    stand_in = cls.__new__(cls)
    Module.__init__(stand_in)
    vars(stand_in).update({key: value for key, value in vars(model).items() if key not in vars(Module())})
    stand_in.add_module(body, _Body(hidden, getattr(model, body)))
    stand_in.add_module(name, same)
    try:
        logits = stand_in.eval()(input_ids=torch.zeros(1, PROBE_WIDTH, dtype=torch.long), use_cache=False).logits
    except Exception:  # the model does more than its body and its output layer do
        return False
    return bool(torch.allclose(logits.float(), scaling(hidden), rtol=1e-5))


class _Body(Module):
    """Stands for the body of a model, and has its numbers."""

    def __init__(self, hidden: Tensor, body: Module) -> None:
        super().__init__()
        self._hidden, self._real = hidden, [body]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real[0], name)
        if not isinstance(value, int | float | str):
            raise AttributeError(name)
        return value

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return _Shown(last_hidden_state=self._hidden)


class _Shown(MoeModelOutputWithPast):
    """The output of any body: what it lacks is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
