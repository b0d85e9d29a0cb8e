"""The snapshots that sample some of a run's turns: when they are taken, their weights and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from mrlm_pl.engines import Engine, Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.contract import RolloutLearner
from mrlm_pl.policy.snapshot import Snapshot
from mrlm_pl.rollout.cross_policy import CrossPolicy, slot_name
from mrlm_pl.rollout.turn_tree import distinct_turns


class StaleSnapshots:
    """The snapshots of every trained policy of a run.

    They are made in the first iteration, and are the same on all ranks.

    Args:
        options: see :class:`CrossPolicy`.
    """

    def __init__(self, options: CrossPolicy) -> None:
        self.options = options
        self._slots: dict[str, list[Snapshot]] = {}
        self._iteration = -1
        self._restored: dict[str, Any] | None = None
        self._loaded: dict[str, int] = {}

    def check(self, learner: RolloutLearner, trainer: Trainer, sampling: Sampling) -> None:
        """Validate that a run can train on stale turns.

        Raises:
            ConfigurationError: it cannot; the message has the reason and the remedy.
        """
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ConfigurationError(
                f"data.cross_policy cannot copy weights that {type(trainer.strategy).__name__} splits over processes; "
                "use one device or `--trainer.strategy ddp`, or leave it out"
            )
        named = [name for name in learner.policies if "@" in name]
        if named:
            raise ConfigurationError(
                f"data.cross_policy names snapshots POLICY@VERSION, and policy {named[0]!r} has such a name; rename it"
            )
        if not learner.weighs_sampler(sampling):
            raise ConfigurationError(
                f"data.cross_policy: {type(learner).__name__} would learn from a snapshot's turns as if the current "
                "weights had sampled them; give it a correction (`model.correction: {kind: truncated}`), or where its "
                "loss has a ratio `model.recompute_old_logp: false`"
            )

    def covers(self, learner: RolloutLearner, policy: str) -> bool:
        """Whether a policy has snapshots; trained ones do."""
        return learner.policy(policy).trained

    def begin(self, learner: RolloutLearner, iteration: int, version: int) -> None:
        """Take the snapshots that are due at the beginning of an iteration; asking again changes nothing."""
        if not self._slots:
            self._make(learner, version)
        if iteration <= self._iteration:
            return
        self._iteration = iteration
        if iteration and iteration % self.options.refresh == 0:
            for name, slots in self._slots.items():
                min(slots, key=lambda slot: slot.version).take(learner.policy(name), version)

    def load_into(self, engine: Engine) -> None:
        """Give an engine the snapshots that have changed since it was given them."""
        for policy, slots in self._slots.items():
            for number, slot in enumerate(slots):
                name = slot_name(policy, number)
                if self._loaded.get(name) != slot.version:
                    engine.load(name, slot.network, slot.version)
                    self._loaded[name] = slot.version

    def metrics(self, episodes: Sequence[Episode], version: int) -> dict[str, tuple[float, float]]:
        """(sum, count) of the share of stale turns, and of how many optimizer steps old their snapshots are.

        Args:
            episodes: of a collection.
            version: of the weights that learn from it.
        """
        played = [episode for episode in episodes if not episode.failed]
        turns = [(turn, row) for turn, row in distinct_turns(played) if row.policy in self._slots]
        ages = [version - turn.version for turn, row in turns if turn.policy != row.policy]
        found = {"rollout/stale_turns": (float(len(ages)), max(float(len(turns)), 1.0))}
        if ages:
            found["rollout/stale_age"] = (float(sum(ages)), float(len(ages)))
        return found

    def state(self) -> dict[str, Any] | None:
        """All snapshots with their weights, for the checkpoint; None before there are any."""
        if not self._slots:
            return self._restored
        slots = {name: [slot.state() for slot in slots] for name, slots in self._slots.items()}
        return {"iteration": self._iteration, "slots": slots}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Take over what :meth:`state` gave; of snapshots that are too many now the oldest leave."""
        self._slots, self._restored = {}, state

    def close(self) -> None:
        """Release the networks, keeping their state; they are built again on demand."""
        self._restored, self._slots, self._loaded = self.state(), {}, {}

    def _make(self, learner: RolloutLearner, version: int) -> None:
        restored: Mapping[str, Any] = self._restored or {"iteration": -1, "slots": {}}
        self._iteration, self._restored = restored["iteration"], None
        for name in learner.policies:
            if not self.covers(learner, name):
                continue
            policy, count = learner.policy(name), self.options.snapshots
            slots = self._slots[name] = [Snapshot(policy, version) for _ in range(count)]
            saved = restored["slots"].get(name, [])
            if len(saved) != count:
                saved = sorted(saved, key=lambda item: item["version"])[-count:]
                saved = saved[:1] * (count - len(saved)) + saved
            for slot, item in zip(slots, saved, strict=False):
                slot.load_state(item)
