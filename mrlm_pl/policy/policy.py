"""Policies: the weights of a causal language model, its tokenizer and how it is trained."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from mrlm_pl.errors import ConfigurationError, PolicyError
from mrlm_pl.model_folders import ADAPTER_FOLDER
from mrlm_pl.policy.chat import PLAIN_TEMPLATE, ChatFormat
from mrlm_pl.policy.chat.template import checked_template, with_arguments
from mrlm_pl.policy.compilation import compile_layers
from mrlm_pl.policy.forward import logprobs, products
from mrlm_pl.policy.forward.devices import drawn_on_host
from mrlm_pl.policy.forward.divergence import Teaching
from mrlm_pl.policy.forward.families import weights_beside_text
from mrlm_pl.policy.forward.int8 import linear_layers, to_int8
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.lora import LayersError, LoRA, add_adapter, is_adapter, merged_state, with_shared_weights
from mrlm_pl.policy.pretrained import (
    BUILTIN_TINY,
    context_window,
    end_ids,
    read_config,
    read_tokenizer,
    read_weights,
    source_of,
    with_dropout,
    write_model,
)
from mrlm_pl.policy.sharding import whole
from mrlm_pl.policy.value_head import ValueHead
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import NonNegativeFloat, PositiveInt, between, check_arguments, check_served_by

Int8 = Literal["weights", "reference"]

logger = logging.getLogger(__name__)


@final
class Policy(nn.Module):
    """A causal language model of ``transformers`` with its tokenizer.

    The constructor reads the configuration and the tokenizer alone, so that mistakes show before the weights are read;
    :meth:`load` reads the weights. They are kept in fp32: a precision plugin casts the computation, not the master
    weights.

    Args:
        model: a hub id, a model folder, the folder of a run that has exported one policy, or ``builtin:tiny``.
        learning_rate: step size of this policy's parameter group.
        weight_decay: decoupled weight decay of all trained weights, norms and biases too.
        trained: whether the weights are trained; False freezes them.
        chat_template: Jinja template instead of the tokenizer's own.
        chat_template_kwargs: values of the template's own arguments, such as ``{enable_thinking: false}``. The exported
            template has them as defaults.
        random_init_seed: seed of random weights for the model's configuration, instead of the stored ones; None reads
            the stored weights.
        dropout: probability of every dropout in the updates of supervised fine-tuning, 0 to 0.99; above 0 the model's
            other training noise, such as a router's, is on too. Algorithms that compare the learner with the sampler
            or with a reference require 0: the learner is then deterministic.
        lora: train low-rank adapters instead of the weights; policies with adapters on the same model share it, and
            their reference is the model without the adapter.
        gradient_checkpointing: keep one hidden state for each layer and recompute the rest in the backward pass.
        compile: compile the decoder layers with ``torch.compile``, in the first updates, which take some ten seconds
            longer; without gradient_checkpointing.
        max_forward_tokens: maximum number of tokens in a forward pass, recomputed in the backward pass, so that memory
            does not grow with the batch; None runs all rows at once.
        served_by: server that generates for this policy: ``HOST:PORT`` of ``mrlm serve --policies`` with a policy of
            this name, or ``http://HOST:PORT`` of vLLM, with the prefix ``sglang+`` or ``transformers+`` for others.
            Such a policy is frozen, and its weights are not read here: ``model`` gives the tokenizer.
        int8: ``weights`` holds the linear layers of a frozen policy in int8, ``reference`` those of a trained policy's
            reference copy: a quarter of their memory, with rounding (docs/scaling/README.md). The output head and the
            embedding stay as they are.
        revision: branch, tag or commit of a model on the hub.

    Attributes:
        context_window: length of the model's context in tokens.
        needs_head: whether the files must hold the output head; critics and reward models do without.

    Raises:
        PolicyError: there is no such model, its family generates no text, it has no tokenizer or no end-of-sequence
            token, or its chat template might not end.
        ConfigurationError: a value is out of range, the template does not read an argument, or ``served_by`` is of
            neither form.
    """

    @check_arguments
    def __init__(
        self,
        model: str = BUILTIN_TINY,
        learning_rate: NonNegativeFloat = 1e-6,
        weight_decay: NonNegativeFloat = 0.0,
        trained: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        random_init_seed: Annotated[int, between(0, 2**63 - 1)] | None = None,
        dropout: Annotated[float, between(0, 0.99)] = 0.0,
        lora: LoRA | None = None,
        gradient_checkpointing: bool = False,
        compile: bool = False,
        max_forward_tokens: PositiveInt | None = None,
        served_by: str | None = None,
        int8: Int8 | None = None,
        revision: str = "main",
    ) -> None:
        super().__init__()
        owner = f"model {model!r}: "
        self.name_or_path = model
        self.learning_rate, self.weight_decay, self.trained = learning_rate, weight_decay, trained
        self.chat_template, self.chat_template_kwargs = chat_template, chat_template_kwargs
        self.random_init_seed, self.dropout = random_init_seed, dropout
        if lora is not None and not trained:
            raise PolicyError(f"{owner}it has lora but is not trained; set `lora: null`, or `trained: true`")
        if compile and gradient_checkpointing:
            raise PolicyError(
                f"model {model!r} has compile and gradient_checkpointing: layers that are recomputed do not run as "
                "compiled code; leave one of them out"
            )
        if served_by is not None and (trained or random_init_seed is not None):
            raise PolicyError(
                f"model {model!r} is served by {served_by}, which has its weights; set `trained: false` and leave out "
                "random_init_seed"
            )
        if served_by is not None:
            check_served_by(served_by, owner)
        _check_int8(int8, owner, trained, lora, served_by)
        self.served_by, self.int8 = served_by, int8
        self.max_forward_tokens, self.lora = max_forward_tokens, lora
        self.gradient_checkpointing, self.compiled = gradient_checkpointing, compile
        self.source, self.revision = source_of(model), revision
        if revision != "main" and Path(self.source).is_dir():
            raise PolicyError(f"{owner}revision is {revision!r}, but a folder has no revisions; leave it out")
        self.config = read_config(model, self.source, revision)
        if served_by is None and type(self.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise PolicyError(
                f"{owner}transformers has no causal language model of the family {self.config.model_type!r}; give a "
                "model of another family, or the address of a server that generates, `served_by`"
            )
        self.tokenizer = read_tokenizer(model, self.source, revision)
        self.context_window = context_window(self.config) or int(self.tokenizer.model_max_length)
        if chat_template is not None:  # the exported folder has the template of the training
            self.tokenizer.chat_template = checked_template(chat_template)
        elif not self.tokenizer.chat_template:
            logger.warning(
                "model %r has no chat template: prompts are written as `User: ...`, `Assistant: ...` lines, and the "
                "exported policy gets this template; `chat_template` sets another",
                model,
            )
            self.tokenizer.chat_template = PLAIN_TEMPLATE
        template = with_arguments(self.tokenizer.chat_template, chat_template_kwargs or {}, model)
        self.tokenizer.chat_template = template
        self.chat = ChatFormat(self.tokenizer, extra_stop_ids=end_ids(self.config, self.source, revision))
        self.vocabulary: int = self.config.get_text_config().vocab_size
        self.model: Any = None
        self.reference: Any = None
        self._moving = False
        self.needs_head = True
        self.value_head: ValueHead | None = None

    @property
    def vocabulary_digest(self) -> str:
        """A digest of the vocabulary: equal for models that can read each other's token ids."""
        return hashlib.sha256(repr(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()

    @property
    def widths(self) -> tuple[int, int]:
        """Inputs and outputs of the first linear layer of the model's feed-forward blocks."""
        config = self.config.get_text_config(decoder=True)
        feed_forward = getattr(config, "intermediate_size", None)
        return int(config.hidden_size), int(feed_forward or 4 * config.hidden_size)

    def load(
        self,
        *,
        reference: bool = False,
        moving: bool = False,
        name: str = "main",
        bases: dict[Any, Any] | None = None,
    ) -> None:
        """Read the weights, once, unless a server has them; with ``reference`` also a frozen copy.

        Args:
            reference: whether log-probabilities of the initial weights are needed. With adapters these are computed
                with the adapters switched off, and there is no copy.
            moving: whether :meth:`move_reference` will change the reference. Checkpoints then hold it; a policy with
                adapters has reference adapters of its own on the same base.
            name: name of the policy; seeds its adapter.
            bases: models that policies with adapters share; this policy's is added if missing.
        """
        if self.served_by is not None:
            return
        bases = {} if bases is None else bases
        if self.model is None:
            self.model = self.initial_model("weights") if self.lora is None else self._add_adapters(bases, name)
            if not self.trained:
                self.model.requires_grad_(False)
            self.model.train()  # transformers loads models in evaluation mode, without dropout
            if self.gradient_checkpointing:
                try:
                    enable = getattr(self.network, "activation_checkpointing_enable", None)  # of newer versions
                    (enable or self.network.gradient_checkpointing_enable)({"use_reentrant": False})
                except ValueError as error:  # the family has none
                    raise PolicyError(
                        f"model {self.name_or_path!r}: {error} Leave gradient_checkpointing out"
                    ) from error
            if self.compiled:
                compile_layers(self.network)
        if reference and self.reference is None and (self.lora is None or moving):
            initial = (
                self.initial_model("reference")
                if self.lora is None
                else self._add_adapters(bases, name).get_base_model()
            )
            self.reference = initial.requires_grad_(False)
            self._moving = moving
            if self.compiled:
                compile_layers(self.reference)

    @property
    def network(self) -> Any:
        """The transformers model of engines, with the adapters inside if there are any.

        Raises:
            PolicyError: its weights are not read yet.
        """
        if self.model is None:
            raise PolicyError(
                f"model {self.name_or_path!r} has no weights yet; call `algorithm.read_weights()`, or `load()`"
            )
        return self.model if self.lora is None else self.model.get_base_model()

    def _add_adapters(self, bases: dict[Any, Any], name: str) -> Any:
        """Return fresh adapters on the base that is shared, which is added to ``bases`` if missing."""
        assert self.lora is not None
        if self.origin not in bases:
            bases[self.origin] = self.initial_model().requires_grad_(False)
        try:
            return add_adapter(with_shared_weights(bases[self.origin]), self.lora, name, self.revision)
        except LayersError as refusal:
            if self.lora.target_modules is not None or not refusal.others:
                raise
            logger.warning("adapters on %s alone: %s", ", ".join(refusal.others), refusal)
            lora = dataclasses.replace(self.lora, target_modules=list(refusal.others))
        return add_adapter(with_shared_weights(bases[self.origin]), lora, name, self.revision)

    @property
    def origin(self) -> tuple[str, str, int | None, float]:
        """The origin of :meth:`initial_model`: policies with the same origin have the same initial weights."""
        return self.source, self.revision, self.random_init_seed, self.dropout

    def add_value_head(self, normalized: bool = False) -> None:
        """Add a value head, with weights of the model's folder if there are any; call it after :meth:`load`."""
        if self.value_head is None:
            self.value_head = ValueHead(self.network.get_output_embeddings().weight.shape[1])
            self.value_head.read(self.source)
            self.value_head.requires_grad_(self.trained)
        if normalized:
            self.value_head.register_buffer("moments", self.value_head.moments)  # persistent

    def load_critic(self, name: str, normalized: bool = False) -> None:
        """Read the weights of a critic, a policy whose output head is not trained, or missing."""
        self.needs_head = False
        self.load(name=name)
        self.add_value_head(normalized)
        embedding = self.network.get_input_embeddings().weight
        for weight in self.network.get_output_embeddings().parameters():
            weight.requires_grad_(weight.requires_grad and weight is embedding)

    def networks(self) -> list[nn.Module]:
        """Return the modules of this policy's forward passes: the model, its reference and its value head."""
        network = None if self.model is None else self.network
        return [module for module in (network, self.reference, self.value_head) if module is not None]

    def is_saved(self, weight: str) -> bool:
        """Return whether checkpoints hold a weight, by its name within the policy: those that change alone."""
        if not self.trained or (weight.startswith("reference.") and not self._moving):
            return False
        return self.lora is None or is_adapter(weight) or weight.startswith("value_head.")

    def idle_loss(self) -> Tensor:
        """Return 0 (0-dim) from a forward pass of the smallest row, with a gradient for every trained weight."""
        outputs = self.outputs(self.idle_row())
        return outputs.logp.sum() + (0.0 if outputs.values is None else outputs.values.sum())

    def idle_values(self) -> Tensor:
        """Return 0 (0-dim), like :meth:`idle_loss`, from the values alone."""
        return self.values(self.idle_row()).sum()

    def idle_row(self) -> TokenRows:
        """Return the smallest row, without an action."""
        return TokenRows(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), torch.zeros(1, 2, dtype=torch.bool))

    def forward(self, rows: TokenRows, *, dropout_key: int | None = None) -> Tensor:
        """Return the log-probability [B, T] of each action token given the tokens before it, 0 elsewhere.

        Args:
            rows: B rows of T tokens; see :class:`~mrlm_pl.policy.forward.packing.TokenRows`.
            dropout_key: index of the update; with the rows it seeds the dropout if a gradient is computed. None
                computes without dropout.
        """
        return logprobs.token_logprobs(self.model, rows, **self._bounds(rows, dropout_key))

    def outputs(
        self, rows: TokenRows, *, with_entropy: bool = False, teaching: Teaching | None = None
    ) -> logprobs.TokenOutputs:
        """Return log-probabilities, entropies and divergences if wanted, and values of a value head, from one pass."""
        requested: dict[str, Any] = {"with_entropy": with_entropy, "value_head": self.value_head, "teaching": teaching}
        return logprobs.token_outputs(self.model, rows, **requested, max_tokens=self.max_forward_tokens)

    def states(self, rows: TokenRows) -> Tensor:
        """Return the last hidden states [n, hidden size] before the action tokens, row by row, without gradient."""
        return logprobs.token_states(self.model, rows, max_tokens=self.max_forward_tokens)

    def values(self, rows: TokenRows, *, dropout_key: int | None = None) -> Tensor:
        """Return the value [B, T] of the state before each action token, 0 elsewhere, at any temperature.

        ``dropout_key`` is that of :meth:`forward`.
        """
        assert self.value_head is not None
        return logprobs.token_values(self.model, self.value_head, rows, **self._bounds(rows, dropout_key))

    @torch.no_grad()
    def reference_logprobs(self, rows: TokenRows) -> Tensor:
        """Return log-probabilities [B, T] of the rows under the reference, as :meth:`forward` under the model."""
        with nullcontext() if self.reference is not None else self.model.disable_adapter():
            model = self.model if self.reference is None else self.reference
            return logprobs.token_logprobs(model, rows, max_tokens=self.max_forward_tokens)

    @torch.no_grad()
    def move_reference(self, decay: float) -> None:
        """Set each reference weight ``w`` to ``decay w + (1 - decay) v``, with the current weight ``v``.

        Raises:
            ConfigurationError: a decay would be lost in the rounding of weights of less than single precision.
        """
        # The state holds the ranks' own shards, even if a forward pass has left weights of the model gathered.
        averages, current = self.reference.state_dict(), self.network.state_dict()
        for name, _ in self.reference.named_parameters():  # names tied weights once
            if self.lora is None or is_adapter(name):
                if decay and averages[name].dtype in (torch.bfloat16, torch.float16):
                    raise ConfigurationError(
                        f"reference_sync.decay is {decay}, but the weights are {averages[name].dtype}, whose rounding "
                        "would keep the average where it is; set the decay to 0, or trainer.precision to bf16-mixed"
                    )
                averages[name].mul_(decay).add_(current[name], alpha=1.0 - decay)

    def save_pretrained(self, folder: str | Path, *, write: bool = True) -> None:
        """Write the model, the tokenizer and the value head as a plain Hugging Face folder.

        Adapters are merged into the weights, and also written to the folder ``adapter`` in it.

        Args:
            folder: folder to write; it is created.
            write: whether this rank writes; False on ranks that only take part in gathering the weights of a
                tensor-parallel model.
        """
        # A frozen policy is exported as it was read.
        weights = merged_state(self.network if self.int8 != "weights" else self.initial_model())
        adapter = {name: whole(value) for name, value in self.model.state_dict().items() if is_adapter(name)}
        if write:
            write_model(self.network, folder, weights)
            if self.lora is not None:
                self.model.save_pretrained(Path(folder) / ADAPTER_FOLDER, state_dict=adapter)
            self.tokenizer.save_pretrained(folder)
        if self.value_head is not None:
            self.value_head.save(folder, write=write)

    def _bounds(self, rows: TokenRows, dropout_key: int | None) -> dict[str, int | None]:
        """Return this policy's bound of a forward pass over rows, and the seed of its dropout."""
        seed = None
        if self.dropout and dropout_key is not None and torch.is_grad_enabled():
            digest = hashlib.blake2b(rows.token_ids.cpu().numpy().tobytes(), digest_size=8).hexdigest()
            seed = derive_seed("dropout", dropout_key, digest)
        return {"max_tokens": self.max_forward_tokens, "noise_seed": seed}

    def initial_model(self, use: Int8 | None = None) -> Any:
        """Return a new model with this policy's weights before its first update, in fp32.

        Args:
            use: purpose of the model; its linear layers are in int8 if ``int8`` names this purpose.

        Raises:
            PolicyError: the weights cannot be read.
        """
        config = with_dropout(self.config, self.dropout, self.name_or_path)
        if hasattr(config, "rescale_every"):  # RWKV divides weights in place in evaluation mode, for fp16
            config.rescale_every = 0
        if self.random_init_seed is not None:
            with drawn_on_host(self.random_init_seed):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            model = read_weights(self.name_or_path, self.source, self.revision, config, self.needs_head)
            if self.lora is not None and any(is_adapter(name) for name, _ in model.named_parameters()):
                raise PolicyError(
                    f"model {self.name_or_path!r}: its files hold an adapter (adapter_config.json), which "
                    "`lora` would replace; merge it into the weights with PEFT's `merge_and_unload`, or leave `lora` "
                    "out"
                )
        model = products.with_fast_products(model) if products.ONEDNN_IS_FASTER else model
        if model.base_model.get_decoder() is not model.base_model:
            for weight in weights_beside_text(model):  # DDP waits for the gradients of all that are trained
                weight.requires_grad_(False)
        if use is not None and use == self.int8:
            to_int8(model, linear_layers(model))
        return model


def _check_int8(int8: Int8 | None, owner: str, trained: bool, lora: LoRA | None, served_by: str | None) -> None:
    """Raise a PolicyError if ``int8`` names weights that are trained, shared, or not here."""
    if int8 == "weights" and trained:
        raise PolicyError(
            f"{owner}int8 is 'weights', but the policy is trained, and updates are smaller than the steps of int8; set "
            "`trained: false`, or `int8: reference` for its reference alone"
        )
    if int8 == "reference" and (not trained or lora is not None):
        remedy = "leave `int8` out" if trained else "set `int8: weights`"
        kind = "with lora, whose reference is the base that it is trained on" if trained else "frozen"
        raise PolicyError(f"{owner}int8 is 'reference', but the policy is {kind}; {remedy}")
    if int8 is not None and served_by is not None:
        raise PolicyError(f"{owner}int8 is {int8!r}, but {served_by} has the weights; set the precision there")
