"""MAPPO: the input of the centralized critic, the credit that its values give, and the runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_environments.games.coordination import CoordinationGame
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mrlm_pl.algorithms import MAPPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, DataError, PolicyError
from mrlm_pl.learner.credit.joint_states import JointReader, JointStates, acting_batches, joint_states
from mrlm_pl.learner.credit.team import joint_history, team_rewards
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.tiny import build_config
from tests.support.runs.watching import Watch


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of another size with a tokenizer of bytes, without a chat template, that reads 96 tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    vocabulary = {"<eos>": 0, **{token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(folder)
    size = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "max_position_embeddings": 96}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = build_config(**size, vocab_size=len(vocabulary), eos_token_id=0, pad_token_id=None)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Relay(Environment):
    """Left, right and left again speak; at the end both earn 1 and the share of digits in all replies."""

    name = "relay"
    agents = ("left", "right")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        self.said: list[str] = []
        return {"left": [Message("system", "Say digits."), Message("user", f"Begin {task.data['n']}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        (reply,) = actions.values()
        self.said.append(reply.content)
        if len(self.said) < 3:
            speaker = ("left", "right")[len(self.said) % 2]
            return Step(observations={speaker: [Message("user", f"Go on {reply.content}")]})
        text = "".join(self.said)
        share = sum(map(str.isdigit, text)) / max(len(text), 1)
        return Step(rewards=dict.fromkeys(self.agents, 1 + share), done=True, stop_reason="end")


def row(agent: str, indices: list[int], policy: str = "main", first: tuple[Message, ...] = ()) -> Trajectory:
    """One row of an agent that decides at these steps with two tokens each, behind two of the environment."""
    turns, messages = [], list(first)
    for number, index in enumerate(indices):
        start = 4 * number + 2
        turns.append(Turn(agent, index, start, start + 2, 0.0, {}, "stop", policy, 0, "e"))
        messages += [Message("user", f"q{index}"), Message("assistant", f"{agent}{index}")]
    mask = (False, False, True, True) * len(indices)
    logprobs = tuple(-1.0 if acts else 0.0 for acts in mask)
    return Trajectory(agent, policy, tuple(range(8, 8 + len(mask))), mask, logprobs, tuple(turns), tuple(messages))


def episode(*rows: Trajectory, paid: list[dict[str, float]], truncated: bool = False, group: str = "g") -> Episode:
    trajectories = {item.agent: (item,) for item in rows}
    return Episode(
        "0", Task("t", "train", 0), group, 0, 0, trajectories, "end", truncated=truncated, step_rewards=tuple(paid)
    )


def states_of(episodes: list[Episode], folder: Path) -> JointStates:
    policy = Policy(str(folder))
    states = joint_states(episodes, JointReader(policy.chat, 2048))
    assert states is not None
    return states


def with_values(states: JointStates, values: list[float]) -> torch.Tensor:
    table = torch.full(states.batch.action_mask.shape, 99.0)
    table[states.batch.action_mask] = torch.tensor(values)
    return table


# Credit.


@pytest.mark.parametrize(
    ("targets", "expected"), [("td", [1.9, 0.18, 2.0]), ("monte_carlo", [2.62, 1.8, 2.0]), ("lambda", None)]
)
@pytest.mark.parametrize(
    ("lam", "advantages"), [(0.95, [2.0147, 0.7190, 1.8]), (0.0, [1.4, -0.82, 1.8]), (1.0, [2.12, 0.8, 1.8])]
)
def test_advantages_and_returns_equal_the_reference_numbers(
    targets: Any, expected: list[float] | None, lam: float, advantages: list[float], model_folder: Path
) -> None:
    # Team rewards 1, 0, 2 are means over two agents, one of whom has not decided yet, or decides nothing more.
    paid = [{"a": 2.0, "b": 0.0}, {"a": 3.0, "b": -3.0}, {"b": 4.0}]
    states = states_of([episode(row("a", [0, 2]), row("b", [1]), paid=paid)], model_folder)
    values = [0.5, 1.0, 0.2]
    found = states.credit(with_values(states, values), gamma=0.9, lam=lam, targets=targets)
    returns, baselines, credited = zip(*(found[0, step] for step in range(3)), strict=True)
    assert credited == pytest.approx(advantages, abs=1e-4)
    assert baselines == pytest.approx(values)
    assert returns == pytest.approx(
        [value + advantage for value, advantage in zip(values, advantages, strict=True)], abs=1e-4
    )
    want = expected or [value + advantage for value, advantage in zip(values, advantages, strict=True)]
    batch = states.batch
    assert batch.returns is not None
    assert batch.values is not None
    assert batch.returns[batch.action_mask].tolist() == pytest.approx(want, abs=1e-4)
    assert batch.values[batch.action_mask].tolist() == pytest.approx(values)


def test_a_cut_episode_goes_on_with_the_value_of_its_last_joint_state_and_no_other(model_folder: Path) -> None:
    paid = [{"a": 1.0}]
    plays = [episode(row("a", [0]), paid=paid, truncated=cut, group=name) for name, cut in (("g", True), ("h", False))]
    states = states_of([*plays, plays[0]], model_folder)
    assert states.decided.tolist() == [True, False, True, True, False]
    found = states.credit(with_values(states, [0.0, 8.0, 0.0, 0.0, 4.0]), gamma=0.5, lam=0.9, targets="lambda")
    assert found == {(0, 0): (5.0, 0.0, 5.0), (1, 0): (1.0, 0.0, 1.0), (2, 0): (3.0, 0.0, 3.0)}
    assert int(states.batch.action_mask.sum()) == 3, "the last state of a truncated episode is not trained on"
    assert states.batch.groups.tolist() == [0, 1, 0]


def test_a_game_of_constant_sum_is_warned_of_once(
    model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = MAPPO({"main": Policy(str(model_folder))})
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    games = [
        episode(row("left", [0]), row("right", [0]), paid=[{"left": float(n), "right": 1.0 - n}]) for n in range(2)
    ]
    for _ in range(2):
        algorithm.prepare(games, Sampling(max_tokens=8))
    assert sum("zero-sum" in record.getMessage() for record in caplog.records) == 1


def test_all_tokens_of_all_who_acted_at_a_step_share_its_advantage() -> None:
    both = episode(row("a", [0, 2]), row("b", [0, 1], policy="other"), paid=[])
    failed = Episode("1", both.task, "h", 0, 0, {}, "error", error="gone")
    steps = {(1, 0): (6.0, 5.0, 1.0), (1, 1): (7.0, 5.0, 2.0), (1, 2): (8.0, 5.0, 3.0)}
    tables = acting_batches([failed, both], steps)
    assert tables["main"].advantages.tolist() == [[0, 0, 1, 1, 0, 0, 3, 3]]
    assert tables["other"].advantages.tolist() == [[0, 0, 1, 1, 0, 0, 2, 2]]
    assert tables["main"].turn_baselines == ([(6.0, 5.0), (8.0, 5.0)],)
    assert tables["main"].groups.tolist() == [1]


def test_the_team_is_paid_when_the_environment_pays_it() -> None:
    paid = [{"a": 1.0}, {"a": 2.0, "b": 4.0}]
    play = episode(row("a", [0]), row("b", [1]), paid=paid)
    assert team_rewards(play) == [0.5, 3.0]
    assert team_rewards(play, lambda turn: -1.0 if turn.agent == "b" else 0.0) == [0.5, 2.5]
    booked = episode(row("a", [0]), row("b", [1]), paid=[])
    assert team_rewards(booked) == [0.0, 0.0], "nothing is booked on the turns of this record"


# The critic's input.


def test_the_joint_history_is_in_the_order_of_the_steps() -> None:
    example = (Message("user", "2?"), Message("assistant", "2!"))
    play = episode(row("a", [0, 2], first=example), row("b", [0, 1]), paid=[])
    assert joint_history(play) == [
        "[a] user: 2?\n[a] assistant: 2!\n[a] user: q0\n[b] user: q0",
        "[a] assistant: a0\n[b] assistant: b0\n[b] user: q1",
        "[b] assistant: b1\n[a] user: q2",
        "[a] assistant: a2",
    ]


def test_a_record_without_messages_is_refused() -> None:
    silent = Trajectory("a", "main", (8, 9), (False, True), (0.0, -1.0), row("a", [0]).turns)
    with pytest.raises(DataError, match="agent 'a' decided 1 times, but its record holds 0 replies"):
        joint_history(episode(silent, paid=[]))


def test_the_value_of_a_state_is_that_of_the_last_token_of_its_text(model_folder: Path, bytes_folder: Path) -> None:
    for folder in (model_folder, bytes_folder):
        critic = Policy(str(folder))
        critic.load_critic("critic")
        assert critic.value_head is not None
        play = episode(row("a", [0]), row("b", [0]), paid=[], truncated=True)
        states = joint_states([play], JointReader(critic.chat, 2048))
        assert states is not None
        with torch.no_grad():
            critic.value_head.linear.weight.copy_(torch.linspace(-1, 1, critic.config.hidden_size))
            values = critic.values(states.batch.inputs())[states.batch.action_mask]
            first = "[a] user: q0\n[b] user: q0"
            asked = [Message("user", first)]
            after = [Message("assistant", ""), Message("user", "[a] assistant: a0\n[b] assistant: b0")]
            critic.model.eval()
            for value, messages in zip(values, (asked, asked + after), strict=True):
                ids = critic.chat.encode(critic.chat.render(messages, generation_prompt=True))
                hidden = critic.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
                assert value.item() == pytest.approx(critic.value_head(hidden)[0, -1].item(), abs=1e-5)


def test_the_critic_reads_the_texts_of_a_subclass(model_folder: Path, quiet_trainer: Any) -> None:
    class Informed(MAPPO):
        left_out = 0

        def critic_texts(self, episode: Episode) -> list[str]:
            texts = [f"secret {episode.task.data['n']}", *super().critic_texts(episode)[1:]]
            return texts[self.left_out :]

        def credit(self, *arguments: Any) -> Any:
            batches = super().credit(*arguments)
            critic = batches["critic"]
            self.read = [self.critic.model("critic").chat.decode(ids.tolist()) for ids in critic.token_ids]
            return batches

    algorithm = Informed({"main": Policy(str(model_folder), learning_rate=1e-3)})
    quiet_trainer().fit(algorithm, relay(iterations=1, groups=2, group_size=2))
    assert len(algorithm.read) == 4
    assert all("secret" in text and "Begin" not in text and "[left] assistant" in text for text in algorithm.read)
    algorithm = Informed({"main": Policy(str(model_folder), learning_rate=1e-3)})
    algorithm.left_out = 1
    with pytest.raises(
        DataError, match=r"critic_texts returned 3 texts for episode .* of 3 steps; return one for each"
    ):
        quiet_trainer().fit(algorithm, relay(iterations=1, groups=2, group_size=2))


def test_a_state_that_does_not_fit_is_read_from_its_end(bytes_folder: Path) -> None:
    chat, window = Policy(str(bytes_folder)).chat, 96
    reader = JointReader(chat, window)
    texts = ["x" * 20, "y" * 20, "z" * 200, "last"]
    rows = reader.read(texts)
    places = [
        (place, column) for place, item in enumerate(rows) for column, acts in enumerate(item.action_mask) if acts
    ]
    assert reader.shortened == 2
    assert [place for place, _ in places] == [0, 0, 1, 2], "what fits stays in one row"
    read = [chat.decode(rows[place].token_ids[: column + 1]) for place, column in places]
    overhead = len("User: \nAssistant: ") + 1
    assert read[2] == f"User: {'z' * (window - overhead)}\nAssistant: "
    assert read[3] == f"User: {'z' * (window - overhead - 5)}\nlast\nAssistant: "
    assert all(len(item.token_ids) <= window for item in rows)
    with pytest.raises(PolicyError, match="window of 10 tokens"):
        JointReader(chat, 10).read(texts)


# Runs.


def two_policies(model_folder: Path, bytes_folder: Path) -> dict[str, Policy]:
    return {
        "left": Policy(str(model_folder), learning_rate=1e-3),
        "right": Policy(str(bytes_folder), learning_rate=1e-3),
    }


def relay(**data: Any) -> RolloutDataModule:
    settings: dict[str, Any] = {"groups": 4, "group_size": 3, "iterations": 2, "sampling": Sampling(max_tokens=5)}
    return RolloutDataModule(Relay(), **{**settings, **data})


@pytest.mark.long
def test_the_result_does_not_depend_on_accumulation(model_folder: Path, bytes_folder: Path, quiet_trainer: Any) -> None:
    found = []
    for pieces in (1, 4):
        watch = Watch()
        algorithm = MAPPO(two_policies(model_folder, bytes_folder), critic=Policy(str(bytes_folder), 1e-3))
        # A head that is not 0: at the first update the model below it has a gradient, too.
        algorithm.configure_model()
        assert algorithm.critic.model("critic").value_head is not None
        torch.nn.init.constant_(algorithm.critic.model("critic").value_head.linear.weight, 0.1)
        trainer = quiet_trainer(callbacks=[watch], accumulate_grad_batches=pieces)
        trainer.fit(algorithm, relay(iterations=1, max_turns=2))
        found.append(watch.gradients)
    assert found[0].keys() == found[1].keys()
    assert {name.split(".")[0] for name in found[0]} == {"policies", "critic"}
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert float(found[0]["critic.models.critic.model.model.layers.0.mlp.up_proj.weight"].abs().sum()) > 0


def test_two_tokenizers_learn_with_a_critic_that_is_exported(
    model_folder: Path, bytes_folder: Path, quiet_trainer: Any
) -> None:
    watch = Watch()
    trainer = quiet_trainer(callbacks=[watch], gradient_clip_val=1.0)
    critic = Policy(str(bytes_folder), learning_rate=2e-3)
    algorithm = MAPPO(
        two_policies(model_folder, bytes_folder), critic=critic, value_learning_rate=0.02, value_clip=None
    )
    trainer.fit(algorithm, relay(passes=4))
    rates = {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups}
    assert rates == {"left": 1e-3, "right": 1e-3, "critic": 2e-3, "critic/value": 0.02}
    first, last = watch.steps[0], watch.steps[-1]
    for name in ("left", "right"):
        assert first[f"train/{name}/ratio_deviation"] < 1e-4
        assert first[f"train/{name}/approx_kl"] < 1e-6
    assert last["train/critic/value_loss"] < 0.5 * first["train/critic/value_loss"]
    assert {"train/critic/grad_norm", "train/critic/grad_norm_value", "train/left/clip_fraction"} <= set(last)
    assert last["train/critic/shortened_states"] > 0, "three turns do not fit into 96 bytes"
    again = Policy(str(Path(trainer.default_root_dir) / "policies" / "critic"))
    again.load_critic("critic")
    for name, weight in algorithm.critic.model("critic").state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.long
def test_a_run_resumed_within_the_passes_equals_an_uninterrupted_one(
    model_folder: Path, bytes_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    def run(trainer: Any, resumed: Path | None = None) -> MAPPO:
        algorithm = MAPPO(
            two_policies(model_folder, bytes_folder), critic=Policy(str(model_folder), 1e-3, lora=LoRA(2))
        )
        trainer.fit(algorithm, relay(passes=2, minibatches=2, max_turns=2), ckpt_path=resumed)
        return algorithm

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(quiet_trainer(enable_checkpointing=True, callbacks=[saver]))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]
    critics = [name for name in saved if name.startswith("critic.")]
    assert critics
    assert all("lora" in name or "value_head" in name for name in critics)
    again = run(quiet_trainer(), tmp_path / "step=3.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_frozen_partner_is_read_but_not_trained(model_folder: Path, quiet_trainer: Any) -> None:
    policies = {"left": Policy(str(model_folder), 1e-3), "right": Policy(str(model_folder), trained=False)}
    algorithm = MAPPO(policies)
    assert algorithm.critic.model("critic").name_or_path == str(model_folder)
    quiet_trainer().fit(algorithm, relay(iterations=1))
    fresh = Policy(str(model_folder))
    fresh.load()
    for name, changed in (("left", True), ("right", False)):
        pairs = zip(fresh.model.parameters(), algorithm.policy(name).model.parameters(), strict=True)
        assert any(not torch.equal(before, after) for before, after in pairs) == changed


def test_the_critics_copy_of_a_policy_has_its_weights_and_no_reference(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load(reference=True)
    critic = MAPPO({"main": policy}).critic.model("critic")
    assert critic.reference is None
    assert policy.reference is not None
    for own, copied in zip(policy.model.parameters(), critic.model.parameters(), strict=True):
        assert own is not copied
        assert torch.equal(own, copied)


@pytest.mark.long
def test_it_learns_to_collaborate(quiet_trainer: Any) -> None:
    policies = {"row": Policy(learning_rate=2e-3), "column": Policy(learning_rate=2e-3)}
    algorithm = MAPPO(policies, critic=Policy(learning_rate=1e-3), value_learning_rate=1e-2)
    watch = Watch()
    data = RolloutDataModule(
        CoordinationGame(), groups=4, group_size=16, iterations=8, passes=2, sampling=Sampling(max_tokens=4)
    )
    quiet_trainer(callbacks=[watch], gradient_clip_val=1.0).fit(algorithm, data)
    assert watch.steps[0]["rollout/success"] < 0.5
    assert watch.steps[-1]["rollout/success"] > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"targets": "gae"}, "targets is 'gae'; choose from lambda, td, monte_carlo"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"clip": {"dual": 1.0}}, r"dual is 1\.0"),
        ({"clip": {"low": 0.0}}, r"Clip: low is 0\.0"),
        ({"kl": {"coefficient": -1.0}}, r"KL: coefficient is -1\.0"),
    ],
)
def test_bad_settings_are_refused(model_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MAPPO({"main": Policy(str(model_folder))}, **options)


def test_a_critic_must_learn_and_its_name_is_taken(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="critic has `trained: false`"):
        MAPPO({"main": Policy(str(model_folder))}, critic=Policy(str(model_folder), trained=False))
    with pytest.raises(ConfigurationError, match="a policy is named 'critic'"):
        MAPPO({"critic": Policy(str(model_folder))})
