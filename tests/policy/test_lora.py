"""Adapters: the base stays as it is and exists once, the reference is the base, the engine generates with adapters."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mrlm_pl.algorithms import GRPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.engines.local.llama import unsupported_reason
from mrlm_pl.engines.local.transformers_model import GenericModel
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, PolicyError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.lora import add_adapter
from mrlm_pl.policy.tiny import build_tokenizer
from tests.support.models.model_families import tiny_model

IDS = torch.arange(8, 24)[None]


def policy(folder: Path, target_modules: list[str] | None = None) -> Policy:
    return Policy(str(folder), learning_rate=1e-2, lora=LoRA(rank=2, alpha=4.0, target_modules=target_modules))


def run(algorithm: Any, environment: Any, trainer: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"groups": 4, "group_size": 4, "iterations": 3, "sampling": Sampling(max_tokens=6)}
    trainer.fit(algorithm, RolloutDataModule(environment, **{**settings, **options}))
    return algorithm


def test_only_adapters_change_and_checkpoints_hold_no_more(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[saver])
    algorithm = run(GRPO({"main": policy(model_folder)}, kl={"coefficient": 0.05}), echo(), trainer)
    plain = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    changed = 0
    for name, weight in algorithm.policy("main").network.state_dict().items():
        if "lora_" in name:
            changed += int(weight.abs().sum() > 0)
        else:
            assert torch.equal(weight, plain[name.replace(".base_layer", "")]), name
    assert changed == 2 * 2 * 7, "A and B of seven matrices in two layers"
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert saved["state_dict"]
    assert all("lora_" in name for name in saved["state_dict"])
    first = {item.id: item for item in read_episodes(Path(trainer.default_root_dir) / "episodes")}
    assert len(first) == 3 * 16


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    whole = run(PPO({"main": policy(model_folder)}, kl={"coefficient": 0.05}), echo(), quiet_trainer())
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[saver])
    run(PPO({"main": policy(model_folder)}, kl={"coefficient": 0.05}), echo(), trainer)
    again = PPO({"main": policy(model_folder)}, kl={"coefficient": 0.05})
    data = RolloutDataModule(echo(), groups=4, group_size=4, iterations=3, sampling=Sampling(max_tokens=6))
    quiet_trainer().fit(again, data, ckpt_path=tmp_path / "step=2.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_resumed_run_with_averaged_adapters_equals_an_uninterrupted_one(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """Lightning's callback reads all weights of a checkpoint, which has the adapters alone."""

    def fit(checkpoint: Path | None) -> dict[str, torch.Tensor]:
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(enable_checkpointing=True, callbacks=[EMAWeightAveraging(decay=0.5), saver])
        algorithm = GRPO({"main": policy(model_folder)})
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=3, sampling=Sampling(max_tokens=3))
        trainer.fit(algorithm, data, ckpt_path=checkpoint)
        return algorithm.state_dict()

    whole, resumed = fit(None), fit(tmp_path / "step=2.ckpt")
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert all("lora_" in name for key in ("state_dict", "current_model_state") for name in saved[key])
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name


def test_the_engine_generates_with_the_adapters(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer(max_epochs=2)
    algorithm = GRPO({"main": policy(model_folder)})
    run(algorithm, echo(), trainer)
    assert unsupported_reason(algorithm.policy("main").network) is None, "by the fast path"
    # Had the sampler left the adapters out, the first ratio of later collections would not be 1.
    assert float(trainer.callback_metrics["train/ratio_deviation"]) < 1e-4
    assert float(trainer.callback_metrics["train/approx_kl"]) < 1e-6


def test_policies_with_adapters_share_one_base_and_differ(model_folder: Path) -> None:
    algorithm = GRPO({"first": policy(model_folder), "second": policy(model_folder)}, {"agent": "first"})
    algorithm.configure_model()
    first, second = (algorithm.policy(name).network for name in ("first", "second"))
    pointers = [model.model.embed_tokens.weight.data_ptr() for model in (first, second)]
    assert pointers[0] == pointers[1]
    adapters = [model.model.layers[0].self_attn.q_proj.lora_A["default"].weight for model in (first, second)]
    assert not torch.equal(adapters[0], adapters[1])
    with torch.no_grad():
        first.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(0.5)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    first.eval(), second.eval()
    assert not torch.allclose(first(IDS).logits, plain(IDS).logits)
    torch.testing.assert_close(second(IDS).logits, plain(IDS).logits)


def test_four_policies_with_adapters_have_the_memory_of_one_base(model_folder: Path) -> None:
    def stored(algorithm: GRPO) -> int:
        """Return bytes behind all weights, each counted once."""
        storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage() for weight in algorithm.parameters()}
        return sum(storage.nbytes() for storage in storages.values())

    algorithm = GRPO({name: policy(model_folder) for name in "abcd"})
    algorithm.configure_model()
    plain = GRPO({"main": Policy(str(model_folder))})
    plain.configure_model()
    adapters = [weight for name, weight in algorithm.named_parameters() if "lora_" in name]
    assert len(adapters) == 4 * 2 * 2 * 7, "A and B of seven matrices in two layers, for each policy"
    assert stored(algorithm) == stored(plain) + sum(4 * weight.numel() for weight in adapters)


