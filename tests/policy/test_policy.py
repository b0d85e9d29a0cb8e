from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3Config

from mrlm_pl.algorithms import CorrectnessModel
from mrlm_pl.environment.tools import tool_schema
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, PolicyError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.tiny import build_tokenizer
from tests.support.models.model_families import tiny_model
from tests.support.runs.logs import logged_here


def test_a_policy_is_light_until_it_is_loaded(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    assert policy.model is None
    assert policy.context_window == 2048
    policy.load()
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}


def test_a_policy_that_has_played_can_be_sent_to_another_process(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load()
    tools = [tool_schema("add", "Add numbers.", {"a": {"type": "number"}}).to_chat()]
    described, ids = policy.chat.describes_tools(tools), policy.chat.encode("Hi")
    sent = pickle.loads(pickle.dumps(policy))
    assert (sent.chat.describes_tools(tools), sent.chat.encode("Hi")) == (described, ids)
    question = [Message("user", "Hi")]
    assert sent.chat.render(question, generation_prompt=True) == policy.chat.render(question, generation_prompt=True)


def test_dropout_is_off_whatever_the_folder_says(model_folder: Path) -> None:
    assert json.loads((model_folder / "config.json").read_text())["attention_dropout"] == 0.1
    policy = Policy(str(model_folder))
    policy.load()
    assert policy.model.config.attention_dropout == 0.0


def test_dropout_that_is_asked_for_is_active_in_updates_alone(model_folder: Path) -> None:
    policy = Policy(str(model_folder), dropout=0.5)
    policy.load()
    rows = TokenRows(torch.arange(4, 44).view(4, 10), torch.full((4,), 10), torch.arange(10).expand(4, 10) > 3)
    without = policy(rows)
    first, again, other = (policy(rows, dropout_key=update) for update in (3, 3, 4))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.01
    assert (first - without).abs().max() > 0.01
    assert torch.equal(policy(rows), without)
    with torch.no_grad():
        assert torch.equal(policy(rows, dropout_key=3), without)


def test_dropout_of_a_family_that_has_none_is_refused(tmp_path: Path, model_folder: Path) -> None:
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    AutoConfig.for_model("mamba", vocab_size=100, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    Policy(str(tmp_path), random_init_seed=0).load()
    with pytest.raises(PolicyError, match=r"dropout 0\.1, but models of the family 'mamba' have no dropout"):
        Policy(str(tmp_path), random_init_seed=0, dropout=0.1).load()


def test_a_weight_that_its_family_freezes_is_not_trained(tmp_path: Path) -> None:
    model = tiny_model("hrm_text")  # the initial state of its slow cycle "never trains"
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    for trained, frozen in ((True, {"model.z_L_init"}), (False, dict(model.named_parameters()).keys())):
        policy = Policy(str(tmp_path), trained=trained)
        policy.load()
        assert {name for name, weight in policy.model.named_parameters() if not weight.requires_grad} == frozen


def test_weights_that_texts_do_not_reach_are_not_trained(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    policy = Policy(str(tmp_path))
    policy.load()
    policy.model(torch.arange(8, 24)[None]).logits.square().sum().backward()
    frozen = {name for name, weight in policy.model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name, weight in policy.model.named_parameters() if weight.grad is None}
    assert {name.split(".")[1] for name in frozen} == {"vision_tower", "multi_modal_projector"}


def test_the_idle_row_is_on_the_host_like_all_rows(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load()
    policy.model.to("meta")  # as another device, from which the layout would be read with a wait
    assert {part.device.type for part in policy.idle_row()[:3]} == {"cpu"}


def test_the_reference_is_a_frozen_copy(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load(reference=True)
    assert all(not weight.requires_grad for weight in policy.reference.parameters())
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.add_(1.0)
    rows = TokenRows(torch.tensor([[8, 9, 10]]), torch.tensor([3]), torch.tensor([[False, True, True]]))
    assert not torch.allclose(policy(rows), policy.reference_logprobs(rows))


def test_random_initialization_depends_on_its_seed_only(model_folder: Path) -> None:
    first, again, other = (Policy(str(model_folder), random_init_seed=seed) for seed in (1, 1, 2))
    state = torch.random.get_rng_state()
    first.load()
    with torch.device("meta"):  # as Lightning, which makes a model on its device
        again.load()
    other.load()
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [policy.model.get_input_embeddings().weight for policy in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_export_is_a_plain_folder(model_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load()
    policy.save_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for ours, theirs in zip(policy.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"


def test_a_policy_whose_weights_are_not_read_yet_cannot_be_exported(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"has no weights yet; call `algorithm.read_weights\(\)`"):
        Policy(str(model_folder)).save_pretrained(tmp_path / "out")


def test_weights_that_are_a_program_are_refused_without_the_advice_to_run_it(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(PolicyError, match=r"holds more than tensors, such as a program; use .*`safetensors`"):
        Policy(model=str(folder)).load()


def test_files_without_the_output_head_are_refused_for_all_but_critics(model_folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model_folder, tmp_path / "bare")
    config = AutoConfig.from_pretrained(bare, tie_word_embeddings=False)
    config.save_pretrained(bare)
    save_file(load_file(model_folder / "model.safetensors"), bare / "model.safetensors", {"format": "pt"})
    with pytest.raises(PolicyError, match=r"its files lack the weights 'lm_head.weight' \(1 in all\)"):
        Policy(str(bare)).load()
    Policy(str(bare)).load_critic("critic")
    CorrectnessModel({"main": Policy(str(bare))}).read_weights()


@pytest.mark.parametrize("family", [None, "ctrl"])
def test_every_weight_that_a_critic_trains_has_a_gradient(
    family: str | None, model_folder: Path, tmp_path: Path
) -> None:
    """A head beside a stale flag in config.json, and a tied head with a bias."""
    folder = tmp_path / "model"
    if family is None:
        shutil.copytree(model_folder, folder)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        tiny_model(family).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    critic = Policy(str(folder))
    critic.load_critic("critic")
    row = torch.arange(8, 16)[None]
    critic.values(TokenRows(row, torch.tensor([8]), torch.arange(8)[None] > 3)).sum().backward()
    trained = dict(critic.named_parameters())
    assert critic.network.get_input_embeddings().weight.requires_grad
    assert [name for name in trained if trained[name].requires_grad and trained[name].grad is None] == []


def test_a_critic_reads_the_states_before_the_output_head(tmp_path: Path) -> None:
    """Gemma 3n notes several states of each token as hidden states, and gives the head one."""
    model = tiny_model("gemma3n_text")
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    critic = Policy(str(tmp_path))
    critic.load_critic("critic")
    with torch.no_grad():
        critic.value_head.linear.weight.copy_(torch.linspace(-1.0, 1.0, model.config.hidden_size))
    row = torch.arange(8, 16)[None]
    states = model.model(row).last_hidden_state[0, 3:7]
    found = critic.values(TokenRows(row, torch.tensor([8]), torch.arange(8)[None] > 3))[0, 4:]
    torch.testing.assert_close(found, states @ torch.linspace(-1.0, 1.0, model.config.hidden_size))


def test_the_context_window_of_a_model_with_images_is_that_of_its_text(tmp_path: Path) -> None:
    """Its tokenizer may name none: the fallback is then larger than any context."""
    Gemma3Config(text_config={"max_position_embeddings": 96}, vision_config={"num_hidden_layers": 1}).save_pretrained(
        tmp_path
    )
    build_tokenizer().save_pretrained(tmp_path)
    assert Policy(str(tmp_path)).context_window == 96


def test_a_head_of_its_own_stays_so_whatever_the_configuration_says(model_folder: Path, tmp_path: Path) -> None:
    both = shutil.copytree(model_folder, tmp_path / "both")
    weights = load_file(both / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, both / "model.safetensors", {"format": "pt"})
    policy = Policy(str(both))
    policy.load()
    assert policy.config.tie_word_embeddings
    assert Architecture.of(policy.model) == Architecture.of(Architecture.of(policy.model).build(torch.device("cpu")))
    policy.save_pretrained(tmp_path / "out")
    again = Policy(str(tmp_path / "out"))
    again.load()
    assert torch.equal(again.model.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(again.model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_the_generation_config_names_stop_tokens_and_is_exported(
    model_folder: Path, tmp_path: Path, lora: LoRA | None
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}')
    policy = Policy(str(folder), lora=lora)
    assert {2, 7} <= set(policy.chat.stop_ids)
    policy.load()
    policy.save_pretrained(tmp_path / "out")
    assert Policy(str(tmp_path / "out")).chat.stop_ids == policy.chat.stop_ids
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


def test_an_adapter_in_the_folder_is_not_replaced_without_a_word(model_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(model_folder), lora=LoRA(rank=2))
    policy.load()
    policy.save_pretrained(tmp_path / "out")
    both = shutil.copytree(tmp_path / "out" / "adapter", tmp_path / "both")
    shutil.copytree(model_folder, both, dirs_exist_ok=True)
    Policy(str(both)).load()
    with pytest.raises(PolicyError, match=r"hold an adapter .*, which `lora` would replace; merge it"):
        Policy(str(both), lora=LoRA(rank=2)).load()


def test_a_weight_of_another_shape_is_named(model_folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    config = AutoConfig.from_pretrained(broken, intermediate_size=40)
    config.save_pretrained(broken)
    message = r"have 'model.layers.0.mlp.down_proj.weight' of shape \[32, 64\], and its config.json says \[32, 40\]"
    with pytest.raises(PolicyError, match=message):
        Policy(str(broken)).load()


def test_files_without_the_weights_of_the_network_are_refused(model_folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    dropped = next(name for name in weights if ".layers.0." in name)
    save_file(
        {f"x.{name}" if name == dropped else name: of for name, of in weights.items()}, broken / "model.safetensors"
    )
    with pytest.raises(PolicyError, match=rf"lack the weights '{dropped}' \(1 in all\)"):
        Policy(str(broken)).load()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", '{"model_type": []}', "its config.json cannot be read"),
        ("config.json", '{"model_type": "own"}', r"read \([^.]*`own` but [^.]*\); copy, .* or give a model"),
        (
            "config.json",
            '{"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}',
            r"read \(.* contains custom code [^.]*\); copy, .* or give a model",
        ),
        ("config.json", '{"model_type": "llama", "vocab_size": "x"}', "its config.json cannot be read .*vocab_size"),
        ("tokenizer.json", "3", "the tokenizer of .* cannot be read"),
        ("tokenizer_config.json", "[]", "the tokenizer of .* cannot be read"),
        ("generation_config.json", "3", "the generation_config.json of .* cannot be read"),
        ("model.safetensors.index.json", "{}", "its weights cannot be read"),
    ],
)
def test_damaged_files_are_an_error_of_the_policy(
    model_folder: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / file).write_text(content)
    if "index" in file:
        (broken / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match=message):
        Policy(str(broken)).load()


def test_a_folder_with_a_program_is_not_proposed_in_its_own_place(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config | code))
    with pytest.raises(PolicyError, match="custom code") as refused:
        _ = Policy(model=str(folder)).config
    assert "did you mean" not in str(refused.value)


def test_a_folder_without_tokenizer_is_refused_before_any_weights_are_read(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "config.json", tmp_path)
    with pytest.raises(PolicyError, match=r"has no tokenizer.*save one there"):
        Policy(str(tmp_path))


@pytest.mark.parametrize("family", ["t5", "llava"])
def test_a_family_without_a_causal_language_model_is_refused_before_any_weights_are_read(
    tmp_path: Path, family: str
) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match=rf"no causal language model of the family '{family}'; give .*`served_by`$"):
        Policy(str(tmp_path))
    Policy(str(tmp_path), trained=False, served_by="http://127.0.0.1:8000")  # reads the tokenizer alone


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no folder"),
        ("builtin:huge", "builtin:tiny"),
        ("/a/b/c", "there is no folder"),
        ("a" * 5_000, "has 5000 characters; give a folder or a hub id"),
        ("best/step=5.ckpt", r"; a checkpoint must be in RUN/checkpoints with RUN/config.yaml; of a script's run give"),
        ("a\0b", r"is neither a folder here nor .*; give a folder, a hub id or 'builtin:tiny'$"),
        ("127.0.0.1:50060", "; give its tokenizer's model, and the address as `served_by`"),
    ],
)
def test_unknown_models_are_named(name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1),
        ("learning_rate", float("nan")),
        ("weight_decay", float("inf")),
        ("dropout", 1.0),
        ("dropout", float("nan")),
        ("random_init_seed", 10**30),
        ("random_init_seed", -1),
        ("max_forward_tokens", 0),
    ],
)
def test_values_out_of_range_are_refused(model_folder: Path, name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value}; ") as caught:
        Policy(str(model_folder), **{name: value})
    assert len(str(caught.value).splitlines()) == 1


def test_a_template_that_is_no_jinja_is_refused_with_its_line(model_folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"chat_template .* is no Jinja template: line 2: "):
        Policy(str(model_folder), chat_template="{{ messages }}\n{% for x")
    with pytest.raises(PolicyError, match=r"chat_template 'qwen3\.jinja' is no Jinja template; give its text"):
        Policy(str(model_folder), chat_template="qwen3.jinja")


def test_a_model_without_a_chat_template_is_told_and_exports_the_one_it_was_trained_with(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(model_folder, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    policy = Policy(str(tmp_path / "base"))
    (record,) = logged_here(caplog)
    assert "has no chat template" in record.getMessage()
    policy.load()
    policy.save_pretrained(tmp_path / "exported")
    caplog.clear()
    messages = [{"role": "user", "content": "a"}]
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).endswith(
        "User: a\nAssistant: "
    )
    Policy(str(tmp_path / "exported"))
    assert not logged_here(caplog)


def test_a_run_s_folder_stands_for_its_exported_policy(model_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    with pytest.raises(PolicyError, match="has no policies"):
        Policy(str(run))
    shutil.copytree(model_folder, run / "policies" / "main")
    policy = Policy(str(run))
    assert policy.source == str(run / "policies" / "main")
    shutil.copytree(model_folder, run / "policies" / "critic")
    with pytest.raises(PolicyError, match=r"2 policies; name one: .*policies/critic, .*policies/main"):
        Policy(str(run))


def test_the_exported_folder_speaks_with_the_template_that_the_policy_was_given(
    model_folder: Path, tmp_path: Path
) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    policy = Policy(str(model_folder), chat_template=template)
    policy.load()
    policy.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False) == "[a]"
    assert Policy(str(tmp_path)).chat.template == template
