"""What a worker tells of a group."""

from __future__ import annotations

from penstock.ports.work import Work
from penstock.processes.group_progress import MAX_TEXT, GroupProgress
from penstock.samples import Trajectory
from penstock.types import EpisodeId, Sampling, Task


def progress(*, keep_text: bool) -> GroupProgress:
    work = Work(
        task=Task(task_id="t", tag="eval", index=0, purpose="eval" if keep_text else "train"),
        group=3,
        attempt=0,
        group_size=3,
        members=(0, 1, 2),
        max_tokens=(8, 8, 8),
        env_seed=1,
        sampling_seed=1,
        deadline_s=9.0,
        sampling=Sampling(),
        keep_text=keep_text,
    )
    group = GroupProgress(work=work, saves_cut=False)
    for member in range(3):
        episode = EpisodeId("eval", 3, member, 0)
        ended = Trajectory(episode=episode, task_id="t", turns=[], reward=0.0, status="completed")
        group.keep(ended, f"{member}" * 10_000_000)
    return group


def test_only_the_first_answer_is_told_and_only_its_beginning() -> None:
    texts = [summary.text for summary in progress(keep_text=True).summaries([0, 1, 2])]
    assert texts == ["0" * MAX_TEXT + "... (10000000 characters)", None, None]
    assert [summary.text for summary in progress(keep_text=False).summaries([0, 1, 2])] == [None] * 3


def test_a_trajectory_without_turns_is_one_sample_in_every_formulation() -> None:
    group = progress(keep_text=False)
    for formulation in ("trajectory", "step"):
        samples = group.formulated(formulation)
        assert [(sample.episode, len(sample.token_ids)) for sample in samples] == [(0, 0), (1, 0), (2, 0)]