def test_the_reference_is_the_model_without_its_adapter(model_folder: Path) -> None:
    with_adapter, plain = policy(model_folder), Policy(str(model_folder))
    with_adapter.load(reference=True)
    plain.load()
    assert with_adapter.reference is None, "no second model"
    with torch.no_grad():
        with_adapter.network.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(0.5)
    mask = torch.zeros_like(IDS, dtype=torch.bool)
    mask[:, 4:] = True
    rows = TokenRows(IDS, torch.tensor([16]), mask)
    expected = plain(rows)
    torch.testing.assert_close(with_adapter.reference_logprobs(rows), expected.detach())
    assert not torch.allclose(with_adapter(rows), expected)
    trainable = [name for name, weight in with_adapter.named_parameters() if weight.requires_grad]
    assert trainable, "the adapter is switched on again"
    assert all("lora_" in name for name in trainable)


def test_the_export_is_a_plain_folder_and_the_adapter(model_folder: Path, tmp_path: Path) -> None:
    made = policy(model_folder)
    made.load()
    with torch.no_grad():
        for layer in made.network.model.layers:
            layer.mlp.up_proj.lora_B["default"].weight.fill_(0.25)
    made.save_pretrained(tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    made.model.eval()
    torch.testing.assert_close(merged(IDS).logits, made.model(IDS).logits, rtol=1e-4, atol=1e-5)
    adapter = tmp_path / "out" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 2
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    loaded = PeftModel.from_pretrained(base, adapter).eval()
    torch.testing.assert_close(loaded(IDS).logits, made.model(IDS).logits)
    again = Policy(str(tmp_path / "out"))
    again.load()
    torch.testing.assert_close(again.model.eval()(IDS).logits, merged(IDS).logits)


def test_the_export_of_a_model_with_transposed_layers_has_the_adapter_too(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=len(tokenizer))
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made = policy(tmp_path / "model")
    made.load()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.3)
    made.save_pretrained(tmp_path / "out")
    expected = made.model.eval()(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not torch.allclose(base(IDS).logits, expected, atol=0.1)
    loaded = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    torch.testing.assert_close(loaded(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_adapters_that_could_not_be_merged_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="embed_tokens is a layer of type Embedding"):
        policy(model_folder, target_modules=["embed_tokens"]).load()
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    tied = type(plain)(type(plain.config)(**{**plain.config.to_dict(), "tie_word_embeddings": True}))
    tied.save_pretrained(tmp_path)
    Policy(str(model_folder)).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="lm_head shares its weight"):
        policy(tmp_path, target_modules=["lm_head"]).load()


def test_the_hub_is_not_asked_about_a_base_that_is_here(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *names: asked.append(names[0]))
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    base.config.name_or_path = base.name_or_path = "someone/model"  # as that of a model on the hub
    add_adapter(base, LoRA(rank=2), "main")
    assert not asked


def test_the_first_weights_do_not_depend_on_the_dtype_of_the_run(model_folder: Path) -> None:
    weights = []
    for precision in (Precision(), DoublePrecision()):
        made = policy(model_folder)
        with precision.module_init_context():
            made.load()
        weights.append({name: weight for name, weight in made.model.state_dict().items() if "lora_A" in name})
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "others"), [("llama4_text", "router"), ("phimoe", "router"), ("deepseek_v4", "o_a_proj")]
)
@pytest.mark.long_after(1)
def test_layers_that_derive_from_linear_ones_get_no_adapter(tmp_path: Path, family: str, others: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    made = policy(tmp_path)
    made.load()
    adapted = {name.rpartition(".")[0] for name, _ in made.network.named_modules() if name.endswith(".base_layer")}
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear} - {"lm_head"}
    assert adapted == linear
    torch.testing.assert_close(made.network.eval()(IDS).logits, model(IDS).logits)
    with pytest.raises(ConfigurationError, match=rf"{others} is a layer of type .*; leave it out"):
        policy(tmp_path, target_modules=[others]).load()


