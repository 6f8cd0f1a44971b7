"""Actor, and critic and reference if there are any, as one: what they tell each other, wherever each of them is.

```
 batch ─► dealt over ranks ─► reference.logprobs ─► critic.values ─► advantages ─► critic.learn   (beside each other,
                                                                               └─► actor.accumulate  where they can be)
```

Every role has as many ranks as the actor, and rank i of each sees the same samples. The calls are the same wherever
roles are placed, and so are their results.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.groups.fused import Roles
from penstock.trainer.critic import appraised
from penstock.trainer.dealing import dealt
from penstock.types import LearnerState, WeightsHandle

SEEN = ("token_ids", "loss_mask", "versions")
"""Columns from which critic and reference say what they think of tokens."""


class ActorCritic:
    """Drives the groups: calls like those of one rank's `Learner`, for all ranks of all roles."""

    def __init__(self, roles: Roles, config: TrainerConfig) -> None:
        """`roles`: `actor`, and of `critic` and `reference` those that are needed."""
        self._roles, self._config = roles, config
        self._actor: Any = roles.actor
        self._critic: Any = getattr(roles, "critic", None)
        self._reference: Any = getattr(roles, "reference", None)
        self._beside: list[Any] = [role for role in (self._critic, self._reference) if role is not None]
        self.policy_version = 0
        """That is trained."""
        self._beside_s = 0.0
        """Model compute of other roles than the actor since the last step."""
        self._has_begun = self._is_released = False

    def imitate(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """One step of the warm start."""
        done: dict[str, float] = self._actor.imitate(batch, learning_rate)
        return done

    def begin(self, policy_version: int, directory: Path) -> None:
        """The policy as it is now has this version, and the others begin as what it is. It is handed to them in
        `directory`, which all ranks see; nothing is left there."""
        self._actor.begin(policy_version)
        self.policy_version = policy_version
        if self._beside:
            try:
                self._actor.write_policy(directory)
                self._begin_beside(directory)
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def accumulate(self, batch: Batch) -> dict[str, float]:
        """See `Learner.accumulate`; the batch is one from `prepare`."""
        hands = self._dealt(batch)
        seen = [hand.keep(SEEN) for hand in hands]
        logprobs = self._reference.logprobs(seen, self.policy_version) if self._reference else None
        values = self._critic.values(seen) if self._critic else None
        if logprobs is not None:
            hands = [hand.union(known) for hand, known in zip(hands, logprobs.result(), strict=True)]
        learning = None
        if values is not None and self._config.critic is not None:
            hands = [
                appraised(hand, known["values"], self._config.critic)
                for hand, known in zip(hands, values.result(), strict=True)
            ]
            learning = self._critic.learn(hands, self.policy_version)
        counted: dict[str, float] = self._actor.accumulate(hands)
        if learning is not None:
            learning.result()
        return counted | {"busy_s": self._over_places(counted["busy_s"] + self._told())}

    def step(self) -> LearnerState:
        """See `Learner.step`; what the critic has to say of its own step is among the metrics."""
        learnt = self._critic.step() if self._critic else None
        state: LearnerState = self._actor.step()
        metrics = state.metrics | (learnt.result() if learnt is not None else {})
        self._told()
        metrics["busy_s"] = self._over_places(metrics["busy_s"] + self._beside_s)
        self._beside_s, self.policy_version = 0.0, state.policy_version
        return replace(state, metrics=metrics)

    def publish(self) -> WeightsHandle:
        """Write the weights as servers load them."""
        handle: WeightsHandle = self._actor.publish()
        return handle

    def write(self, directory: Path) -> None:
        """Write everything that decides the future, at the last step boundary, as files."""
        for role in (self._actor, *self._beside):
            role.write(directory)

    def read(self, directory: Path, policy_version: int) -> None:
        """Go back to what `write` wrote, wherever roles were placed then; it counts as `policy_version` from now on."""
        self._actor.read(directory, policy_version)
        if not self._has_begun:
            self._begin_beside(directory)
        for role in self._beside:
            role.read(directory)
        self._told()
        self.policy_version, self._beside_s = policy_version, 0.0

    def release(self) -> None:
        """Let others have the devices of all roles until `resume`: what is held there waits in their machines' memory,
        from where it can be published and written."""
        if self._is_released:
            return
        for role in (self._actor, *self._beside):
            role.release()
        self._is_released = True

    def resume(self) -> None:
        """Take them back, before anything is computed or read."""
        if not self._is_released:
            return
        for role in (self._actor, *self._beside):
            role.resume()
        self._is_released = False

    def close(self) -> None:
        """End all ranks of all roles."""
        self._roles.close()

    def _begin_beside(self, directory: Path) -> None:
        """The other roles, as the policy in `directory`."""
        for role in self._beside:
            role.load(directory)
            role.begin()
        self._has_begun = True

    def _told(self) -> float:
        """Seconds of model compute that other roles than the actor have not told of."""
        told = sum(float(role.busy_s()) for role in self._beside)
        self._beside_s += told
        return told

    def _over_places(self, seconds: float) -> float:
        """The mean over all processes, of the sum over roles of the mean over ranks."""
        return seconds / self._roles.num_places

    def _dealt(self, batch: Batch) -> list[Batch]:
        """By rank."""
        num_ranks = self._actor.size
        return dealt(batch, num_ranks, self._attention_per_token) if num_ranks > 1 else [batch]

    @cached_property
    def _attention_per_token(self) -> float:
        found: float = self._actor.attention_per_token()
        return found
