"""PPO: credit from episodes to returns, the loss, and what decides when a collection is used up."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from mrlm_pl.advantages import Moments
from mrlm_pl.algorithms import GRPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner import critics
from mrlm_pl.learner.credit.tokens import rewarded_rows
from mrlm_pl.learner.policies.reference import KL
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.tiny import build_config, build_tokenizer

OPTIONS = {"value_learning_rate": 1e-2}


def trajectory(spans: list[tuple[int, int]], rewards: list[float], length: int, agent: str = "a") -> Trajectory:
    mask = [any(start <= t < stop for start, stop in spans) for t in range(length)]
    turns = tuple(
        Turn(agent, index, start, stop, reward, {"r": reward}, "stop", "main", 0, "e")
        for index, ((start, stop), reward) in enumerate(zip(spans, rewards, strict=True))
    )
    logprobs = tuple(-1.0 if acts else 0.0 for acts in mask)
    return Trajectory(agent, "main", tuple(range(8, 8 + length)), tuple(mask), logprobs, turns)


def episode(rows: tuple[Trajectory, ...], truncated: bool = False, number: int = 0) -> Episode:
    return Episode(str(number), Task("t", "train", 0), "g", 0, 0, {"a": rows}, "end", truncated=truncated)


def returns_of(episodes: list[Episode], values: float, gamma: float, lam: float, end: float = 0.0) -> Any:
    table = rewarded_rows(episodes)["main"]
    mask = table.batch.action_mask
    table_values = torch.full(mask.shape, values).masked_fill(~mask, 99.0)
    discounts = torch.full(mask.shape, gamma)
    ends = torch.where(table.unfinished, end, 0.0)
    advantages, returns = table.advantages(table_values, discounts, lam, ends)
    return table, advantages, returns


def test_the_reference_numbers_from_an_episode_to_its_returns() -> None:
    # r = (0, 0, 1), V = 0.5, gamma 1, lambda 0.95: A (0.45125, 0.475, 0.5), returns (0.95125, 0.975, 1).
    _, advantages, returns = returns_of([episode((trajectory([(2, 5)], [1.0], 5),))], 0.5, 1.0, 0.95)
    assert advantages[0].tolist() == pytest.approx([0, 0, 0.45125, 0.475, 0.5], abs=1e-5)
    assert returns[0].tolist() == pytest.approx([0, 0, 0.95125, 0.975, 1.0], abs=1e-5)


def test_the_environments_text_carries_through_and_every_turn_pays_on_its_last_token() -> None:
    table, advantages, _ = returns_of([episode((trajectory([(1, 3), (5, 6)], [1.0, 4.0], 6),))], 0.0, 0.5, 1.0)
    assert table.rewards[0].tolist() == [0, 0, 1, 0, 0, 4]
    # Tokens 1, 2 and 5 act: 4; 1 + 0.5 * 4 = 3; 0.5 * 3 = 1.5.
    assert advantages[0].tolist() == [0, 1.5, 3, 0, 0, 4]


def test_rows_of_one_agent_are_one_chain_and_episodes_are_not() -> None:
    rewritten = (trajectory([(1, 2)], [0.0], 2), trajectory([(1, 3)], [8.0], 3))
    single = trajectory([(1, 2)], [2.0], 2)
    table, advantages, _ = returns_of([episode(rewritten), episode((single,), number=1)], 0.0, 0.5, 1.0)
    assert table.chains == [[0, 1], [2]]
    assert advantages.tolist() == [[0, 2, 0], [0, 4, 8], [0, 2, 0]]


def test_a_cut_episode_goes_on_with_its_last_value_and_a_finished_one_does_not() -> None:
    row = trajectory([(1, 2)], [0.0], 2)
    table, advantages, _ = returns_of([episode((row,), truncated=True), episode((row,))], 0.0, 0.5, 1.0, end=6.0)
    assert table.unfinished.tolist() == [True, False]
    assert advantages[:, 1].tolist() == [3.0, 0.0]


def test_the_value_of_the_end_is_that_of_the_last_hidden_state(model_folder: Path) -> None:
    algorithm = PPO({"main": Policy(str(model_folder))})
    algorithm.configure_model()
    policy = algorithm.policy("main")
    assert policy.value_head is not None
    with torch.no_grad():
        policy.value_head.linear.weight.copy_(torch.linspace(-1, 1, 32))
        cut, done = trajectory([(2, 4)], [0.0], 6), trajectory([(2, 5)], [0.0], 5)
        table = rewarded_rows([episode((cut,), truncated=True), episode((done,))])["main"]
        values, ends = algorithm.critic.estimates("main", table)
        policy.model.eval()
        states = policy.model(torch.tensor([cut.token_ids]), output_hidden_states=True).hidden_states[-1]
        expected = policy.value_head(states)[0]
    assert ends.tolist() == pytest.approx([expected[5].item(), 0.0], abs=1e-5)
    assert values[0].tolist() == pytest.approx([0, 0, expected[1].item(), expected[2].item(), 0, 0], abs=1e-5)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def window_of_64(request: Any, tmp_path_factory: Any) -> Path:
    """A random model that reads 64 tokens: GPT-2 has no more positions, Llama's rotary ones have no end."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    tokenizer = build_tokenizer()
    model: Any
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if request.param == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, bos_token_id=None, eos_token_id=1))
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
            model = LlamaForCausalLM(build_config(**sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("length", [63, 64, 65, 88])
def test_an_episode_truncated_by_the_window_bootstraps_from_the_last_state_inside_it(
    length: int, window_of_64: Path
) -> None:
    algorithm = PPO({"main": Policy(str(window_of_64))})
    algorithm.configure_model()
    policy = algorithm.policy("main")
    assert policy.value_head is not None
    fed: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda module, args, given: fed.append(int(given["position_ids"].max())), with_kwargs=True
    )
    row = trajectory([(2, 6), (40, 44)], [0.0, 1.0], length)
    row = dataclasses.replace(row, token_ids=tuple(8 + token % 40 for token in range(length)))
    with torch.no_grad():
        policy.value_head.linear.weight.copy_(torch.linspace(-1, 1, 32))
        table = rewarded_rows([episode((row,), truncated=True)])["main"]
        values, ends = algorithm.critic.estimates("main", table)
        assert max(fed) <= 63, "a model of 64 tokens has the positions 0 to 63"
        policy.model.eval()
        ids, places = torch.tensor([row.token_ids[:64]]), torch.arange(64)[None, :length]
        states = policy.model(ids, position_ids=places, output_hidden_states=True).hidden_states[-1]
        expected = policy.value_head(states)[0]
    assert ends.tolist() == pytest.approx([expected[-1].item()], abs=1e-4)
    assert values[0, 40:44].tolist() == pytest.approx(expected[39:43].tolist(), abs=1e-4)


def test_a_critic_with_a_shorter_window_than_an_action_is_refused(model_folder: Path, window_of_64: Path) -> None:
    algorithm = PPO({"main": Policy(str(model_folder))}, critics={"main": Policy(str(window_of_64))})
    algorithm.configure_model()
    for first, fits in ((61, True), (62, False)):
        table = rewarded_rows([episode((trajectory([(first, first + 4)], [1.0], 70),))])["main"]
        table.batch.token_ids.clamp_(max=40)
        with nullcontext() if fits else pytest.raises(ConfigurationError, match="reads 64 tokens, but token 65"):
            algorithm.critic.estimates("main", table)


class Watch(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, algorithm: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics
        self.steps.append({name: float(value) for name, value in metrics.items() if name.startswith("train/")})
        self.weights.append(next(algorithm.policy("main").model.parameters()).detach().clone())


def run(model_folder: Path, environment: Any, trainer: Any, options: dict[str, Any], **data: Any) -> Any:
    settings: dict[str, Any] = {"groups": 4, "group_size": 4, "iterations": 2, "minibatches": 2, "passes": 2}
    algorithm = PPO({"main": Policy(str(model_folder), learning_rate=1e-3)}, **{**OPTIONS, **options})
    module = RolloutDataModule(environment, **{**settings, "sampling": Sampling(max_tokens=6), **data})
    trainer.fit(algorithm, module)
    return algorithm


def test_the_first_ratio_is_one_and_the_values_learn(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    watch = Watch()
    run(
        model_folder,
        echo(turns=2, reward=1.0),
        quiet_trainer(callbacks=[watch]),
        {"entropy": {"coefficient": 0.01}, "value_learning_rate": 0.05, "value_clip": None},
        iterations=8,
    )
    first, last = watch.steps[0], watch.steps[-1]
    assert first["train/ratio_deviation"] < 1e-4
    assert first["train/approx_kl"] < 1e-6
    # Two turns pay 1 each and values begin at 0: the first tokens have return 2, those of the second turn 1.
    assert 0.5 < first["train/value_loss"] < 2.0
    assert last["train/value_loss"] < 0.3 * first["train/value_loss"]
    assert last["train/explained_variance"] > first["train/explained_variance"]
    assert last["train/entropy"] > 0


def test_stop_at_kl_ends_the_rest_of_a_collection_and_only_that(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    watch = Watch()
    trainer = quiet_trainer(callbacks=[watch])
    run(model_folder, echo(), trainer, {"stop_at_kl": 1e-9}, iterations=2)
    assert trainer.global_step == 2 * 4, "the stream keeps its length"
    changed = [not torch.equal(before, after) for before, after in zip(watch.weights, watch.weights[1:], strict=False)]
    # The first update has ratio 1; the second moves beyond the target; the other two of each collection rest.
    assert changed == [True, False, False, True, True, False, False]


def test_the_penalty_keeps_its_sign_where_a_rollout_has_more_episodes_than_the_horizon() -> None:
    kl = KL(0.5, target=0.1, horizon=10)
    assert [kl.adapted(0.5, 0.0, episodes) for episodes in (5, 10, 64)] == pytest.approx([0.45, 0.4, 0.4])


def test_kl_in_the_reward_is_charged_to_every_token_and_steered(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = PPO(
        {"main": Policy(str(model_folder))},
        kl={"coefficient": 0.5, "target": 0.1, "horizon": 10},
        whiten_advantages=False,
        lam=1.0,
        recompute_old_logp=False,
    )
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    rows = algorithm.prepare([episode((trajectory([(2, 4)], [1.0], 4),))], Sampling())["main"]
    assert rows.ref_logp is not None
    assert rows.returns is not None
    # The sampler said -1 for each token; values are 0: returns are the sums of 1 - 0.5 (-1 - ref) to the end.
    penalties = [0.5 * (-1.0 - value) for value in rows.ref_logp[0, 2:4].tolist()]
    assert rows.returns[0, 2:4].tolist() == pytest.approx([1 - sum(penalties), 1 - penalties[1]], abs=1e-4)
    kl = sum(penalties) / 0.5 / 2
    assert algorithm.kl.coefficients["main"] == pytest.approx(0.5 * (1 + max(-0.2, min(0.2, kl / 0.1 - 1)) / 10))
    other = PPO({"main": Policy(str(model_folder))}, kl={"coefficient": 0.5, "target": 0.1})
    other.load_progress(algorithm.progress())
    assert other.kl.coefficients["main"] == algorithm.kl.coefficients["main"]


@pytest.mark.parametrize("cls", [PPO, GRPO])
def test_the_controller_counts_episodes_whatever_the_policy_plays_in_them(
    cls: type[PolicyGradient], model_folder: Path, quiet_trainer: Any
) -> None:
    options: dict[str, Any] = {"kl": {"coefficient": 0.5, "target": 1e-6, "horizon": 100}}
    algorithm = cls({"main": Policy(str(model_folder))}, **options, recompute_old_logp=False)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    plays = []
    for number in range(3):
        rows = {agent: (trajectory([(2, 4)], [1.0], 4, agent),) for agent in "abcd"}
        plays.append(dataclasses.replace(episode((), number=number), trajectories=rows))
    algorithm.prepare(plays, Sampling())
    # Three episodes, far off the target: beta (1 + 0.2 * 3 / 100), though there are twelve trajectories.
    drift = algorithm.metrics.take_rollout()["train/reference_kl"]
    assert abs(drift) > 1e-3
    factor = 1 + (0.2 if drift > 0 else -0.2) * 3 / 100
    assert algorithm.kl.coefficients["main"] == pytest.approx(0.5 * factor)


@pytest.mark.long
def test_a_run_resumed_within_the_passes_equals_an_uninterrupted_one(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    options = {
        "kl": {"coefficient": 0.05, "target": 0.01},
        "stop_at_kl": 1e-4,
        "entropy": {"coefficient": 0.01, "target": 9.0},
        "top_entropy": 0.5,
    }
    whole = run(model_folder, echo(turns=2), quiet_trainer(), options)
    assert whole.entropy.weights["main"][1] > 0.01, "below the target the bonus rises"
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(model_folder, echo(turns=2), quiet_trainer(enable_checkpointing=True, callbacks=[saver]), options)
    for step in (1, 2, 3, 4, 6):
        algorithm = PPO({"main": Policy(str(model_folder), learning_rate=1e-3)}, **{**OPTIONS, **options})
        data = RolloutDataModule(
            echo(turns=2),
            groups=4,
            group_size=4,
            iterations=2,
            minibatches=2,
            passes=2,
            sampling=Sampling(max_tokens=6),
        )
        quiet_trainer().fit(algorithm, data, ckpt_path=tmp_path / f"step={step}.ckpt")
        for name, weight in whole.state_dict().items():
            assert torch.equal(weight, algorithm.state_dict()[name]), (step, name)
        assert algorithm.progress() == whole.progress()


def test_a_critic_of_its_own_learns_and_is_exported(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    options = {"critics": {"main": Policy(str(model_folder), learning_rate=2e-3)}}
    algorithm = run(model_folder, echo(), trainer, options)
    assert algorithm.policy("main").value_head is None
    names = [group["name"] for group in trainer.optimizers[0].param_groups]
    assert names == ["main", "main/critic", "main/value"]
    folder = Path(trainer.default_root_dir) / "policies"
    assert not (folder / "main" / "value_head.safetensors").exists()
    head = load_file(folder / "main-critic" / "value_head.safetensors")
    assert head["linear.weight"].abs().sum() > 0
    again = Policy(str(folder / "main-critic"))
    again.load()
    again.add_value_head()
    assert again.value_head is not None
    assert torch.equal(again.value_head.linear.weight, head["linear.weight"])
    untouched = AutoModelForCausalLM.from_pretrained(model_folder)
    trained = again.model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(trained, untouched.model.layers[0].mlp.up_proj.weight)


def test_a_checkpoint_holds_of_a_critic_with_adapters_these_and_its_head(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    trainer = quiet_trainer()
    run(model_folder, echo(), trainer, {"critics": {"main": Policy(str(model_folder), lora=LoRA(2))}}, iterations=1)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    saved = torch.load(tmp_path / "c.ckpt", weights_only=False)["state_dict"]
    critic = [name for name in saved if name.startswith("critic.")]
    assert critic
    assert all("lora_" in name or "value_head" in name for name in critic)


def test_a_value_head_goes_on_from_the_exported_folder(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    algorithm = run(model_folder, echo(), trainer, {})
    again = PPO({"main": Policy(str(Path(trainer.default_root_dir) / "policies" / "main"))})
    again.configure_model()
    first, second = algorithm.policy("main").value_head, again.policy("main").value_head
    assert first is not None
    assert second is not None
    assert torch.equal(first.linear.weight, second.linear.weight)
    assert first.linear.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"value_learning_rate": -0.1}, "value_learning_rate is -0.1; it must be 0 or above"),
        ({"stop_at_kl": 0.0}, "stop_at_kl is 0.0"),
        ({"discount_unit": "episode"}, "discount_unit is 'episode'"),
        ({"kl": {"target": 0.1}}, r"kl\.coefficient is 0"),
        ({"kl": {"coefficient": -1.0}}, r"KL: coefficient is -1\.0"),
        ({"max_length": 5}, "constant_length"),
    ],
)
def test_bad_settings_are_refused(model_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PPO({"main": Policy(str(model_folder))}, **options)


def test_a_critic_needs_its_policy(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="critics names 'judge'"):
        PPO({"main": Policy(str(model_folder))}, critics={"judge": Policy(str(model_folder))})


def test_a_frozen_critic_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"critics\.main has `trained: false`"):
        PPO({"main": Policy(str(model_folder))}, critics={"main": Policy(str(model_folder), trained=False)})


def test_values_are_normalized_by_the_returns_of_all_ranks(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = PPO({"main": Policy(str(model_folder))}, normalize_values=True)
    algorithm.read_weights()
    here, elsewhere = Moments(2, 1.5, 0.5), Moments(1, 6.0, 0.0)  # returns 1 and 2, and 6
    monkeypatch.setattr(critics, "sum_over_ranks", lambda trainer, own: {key: own[key] + elsewhere for key in own})
    algorithm.critic.observe(None, {("main", ""): here})
    head = algorithm.policies["main"].value_head
    assert head is not None
    assert head.moments.tolist() == pytest.approx([3, 3, 14, 7**0.5])  # 4 + 1 + 9; divided by 2