@pytest.mark.parametrize(("family", "layer"), [("jamba", "dt_proj"), ("gemma3n_text", "correction_coefs")])
def test_an_adapter_acts_where_the_model_reads_the_weight_itself(tmp_path: Path, family: str, layer: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    made = policy(tmp_path / "model", target_modules=[layer])
    made.load()
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.3)
    made.save_pretrained(tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
    assert not torch.allclose(model(IDS).logits, expected, atol=1e-3)
    copied = GenericModel(made.network, torch.float32, own=True).model
    for adapted in (made.model, copied):
        torch.testing.assert_close(adapted.eval()(IDS).logits, expected)
    with made.model.disable_adapter():
        torch.testing.assert_close(made.model(IDS).logits, model(IDS).logits)
    made.model.train()(IDS).logits.square().sum().backward()
    gradients = {name: weight.grad for name, weight in made.model.named_parameters() if "lora_B" in name}
    assert gradients
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())


def test_layers_that_share_weights_or_read_no_text_get_no_adapter(tmp_path: Path) -> None:
    adapted = {}
    for family in ("gemma3", "zamba"):
        tiny_model(family).save_pretrained(tmp_path / family)
        build_tokenizer().save_pretrained(tmp_path / family)
        made = policy(tmp_path / family)
        made.load()
        adapted[family] = [name for name, _ in made.network.named_modules() if name.endswith(".base_layer")]
    assert len(adapted["gemma3"]) == 2 * 7, "seven matrices in two layers of text"
    assert all(name.startswith("model.language_model.layers.") for name in adapted["gemma3"])
    assert adapted["zamba"]
    assert not [name for name in adapted["zamba"] if ".shared_transf." in name]
    with pytest.raises(ConfigurationError, match=r"q_proj shares its weight"):
        policy(tmp_path / "zamba", target_modules=["q_proj"]).load()


def test_a_model_with_adapters_can_be_pickled(model_folder: Path) -> None:
    policy = Policy(str(model_folder), lora=LoRA(rank=2))
    policy.load(name="main")
    copied = pickle.loads(pickle.dumps(policy.network))
    tokens = torch.arange(6)[None]
    assert torch.equal(copied(tokens).logits, policy.network(tokens).logits)


def test_the_weight_of_a_layer_has_its_adapter_once_after_merging(model_folder: Path) -> None:
    policy = Policy(str(model_folder), lora=LoRA(rank=2))
    policy.load(name="main")
    layer = next(module for module in policy.network.modules() if hasattr(module, "lora_B"))
    torch.nn.init.ones_(layer.lora_B["default"].weight)
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    layer.merge()
    assert torch.equal(layer.weight, expected)


def test_a_refusal_for_a_model_without_attention_names_layers_that_it_has() -> None:
    with pytest.raises(ConfigurationError, match=r"'out_proj' is incompatible.*such as \[dt_proj, in_proj, x_proj\]"):
        add_adapter(tiny_model("mamba"), LoRA(), "main")
    add_adapter(tiny_model("mamba"), LoRA(target_modules=["dt_proj", "in_proj", "x_proj"]), "main")


