"""What no scheduler can beat: the samples per second that the modelled machines allow."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import Config
from penstock.simulator.workload import Population


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """X*, in trained samples per second, and what it is made of.

        generation = kept * servers / (E[L] * d(K, c) / K + E[P] * prefill_token_s)
        training   = 1 / (token_s * (E[L'] + E[prompt]) + (call_s + step_s + publish_s) / samples per step)
        X*         = min(generation, training),   or 1 / (1 / generation + 1 / training) on shared devices

    K is a server's slots, or as many as its memory holds at mean length; c the tokens that K sequences hold, each what
    comes before a token on the mean over all tokens; P the tokens of prompts and contexts to be computed; `kept` the
    share of played groups that the filter leaves, L' the answers of those.
    """

    generation: float
    training: float
    samples_per_s: float


def limit(config: Config, population: Population, *, kept: float, kept_tokens: float, shares_devices: bool) -> Limit:
    """X* of the devices in `config`; `kept_tokens` is E[L']."""
    generation = kept * _generation(config, population)
    training = _training(config, population.prompt_tokens + kept_tokens)
    both = 1 / (1 / generation + 1 / training) if shares_devices else min(generation, training)
    return Limit(generation=generation, training=training, samples_per_s=both)


def _generation(config: Config, population: Population) -> float:
    engine, slots = config.simulator.engine, float(config.rollout.slots)
    if engine.kv_tokens is not None:
        slots = min(slots, max(engine.kv_tokens / (population.prompt_tokens + population.mean_tokens), 1.0))
    token_s = (engine.step_s + engine.sequence_s * slots) / slots + engine.context_token_s * population.mean_context
    sample_s = population.mean_tokens * token_s + population.prefill_tokens * engine.prefill_token_s
    return config.rollout.num_servers / sample_s


def _training(config: Config, tokens: float) -> float:
    """Of samples with so many tokens, prompt included."""
    times, batch = config.simulator.trainer, config.trainer.groups_per_step * config.env.group_size
    sample_s = times.token_s * tokens + (times.call_s + times.step_s + times.publish_s) / batch
    return 1 / max(sample_s, 1e-12)
