from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from mrlm_environments.debate import DebateEnvironment
from mrlm_environments.debate_judges import Argument, Debate
from mrlm_environments.reward_model_judge import (
    RewardModel,
    RewardModelJudge,
    TextScore,
    TextScorer,
    side_conversation,
)

from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, PolicyError

DEBATE = Debate(
    "Ban cars.",
    (Argument("PRO", "Yes."), Argument("CON", "No."), Argument("PRO", "Still yes."), Argument("CON", "Still no.")),
)
QUESTION = Message("user", "Debate: Ban cars.\nArgue for this.")


class Lengths(TextScorer):
    """The number of characters of the reply."""

    def score(self, messages: Sequence[Message]) -> TextScore:
        return TextScore(float(len(messages[-1].content)), messages[0].content.endswith("against this."))


def tiny(folder: Path, kind: str) -> torch.nn.Module:
    """A model of random weights with the tiny tokenizer, and a head that sums up the first half of a hidden state."""
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    from mrlm_pl.policy.tiny import build_config, build_tokenizer
    from mrlm_pl.policy.value_head import ValueHead

    torch.manual_seed(3)
    build_tokenizer().save_pretrained(folder)
    weights = torch.tensor([[1.0] * 32 + [0.0] * 32])
    if kind == "classifier":
        model = LlamaForSequenceClassification(build_config(num_labels=1))
        model.score.weight.data = weights
    else:
        model = LlamaForCausalLM(build_config(num_labels=1))
    model.save_pretrained(folder)
    if kind == "value":
        head = ValueHead(64)
        head.linear.weight.data = weights
        head.linear.bias.data = torch.tensor([0.5])
        head.save(folder)
    return model.eval()


def hidden(model: torch.nn.Module, text: str) -> torch.Tensor:
    """Last hidden states [T, 64] of a text that is one character, or special token, per token."""
    from mrlm_pl.policy.tiny import build_tokenizer

    ids = torch.tensor([build_tokenizer().encode(text, add_special_tokens=False)])
    with torch.no_grad():
        return model.model(input_ids=ids).last_hidden_state[0]


def test_each_side_is_scored_by_itself() -> None:
    question, reply = side_conversation(DEBATE, "PRO")
    assert (question, reply.content) == (QUESTION, "Yes.\n\nStill yes.")
    found = RewardModelJudge(Lengths(), scale=10.0).judge(DEBATE)
    # 16 and 14 characters
    assert found.score("PRO") == pytest.approx(1 / (1 + math.exp(-1.6)))
    assert found.score("CON") == pytest.approx(1 / (1 + math.exp(-1.4)))
    assert found.metrics == {"judge_truncated": 0.5}


def test_a_sequence_classifier(tmp_path: Path) -> None:
    model = tiny(tmp_path, "classifier")
    text = f"<|user|>{QUESTION.content}<|end|><|assistant|>Yes.<|end|>"
    expected = hidden(model, text)[-1, :32].sum().item()
    found = RewardModel(str(tmp_path)).score((QUESTION, Message("assistant", "Yes.")))
    assert found.value == pytest.approx(expected, abs=1e-4)
    assert not found.truncated
    cut = RewardModel(str(tmp_path), max_tokens=6).score((QUESTION, Message("assistant", "Yes.")))
    assert cut.truncated
    assert cut.value == pytest.approx(hidden(model, "<|assistant|>Yes.<|end|>")[-1, :32].sum().item(), abs=1e-4)


def test_a_causal_model_with_a_value_head(tmp_path: Path) -> None:
    model = tiny(tmp_path, "value")
    text = f"<|user|>{QUESTION.content}<|end|><|assistant|>Yes."
    expected = hidden(model, text)[-1, :32].sum().item() + 0.5
    found = RewardModel(str(tmp_path)).score((QUESTION, Message("assistant", "Yes.")))
    assert found.value == pytest.approx(expected, abs=1e-4), "all of the text was read, the end was not"


@pytest.mark.parametrize("kind", ["classifier", "value"])
def test_a_debate_is_judged_and_swapping_sides_changes_the_scores(kind: str, tmp_path: Path) -> None:
    tiny(tmp_path, kind)
    environment = pickle.loads(
        pickle.dumps(DebateEnvironment(RewardModelJudge(RewardModel(str(tmp_path))), max_turns=1))
    )
    observations = environment.reset(Task("debate", "train", 0, 3, {"topic": "Ban cars."}))
    while observations:
        ((agent, _),) = observations.items()
        step = environment.step({agent: Message("assistant", f"I am {agent}. 漢\ud800")})
        observations = step.observations
    assert step.rewards["pro"] == -step.rewards["con"] != 0
    assert 0 < step.metrics["pro_score"] < 1
    assert step.metrics["judge_truncated"] == 0.0


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "none")
    with pytest.raises(PolicyError, match=r"lacks 'score\.weight'"):
        RewardModel(str(tmp_path)).score((QUESTION, Message("assistant", "Yes.")))


def test_no_model_and_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        RewardModel(str(tmp_path / "nothing")).score((QUESTION, Message("assistant", "Yes.")))
    with pytest.raises(ConfigurationError, match="scale is 0"):
        RewardModelJudge(Lengths(), scale=0)
    with pytest.raises(ConfigurationError, match="max_tokens is 1"):
        RewardModel("x", max_tokens=1)