@pytest.mark.parametrize("family", ["deepseek_v3", "beam", "laguna"])  # beam has gates in attention and experts
def test_the_layers_that_a_refusal_names_can_have_adapters(tmp_path: Path, family: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"name the layers that get one, such as \[") as refusal:
        policy(tmp_path, target_modules=["no_proj"]).load()
    names = str(refusal.value).partition("such as [")[2].removesuffix("]").split(", ")
    for target_modules in (None, names):  # None is to choose the same ones
        made = policy(tmp_path, target_modules=target_modules)
        made.load()
        adapted = {name.split(".")[-2] for name, _ in made.network.named_modules() if name.endswith(".base_layer")}
        assert adapted == {*names}
        assert {"o_proj"} < adapted


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", r"\['down_proj', 'gate_up_proj'\] of experts; only linear layers can have an"),
        ("laguna", r"shared_experts\.\w+ has an adapter that PEFT would not find again in the exported"),
        ("mamba", "'out_proj' is incompatible"),
    ],
)
def test_layers_that_all_can_have_adapters_are_chosen_and_named(
    tmp_path: Path, caplog: Any, family: str, reason: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    made = policy(tmp_path)
    made.load()
    adapted = {name.split(".")[-2] for name, _ in made.network.named_modules() if name.endswith(".base_layer")}
    assert f"adapters on {', '.join(sorted(adapted))} alone: " in caplog.text
    assert re.search(reason, caplog.text)
    assert {id(weight) for weight in made.network.parameters() if weight.requires_grad} == {
        id(weight) for name, weight in made.network.named_parameters() if ".lora_" in name
    }
    with torch.no_grad():
        for name, weight in made.network.named_parameters():
            if ".lora_B." in name:
                weight.fill_(0.3)
    made.save_pretrained(tmp_path / "out")
    expected = made.network.eval()(IDS).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits, expected)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "mixtral",
            {"lora": LoRA(target_modules=["w1", "w3"])},
            r"only linear layers can have an adapter; leave it out",
        ),
        ("ctrl", {"gradient_checkpointing": True}, r"activation checkpointing\. Leave gradient_checkpointing out"),
    ],
)
def test_families_without_a_setting_are_refused_with_the_remedy(
    tmp_path: Path, family: str, options: dict[str, Any], message: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises((ConfigurationError, PolicyError), match=message):
        Policy(str(tmp_path), **options).load()


@pytest.mark.parametrize("other", [{"rank": 3}, {"target_modules": ["q_proj"]}, None])
@pytest.mark.long_after(1)
def test_a_checkpoint_of_other_adapters_is_refused(
    other: dict[str, Any] | None, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    trainer = quiet_trainer(enable_checkpointing=True)
    run(GRPO({"main": policy(model_folder)}), echo(), trainer, iterations=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    lora = None if other is None else LoRA(**{"rank": 2, "alpha": 4.0, **other})
    again = GRPO({"main": Policy(str(model_folder), lora=lora)})
    data = RolloutDataModule(echo(), groups=4, group_size=4, sampling=Sampling(max_tokens=6), validation_episodes=2)
    with pytest.raises(ConfigurationError, match="the checkpoint is of other policies than these"):
        quiet_trainer().validate(again, data, ckpt_path=tmp_path / "last.ckpt")


def test_checkpoints_are_small(tmp_path: Path, echo: Any, quiet_trainer: Any) -> None:
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=688,
        num_attention_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made = Policy(str(tmp_path / "model"), lora=LoRA(rank=2, alpha=4.0, target_modules=["q_proj", "v_proj"]))
    trainer = quiet_trainer(enable_checkpointing=True)
    run(GRPO({"main": made}), echo(), trainer, iterations=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert os.path.getsize(tmp_path / "last.ckpt") < 0.05 * size


def test_settings_that_fit_no_layer_or_policy_are_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"target_modules is .all-linear.; give a list of names"):
        LoRA(target_modules="all-linear")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"LoRA: rank is 0"):
        LoRA(rank=0)
    with pytest.raises(PolicyError, match="has lora but is not trained; set `lora: null`"):
        Policy(str(model_folder), lora=LoRA(), trained=False)
    with pytest.raises(ConfigurationError, match="target_modules"):
        Policy(str(model_folder), lora=LoRA(target_modules=["no_such_layer"])).load()


def test_gradient_checkpointing_does_not_change_the_update(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    weights = []
    for checkpointing in (False, True):
        made = Policy(str(model_folder), learning_rate=1e-3, gradient_checkpointing=checkpointing)
        algorithm = run(GRPO({"main": made}), echo(), quiet_trainer(), iterations=1)
        assert made.network.is_gradient_checkpointing == checkpointing
        weights.append(algorithm.policy("main").network.model.layers[0].mlp.up_proj.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)
