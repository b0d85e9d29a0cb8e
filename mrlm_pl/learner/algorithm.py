"""The base class of all algorithms: seats, the optimizer, checks that stop a broken run, the export of policies."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrlm_pl.episode import Trajectory
from mrlm_pl.errors import ConfigurationError, NonFiniteError
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.contract import RolloutFacts, RolloutLearner
from mrlm_pl.learner.critics import Critic
from mrlm_pl.learner.metrics import Metrics, UpdateRows, on_evaluation_bar, on_rollout_bar, on_update_bar
from mrlm_pl.learner.optimization import Optimization, gradient_norm, owned_groups, weight_group
from mrlm_pl.learner.policies.reference import ReferencePolicy
from mrlm_pl.learner.policies.seats import check_seats, seat_of, seats_of_run
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.devices import MIN_FREED_WEIGHTS
from mrlm_pl.policy.forward.logprobs import bounded_together
from mrlm_pl.policy.pretrained import write_policy
from mrlm_pl.policy.sharding import clip_norm, gathered, parallelize, shard
from mrlm_pl.settings import ChecksArguments, as_settings
from mrlm_pl.trainer.bounds import ActAfterValidations, updates_in_all
from mrlm_pl.trainer.refusals import refuse_unsupported
from mrlm_pl.trainer.resume import ExactResume, check_resumable


class Algorithm(ChecksArguments, LightningModule, RolloutLearner):
    """Base class of all algorithms: subclasses add :meth:`prepare` (credit) and :meth:`policy_loss` (the equation).

    Args:
        policies: weights by name; None is one policy ``main`` with the built-in tiny model. In Python the name of a
            model or a mapping of settings stands for a policy.
        seats: policy of each agent; an agent that is left out is bound to the only policy.
        optimization: schedule of the learning rates and AdamW's moments.

    Attributes:
        metrics: sums of the metrics of rollouts, updates and evaluations.
        reference: the policies' initial weights, where the algorithm compares with them.
        teachers: frozen policies that need no seat.
        critic: estimates returns; None for algorithms without estimates.
        rollouts: common facts of the run's rollouts, set by :meth:`check_rollouts`.

    Raises:
        ConfigurationError: there is no trained policy, or a seat names a policy that does not exist.
    """

    data_module = "RolloutDataModule"
    """Name of the data module that it learns from, for messages."""

    reads_reference_sums: bool = False
    """Compare given answers with their log-probabilities before the first update, which the data module computes."""

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        if not isinstance(policies, Mapping | None):
            raise ConfigurationError(
                f"policies is a {type(policies).__name__}; give policies by name, as in {{'main': policy}}"
            )
        policies = {
            name: Policy(policy) if isinstance(policy, str) else as_settings(Policy, policy, f"policies.{name}")
            for name, policy in ({"main": Policy()} if policies is None else policies).items()
        }
        if not any(policy.trained for policy in policies.values()):  # or there are none
            raise ConfigurationError(
                f"none of the policies {sorted(policies)} is trained; set `trained: true` for one, or evaluate them "
                "with `mrlm eval`"
            )
        names: dict[int, str] = {}
        for name, policy in policies.items():
            if not isinstance(name, str) or not name or set(name) & set("./"):
                raise ConfigurationError(
                    f"policies: {name!r} is not a name of a policy, as it names folders, weights and metrics; "
                    "give one without dots and slashes"
                )
            if (first := names.setdefault(id(policy), name)) != name:  # its weights would be updated twice a step
                raise ConfigurationError(
                    f"policies: {first!r} and {name!r} are one object; make a Policy for each, or give the agents of "
                    f"both the seat {first!r}"
                )
        check_seats(seats or {}, policies)
        self.policies: nn.ModuleDict = nn.ModuleDict(policies)
        self.seats = dict(seats or {})
        self.optimization = optimization
        # A frozen policy is part of the model but not of the checkpoint; a reference that does not move is read again.
        self.strict_loading = False
        self.rollouts = RolloutFacts((), ())
        self.teachers: tuple[str, ...] = ()
        self._without_data: set[str] = set()
        self.metrics = Metrics(policies, self)
        self.reference = ReferencePolicy()
        self.critic: Critic | None = None

    @abstractmethod
    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        """Return a micro-batch's part (0-dim) of the update's loss of one policy; see :mod:`mrlm_pl.losses.reduction`.

        If the policies share one loss: the policy's part of the value from which :meth:`combined` computes it.
        """

    def combined(self, losses: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return a micro-batch's part (0-dim) of the update's loss: the sum of the policies' :meth:`policy_loss`."""
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    def measure_without_gradient(self, name: str, rows: PolicyBatch, batch: Batch) -> None:
        """Measure a policy's rows of a micro-batch whose loss has no gradient, for the metrics of the update."""

    def evaluates_without_gradient(self, batch: Batch) -> bool:
        """Return whether :meth:`measure_without_gradient` makes a forward pass; the same on every rank."""
        return not batch.on_policy

    def check_demonstrations(self, rows: Mapping[str, Sequence[Trajectory]]) -> None:
        """Validate that the algorithm can be trained on these trajectories, given by split.

        Raises:
            DataError: the trajectories lack the tokens that the algorithm trains.
        """

    @property
    def learners(self) -> dict[str, Policy]:
        """The models with their own trajectories in a batch, by name, in the same order on all ranks."""
        policies = {name: self.policy(name) for name in self.policies}
        return policies if self.critic is None else policies | self.critic.learners

    @property
    def trained_policies(self) -> dict[str, Policy]:
        """The trained policies, by name, in the same order on all ranks."""
        return {name: self.policy(name) for name in self.policies if self.policy(name).trained}

    def check_agents(self, agents: Collection[str]) -> None:
        """Validate the seats and policies against a run's agents; warn of a frozen policy without an agent.

        Raises:
            ConfigurationError: an agent has no seat, a seat is for none of the agents, or a trained policy decides for
                none.
        """
        trained = {name: self.policy(name).trained for name in self.policies}
        seats = seats_of_run(agents, self.seats, trained, self.teachers)
        if self.critic is not None:
            self.critic.check_agents({agent: seat for agent, seat in seats.items() if self.policy(seat).trained})

    def check_rollouts(self, rollouts: RolloutFacts) -> None:
        self.check_agents(rollouts.agents)
        self.rollouts = rollouts

    def idle_loss(self, name: str) -> Tensor:
        """Return the loss of a learner without trajectories: 0 (0-dim), with a gradient of 0 for its weights."""
        learner = self.learners[name]
        # the ranks that have rows wait for every layer of this one, and DDP, of one process too, for all gradients
        if not isinstance(self.trainer.strategy, SingleDeviceStrategy):
            return learner.idle_loss() + (0.0 if self.critic is None else self.critic.idle_values(name))
        weights = [weight for weight in learner.parameters() if weight.requires_grad]
        if name in self._without_data:  # the update drops the gradient: of the smallest weight it costs least
            weights = [min(weights, key=Tensor.numel)]
        return 0.0 * torch.stack([weight.flatten()[0].float() for weight in weights]).sum()

    def policy(self, name: str) -> Policy:
        """Return the policy of that name."""
        return cast("Policy", self.policies[name])

    def seat(self, agent: str) -> str:
        """Return the name of the policy that decides for an agent.

        Raises:
            ConfigurationError: the agent has no seat and there are several policies to choose from.
        """
        return seat_of(agent, self.seats, list(self.policies))

    # Lightning's hooks, in the order in which a run meets them.

    def configure_model(self) -> None:
        """Read the weights, and shard them over the ranks if the strategy does so.

        Raises:
            ConfigurationError: a subclass has left out the callbacks of :meth:`configure_callbacks`.
        """
        self.read_weights()
        if self._trainer is None:
            return
        callbacks: Sequence[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if self._trainer.state.fn is not None and not any(isinstance(item, UpdateRows) for item in callbacks):
            raise ConfigurationError(
                f"{type(self).__name__}.configure_callbacks leaves out the callbacks that log metrics and make a "
                "resumed run exact; return `[*super().configure_callbacks(), ...]`"
            )
        if isinstance(self._trainer.precision_plugin, HalfPrecision):
            # It would make all new tensors in half precision: rewards, advantages and discounts of 8 bits.
            self._trainer.precision_plugin.forward_context = nullcontext  # type: ignore[method-assign, assignment]
        if not isinstance(self._trainer.strategy, ModelParallelStrategy):
            return
        mesh: Any = self._trainer.strategy.device_mesh
        for network in self.networks():
            if mesh["tensor_parallel"].size() > 1 and isinstance(network, PreTrainedModel):
                parallelize(network, mesh["tensor_parallel"])
            shard(network, mesh["data_parallel"])

    def read_weights(self) -> None:
        """Read all weights that a run needs, once."""
        bases: dict[Any, Any] = {}
        for name in self.policies:
            policy = self.policy(name)
            if policy.int8 == "reference":
                self.reference.check_int8(name)
            holds_reference = self.reference.used and policy.trained
            policy.load(
                reference=holds_reference, moving=holds_reference and self.reference.moves, name=name, bases=bases
            )
        if self.critic is not None:
            self.critic.read_weights()

    def networks(self) -> list[nn.Module]:
        """All modules with weights, of trained and frozen policies alike."""
        return [network for module in self.modules() if isinstance(module, Policy) for network in module.networks()]

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which all weights are whole on every rank; all ranks must enter together."""
        return gathered(self.networks())

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: one for each trained policy, and those of the critic.

        A group's ``name`` is the name of its metrics; the group is skipped in updates without data for its ``policy``.
        """
        groups = [weight_group(name, name, policy) for name, policy in self.trained_policies.items()]
        return groups if self.critic is None else groups + self.critic.parameter_groups()

    def configure_optimizers(self) -> Any:
        scaled = self.device.type != "cpu" and getattr(self.trainer.precision_plugin, "scaler", None) is not None
        return self.optimization.configured(self.parameter_groups(), scaled, lambda: int(updates_in_all(self.trainer)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._check_batch(batch, isinstance(batch, Batch), "train on")
        self._without_data = {name for name in self.learners if name not in batch.totals}
        losses: dict[str, Tensor] = {}
        terms = []
        # One order on all ranks: the ranks of sharded models go through the layers together. Learners without rows
        # stay in the graph, so that every rank reduces the same gradients.
        with bounded_together():
            for name, learner in self.learners.items():
                if name in batch.policies:
                    losses[name] = self.policy_loss(name, batch.policies[name], batch)
                elif learner.trained:
                    terms.append(self.idle_loss(name))
        if losses:
            terms.append(self.combined(losses, batch))
        self._measure_rows_without_gradient(batch)
        loss = torch.stack([term.float() for term in terms]).sum()
        self.metrics.add_sum("train/loss", loss)
        self.metrics.log(batch.metrics, on_rollout_bar)
        # Lightning divides by the accumulation steps and strategies average over ranks; the parts are to be summed.
        return loss * batch.micro_batches

    def _check_batch(self, batch: Any, known: bool, use: str) -> None:
        if not known:
            raise ConfigurationError(
                f"{type(self).__name__} cannot {use} a {type(batch).__name__}; give a data module: {self.data_module}"
            )

    @torch.no_grad()
    def _measure_rows_without_gradient(self, batch: Batch) -> None:
        for name in self.learners:
            rows = batch.without_gradient.get(name)
            if rows is not None:
                self.measure_without_gradient(name, rows, batch)
            elif name in batch.without_gradient and name in self.policies and self.evaluates_without_gradient(batch):
                self.policy(name).idle_loss()  # the ranks of a sharded model make every forward pass together

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an update before its step, drop the gradients of policies without data, and log its metrics.

        :class:`~mrlm_pl.learner.metrics.UpdateRows` calls it, so that Lightning's hooks are free for users' classes.
        """
        metrics = self.metrics.take_update()
        loss = metrics.get("train/loss", 0.0)
        if not math.isfinite(loss):  # once an update: reading it in each micro-batch would wait for the device
            raise NonFiniteError(
                f"the loss is {loss} at step {self.global_step}; lower the learning rate, clip gradients "
                "(`--trainer.gradient_clip_val 1.0`) or check the rewards"
            )
        self.metrics.log(metrics, lambda name: on_update_bar(name, metrics))
        rates: dict[str, float] = {}
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        for group, policy, suffix in owned_groups(optimizer.param_groups, self.parameter_groups):
            if policy in self._without_data:
                # A zero gradient would still move AdamW; a policy without data must stay where it is.
                for weight in group["params"]:
                    weight.grad = None
                continue
            name = self.metrics.name(f"grad_norm{suffix}", policy)
            rates[name] = gradient_norm(group["params"], name, self.global_step, scaled)
            rates[self.metrics.name(f"learning_rate{suffix}", policy)] = group["lr"]
        self.metrics.log(rates)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each policy by itself: one norm over all would let a noisy policy slow the others down."""
        if not gradient_clip_val:
            return
        clip = torch.nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else clip_norm
        for group in optimizer.param_groups:
            clip(group["params"], float(gradient_clip_val))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        optimizer: Any = self.optimizers()
        if sum(weight.numel() for group in optimizer.param_groups for weight in group["params"]) >= MIN_FREED_WEIGHTS:
            optimizer.zero_grad()  # now, and not in the next update: the rollouts before it need the memory
        if self.reference.moves:
            self.reference.follow(self.trained_policies.values(), self.global_step + 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._check_batch(batch, isinstance(batch, Batch) or hasattr(batch, "episodes"), "evaluate")
        self.measure("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._check_batch(batch, isinstance(batch, Batch) or hasattr(batch, "episodes"), "evaluate")
        self.measure("test", batch)

    def measure(self, prefix: str, batch: Any) -> None:
        """Add the measures of a batch to the metrics of an evaluation, named ``val/...`` or ``test/...``."""
        self.metrics.add_evaluation(prefix, batch.means(), batch.counts(), batch.outcomes())

    def end_evaluation(self, prefix: str) -> None:
        """Log the metrics of an evaluation loop; see :meth:`end_update`."""
        for name, value in self.evaluation_metrics(prefix).items():
            self.log(name, value, prog_bar=on_evaluation_bar(name))

    def evaluation_metrics(self, prefix: str) -> dict[str, float]:
        """Return the metrics of an evaluation loop on all ranks, by name under ``val/`` or ``test/``, once."""
        return self.metrics.take_evaluation(prefix)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch  # which Lightning moves to the CPU; it rejects a list of episodes

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that make a resumed run exact and write the metrics."""
        if self._trainer is not None and self._trainer.state.fn == "fit":
            refuse_unsupported(self._trainer, self)
        callbacks: list[Callback] = [ExactResume(), UpdateRows(self.metrics)]
        if getattr(self._trainer, "_val_check_time_interval", None) is not None:
            self.trainer.val_check_interval = 1  # which `EarlyStopping` reads, and Lightning leaves unset for a time
        interval = getattr(self._trainer, "val_check_interval", None)
        if type(interval) is int and interval == 1:  # a batch; 1.0 is an epoch
            callbacks.insert(0, ActAfterValidations(self.trainer.callbacks))  # type: ignore[attr-defined]
        return callbacks

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None and self._trainer.state.fn == "fit":  # None in `load_from_checkpoint`
            check_resumable(self._trainer, checkpoint)
        if self._trainer is not None:  # Lightning does so after it has read the weights, which float32 would round
            self._trainer.precision_plugin.convert_module(self)
        if "state_dict" in checkpoint:
            self.check_weights({name: weight.shape for name, weight in checkpoint["state_dict"].items()})
        if "current_model_state" in checkpoint:  # of `WeightAveraging`, which reads all weights of both models
            for key in ("state_dict", "current_model_state"):
                checkpoint[key] = {**self.state_dict(), **checkpoint[key]}
        self.load_progress(checkpoint.get("progress", {}))

    def check_weights(self, saved: Mapping[str, torch.Size]) -> None:
        """Validate that a checkpoint has the weights of this run's checkpoints: others would be ignored.

        Args:
            saved: shapes of the weights in the checkpoint, by name.

        Raises:
            ConfigurationError: the checkpoint has other weights.
        """
        weights = self.state_dict()
        wrong = [name for name, shape in saved.items() if name not in weights or weights[name].shape != shape]
        wrong += [name for name in weights if self.is_saved(name) and name not in saved]
        if wrong:
            raise ConfigurationError(
                f"ckpt_path: the checkpoint is of other policies than these: {len(wrong)} weights, such as "
                f"{wrong[0]!r}, are only in one of them or differ in shape; use the model, lora and algorithm of "
                "its run"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["progress"] = self.progress()
        if getattr(self.trainer.strategy, "_save_distributed_checkpoint", False):
            return  # each rank reads its shard of every weight that the model has
        for key in {"state_dict", "current_model_state"} & checkpoint.keys():  # the second of `WeightAveraging`
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if self.is_saved(name)}

    def is_saved(self, weight: str) -> bool:
        """Return whether checkpoints hold the weight of this name: only trained weights are saved."""
        module: Any = self
        names = weight.split(".")
        for index, name in enumerate(names):
            if isinstance(module, Policy):
                return module.is_saved(".".join(names[index:]))
            module = getattr(module, name)
        return True

    def on_train_end(self) -> None:
        with self.gathered():
            self.export(Path(self.trainer.default_root_dir) / "policies", write=self.trainer.is_global_zero)

    def export(self, folder: str | Path, write: bool = True) -> None:
        """Write every trained policy as a plain Hugging Face folder ``folder/NAME``, atomically.

        Critics with weights of their own are ``folder/NAME-critic``, marked as models that play no agent.

        Args:
            folder: parent folder of the exported policies; it is created.
            write: whether this rank writes; False on ranks that only take part in gathering the weights.

        Raises:
            StorageError: a policy cannot be written, for example because the disk is full.
        """
        critics = {} if self.critic is None else self.critic.exported()
        for name, policy in (self.trained_policies | critics).items():
            write_policy(policy.save_pretrained, name, Path(folder) / name, write, critic=name in critics)

    def check_single_policy(self) -> None:
        """Validate that there is one policy.

        Raises:
            ConfigurationError: there are several.
        """
        if len(self.policies) != 1:
            raise ConfigurationError(f"{type(self).__name__} trains one policy; `policies` has {sorted(self.policies)}")

    def check_no_dropout(self) -> None:
        """Validate that no trained policy has dropout.

        Raises:
            ConfigurationError: one has: the learner's log-probabilities would not be the sampler's.
        """
        with_dropout = [name for name, policy in self.trained_policies.items() if policy.dropout]
        if with_dropout:
            raise ConfigurationError(
                f"policies {with_dropout} have dropout, which the sampler does not apply; set their dropout to 0 for "
                f"{type(self).__name__}"
            )

    def measured_rows(self, batch: Batch) -> Iterator[tuple[str, PolicyBatch]]:
        """Yield the rows of each policy; one with rows on other ranks alone joins the forward pass of those ranks."""
        for name in self.policies:
            if name in batch.policies:
                yield name, batch.policies[name]
            elif self.policy(name).trained and self.trainer.world_size > 1:
                self.idle_loss(name)
