"""Demonstrations for supervised fine-tuning, from chat-format or prompt/completion files, or from played episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.algorithms import SFT
from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.data.files.chat_rows import Demonstration, messages_of, record_rows, tools_of
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import DataError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows, padded_masks
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import ChatFormat
from mrlm_pl.settings import some_of


class TrajectoryDataModule(FixedDataModule):
    """Rows of demonstrations, shuffled in each epoch.

    A data row is one of

    - ``{"messages": [{"role": ..., "content": ...}, ...]}``: a chat; every assistant message is trained on,
      and a ``prompt`` in the same row is ignored;
    - ``{"prompt": [messages], "completion": [messages]}``: a chat; the completion's assistant messages are trained on;
    - ``{"prompt": "text", "completion": "text"}``: plain text without a chat template; the completion and the EOS token
      are trained on;
    - an episode, as ``mrlm collect`` and runs write them: the turns of all agents. The sampled tokens are kept as they
      are when the learner has the tokenizer and the chat template of the model that played. Failed episodes are left
      out.

    A chat may bring ``tools``, a list of schemas (``{"type": "function", "function": {"name": ..., ...}}``), and its
    replies ``tool_calls`` in OpenAI's form and ``reasoning_content``: the chat template renders them as for an agent
    with these tools.

    Rows are packed: a batch is one sequence without padding for the model families that allow it.

    Args:
        train: file (JSONL, JSON, CSV or Parquet, optionally .zst or .gz), a run's folder of episodes, or hub name.
        validation: source for the validation loop, in the same forms; None skips validation.
        test: source for ``mrlm test``, in the same forms; optional.
        batch_size: number of rows in a batch, on each rank.
        max_tokens: longest row in tokens; longer ones are left out and counted. None is the model's context window.
        filter_reward: lowest reward of the episodes to train on; None keeps all episodes.
        agents: agents of the episodes to train on; None is all.
        seed: seed of the shuffling; None is 0. The command passes ``--seed_everything``.

    Raises:
        DataError: a file is missing, or a row lacks its fields or an assistant message, has calls without a name, or a
            part that the chat template leaves out.
    """

    algorithms = (SFT,)
    unit = "row with an action token"
    form = "{messages}, {prompt, completion} or an episode"

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        batch_size: int = 32,
        max_tokens: int | None = None,
        seed: int | None = None,
        test: str | None = None,
        filter_reward: float | None = None,
        agents: list[str] | None = None,
    ) -> None:
        self.filter_reward, self.agents = filter_reward, agents
        super().__init__(train, validation, batch_size, max_tokens, seed, test)

    def of_row(self, row: Mapping[str, Any]) -> Demonstration:
        if (self.agents, self.filter_reward) != (None, None):
            raise ValueError("data.agents and data.filter_reward choose among episodes; leave them out for rows")
        return demonstration_of(row)

    def of_episodes(self, episodes: Sequence[Episode], source: str) -> list[Any]:
        least = self.filter_reward
        rewarded = [episode for episode in episodes if least is None or episode.reward >= least]
        if not rewarded:
            raise DataError(f"{source}: no episode has a reward of {least} or more; lower data.filter_reward")
        acting = [*dict.fromkeys(agent for episode in rewarded for agent in episode.trajectories)]
        chosen = some_of(acting, "data.", agents=self.agents)
        return [[row for row in episode.rows() if row.agent in chosen] for episode in rewarded]

    def tokenized(self, example: Demonstration | list[Trajectory]) -> list[Trajectory]:
        name, policy = self.learner()
        return demonstration_rows(example, policy.chat, name)

    def rows_of(self, example: Trajectory) -> Sequence[Trajectory]:
        return (example,) if example.num_actions else ()

    def tokenize(self) -> None:
        super().tokenize()
        self.algorithm().check_demonstrations({str(split): rows for split, rows in self.examples.items()})

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        rows = [self.examples[split][index] for index in chosen]
        numbers = list(range(len(rows)))
        batch = collate_rows(rows, numbers, numbers, numbers)
        batch.observation_mask = padded_masks([observation_mask(row) for row in rows])
        return {self.learner()[0]: batch}

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        observed = [sum(observation_mask(self.examples[split][index])) for index in update]
        answered = float(sum(count > 0 for count in observed))
        observations = BatchTotals(float(sum(observed)), answered, answered)
        return super().totals(split, update) | {f"{self.learner()[0]}/observations": observations}


def observation_mask(row: Trajectory) -> list[bool]:
    """Return a mask that is True for the environment's answers: tokens after the first action that are no actions."""
    first = row.action_mask.index(True) if any(row.action_mask) else len(row.action_mask)
    return [index > first and not acts for index, acts in enumerate(row.action_mask)]


def demonstration_of(row: Mapping[str, Any]) -> Demonstration:
    """Return the demonstration in a data row.

    Raises:
        ValueError: the row has a fault.
    """
    if "messages" in row:
        prompt, completion = [], row["messages"]
    elif "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if not prompt:
            raise ValueError("the prompt is empty")
        if isinstance(prompt, str) and isinstance(completion, str):
            return Demonstration.of_text(prompt, completion, row.get("tools"))
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ValueError("prompt and completion must both be text, or both lists of {role, content}")
    else:
        raise ValueError(f"it lacks the field {'completion' if 'prompt' in row else 'messages'!r}")
    given, shown = messages_of(prompt), messages_of(completion)
    acting = [index for index, message in enumerate(shown) if message.role == "assistant"]
    unweighted = [index for index in acting if completion[index].get("weight") == 0]
    if unweighted != acting[: len(unweighted)]:
        raise ValueError(
            "a message of weight 0 follows an assistant message that is trained on; give each of these a row of its "
            "own, with all messages before it as `prompt` and itself as `completion`"
        )
    first = unweighted[-1] + 1 if unweighted else 0
    demonstration = Demonstration([*given, *shown[:first]], shown[first:], tools=tools_of(row.get("tools")))
    if not any(message.role == "assistant" for message in demonstration.shown):
        raise ValueError("it has no assistant message to learn from")
    if demonstration.messages[0].role == "assistant":
        raise ValueError("it begins with an assistant message, which answers nothing")
    return demonstration


def demonstration_rows(example: Demonstration | list[Trajectory], chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Return the token rows of a data row, several for a template that rewrites history, or of an episode's rows."""
    return record_rows(example if isinstance(example, list) else (example,), chat, policy)
