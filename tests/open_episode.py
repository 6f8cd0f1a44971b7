"""An episode outside of any worker."""

from __future__ import annotations

from penstock.config import EnvironmentConfig
from penstock.envs.episode import Episode
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import EpisodeId, EpisodeLease, Sampling, SegmentGrant, Task

SEGMENTS = SegmentPolicy(max_new_tokens=4, segment_length=4, max_segment_count=1, global_max_length=4)


def open_episode(number: int, *, deadline_s: float) -> Episode:
    lease = EpisodeLease(episode=EpisodeId("train", number, 0, 0), env_seed=0, sampling_seed=0, deadline_s=deadline_s)
    grant = SegmentGrant(episode=lease.episode, max_tokens=4)
    return Episode(
        lease=lease,
        grant=grant,
        task=Task(task_id="t", tag="train", index=0),
        settings=EnvironmentConfig(),
        sampling=Sampling(),
        bounds=SEGMENTS,
        on_end=lambda episode: None,
    )
