"""A manager that shows the policy its own notes instead of the conversation: what a long-running agent does when its
history no longer fits."""

from penstock.ports.episode_manager import ManagedEpisode


class Notes:
    """Keeps the guesses that were too low and too high. Each turn begins a new prompt: the task, and the notes."""

    async def play(self, episode: ManagedEpisode) -> None:
        task, _ = await episode.reset()
        notes = {"higher": "", "lower": ""}
        while True:
            prompt = f"{task} >{notes['higher']} <{notes['lower']}"
            answer = await episode.answer([{"role": "user", "content": prompt}])
            outcome = await episode.step(answer)
            if outcome.terminated or outcome.truncated:
                return
            if outcome.observation in notes:
                notes[str(outcome.observation)] = answer.text
