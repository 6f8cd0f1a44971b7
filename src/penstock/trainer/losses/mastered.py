"""Which tokens there is nothing left to learn from."""

from __future__ import annotations

from torch import Tensor

from penstock.config import MasteredConfig
from penstock.trainer.losses.parts import sequence_mean


def mastered(
    logprobs: Tensor,  # [N]
    entropy: Tensor,  # [N], nats
    advantages: Tensor,  # [N]
    samples: Tensor,  # [N], number of the token's sample
    config: MasteredConfig,
) -> Tensor:
    """[N]: 1 on tokens at least `probability` likely, in samples with A > 0 whose mean entropy is below `entropy`.

    Dynamic masking of well-mastered positive tokens, UloRL (arXiv 2507.19766), section 3.3. Always masking raises
    entropy and never masking lets it fall; masking only below the threshold holds it there.
    """
    sure = logprobs.detach().exp() >= config.probability
    flat = sequence_mean(entropy, samples) < config.entropy
    return (sure & flat & (advantages > 0)).to(logprobs.dtype)
