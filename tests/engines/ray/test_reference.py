"""A reference pool: the learner's numbers from workers, which are threads here, and what happens when they are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrlm_pl.engines import PoolDeadlines, PoolResources, RayPool, RayReference, WeightTransfer
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.ray import group as worker_group
from mrlm_pl.engines.ray.workers import Precision
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.policy import LoRA, Policy
from tests.engines.conftest import build
from tests.support.models.pool_parts import FakeActor, FakeCluster, stand_in

MakeReference = Callable[..., tuple[RayReference, FakeCluster]]


@pytest.fixture
def make_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeReference]:
    """A factory of reference pools whose workers are threads; all are closed afterwards."""
    made: list[RayReference] = []

    def make(workers: int = 1, **options: Any) -> tuple[RayReference, FakeCluster]:
        cluster = stand_in(monkeypatch)
        options.setdefault("transfer", WeightTransfer(bucket_bytes=2**16, transport="gloo"))
        options.setdefault("deadlines", PoolDeadlines(start=60, sample=60, transfer=60, silence=1))
        made.append(RayReference(workers, **options))
        return made[-1], cluster

    yield make
    for reference in made:
        reference.close()


def table(rows: int = 12, width: int = 30, temperature: float = 1.0) -> PolicyBatch:
    """Return rows of random tokens in groups of four that begin alike, one of them without actions."""
    generator = torch.Generator().manual_seed(rows)
    token_ids = torch.randint(5, 40, (rows, width), generator=generator)
    lengths = torch.randint(12, width + 1, (rows,), generator=generator)
    groups = torch.arange(rows) // 4
    for row in range(rows):
        token_ids[row, :8] = token_ids[4 * (row // 4), :8]
    places = torch.arange(width)
    mask = (places >= 8) & (places < lengths[:, None])
    mask[rows // 2] = False
    zeros = torch.zeros(rows, width)
    temperatures = torch.full((rows,), temperature)
    return PolicyBatch(token_ids, lengths, mask, zeros, groups, groups, lengths, temperatures, zeros)


def initial(policy: Policy, rows: PolicyBatch) -> torch.Tensor:
    """Return log-probabilities of a learner that holds the reference."""
    policy.load(reference=True)
    return policy.reference_logprobs(**rows.inputs())


def moved(policy: Policy) -> None:
    """Change the trained weights."""
    with torch.no_grad():
        for weight in policy.model.parameters():
            if weight.requires_grad:
                weight.add_(0.05)


@pytest.fixture(params=["llama", "padded", "logits", "lora", "random"])
def make_policy(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Callable[..., Policy]:
    """A factory of policies that all begin with the same weights."""
    kind, folder, options = request.param, model_folder, {}
    if kind in ("padded", "logits"):
        from mrlm_pl.policy.tiny import build_tokenizer

        folder = tmp_path / kind
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = build({"padded": "gpt2", "logits": "mamba"}[kind])
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    elif kind == "random":
        options = {"random_init_seed": 5}
    elif kind == "lora":
        options = {"lora": LoRA(rank=2)}
    return lambda **more: Policy(str(folder), **options, **more)


@pytest.mark.parametrize("max_tokens", [None, 64])
@pytest.mark.long_after(4)
def test_the_numbers_are_the_learners_bit_for_bit(
    make_reference: MakeReference, make_policy: Callable[..., Policy], max_tokens: int | None
) -> None:
    reference, cluster = make_reference(1 if max_tokens is None else 3)
    rows, policy = table(temperature=0.7), make_policy(max_forward_tokens=max_tokens)
    policy.load()
    moved(policy)  # as after a resume: the policy has changed
    found = reference.logprobs(policy, rows)
    assert policy.reference is None
    assert torch.equal(found, initial(make_policy(max_forward_tokens=max_tokens), rows))
    assert found.shape == rows.token_ids.shape
    assert not found[~rows.action_mask].any()
    passes = sum(actor.calls.count("logprobs") for actor in cluster.actors)
    assert (passes == 1) == (max_tokens is None)


def test_an_adapter_on_the_output_head_only_changes_the_rounding(make_reference: MakeReference, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from mrlm_pl.policy.tiny import build_config, build_tokenizer

    folder, rows = tmp_path / "untied", table()
    config = build_config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    policy = Policy(str(folder), lora=LoRA(rank=2, target_modules=["lm_head"]))
    policy.load()
    moved(policy)
    reference, _ = make_reference()
    # The learner computes all logits where the head is not a plain layer; a worker has the model without adapters.
    wanted = policy.reference_logprobs(**rows.inputs())
    torch.testing.assert_close(reference.logprobs(policy, rows), wanted, rtol=1e-5, atol=1e-5)


def test_the_numbers_are_those_of_transformers(make_reference: MakeReference, model_folder: Path) -> None:
    reference, cluster = make_reference(3)
    rows, policy = table(), Policy(str(model_folder))
    policy.load()
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    attended = (torch.arange(30) < rows.lengths[:, None]).long()
    with torch.no_grad():
        logits = model(input_ids=rows.token_ids, attention_mask=attended).logits.log_softmax(-1)
    wanted = logits[:, :-1].gather(-1, rows.token_ids[:, 1:, None]).squeeze(-1)
    wanted = torch.nn.functional.pad(wanted, (1, 0)) * rows.action_mask
    # Even shares of the rows for three workers: other passes than the learner's single one, other rounding.
    torch.testing.assert_close(reference.logprobs(policy, rows), wanted, rtol=1e-5, atol=1e-5)
    assert all("logprobs" in actor.calls for actor in cluster.actors)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_reduced_precision_is_the_learners(make_reference: MakeReference, model_folder: Path, precision: str) -> None:
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision

    plugin: Any = {
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
        "64-true": DoublePrecision,
    }[precision]()
    rows, here, there = table(), Policy(str(model_folder)), Policy(str(model_folder))
    here.load(reference=True)
    there.load()
    plugin.convert_module(here)
    plugin.convert_module(there)
    reference, _ = make_reference()
    with plugin.forward_context(), torch.no_grad():
        wanted, found = here.reference_logprobs(**rows.inputs()), reference.logprobs(there, rows)
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype
    plain = Policy(str(model_folder))
    assert not torch.equal(found.float(), initial(plain, rows)), "the precision matters"
    assert torch.get_default_dtype() == torch.float32
    assert Precision.now(torch.device("cpu")) == Precision(None, torch.float32)


def test_policies_that_begin_alike_have_one_reference(make_reference: MakeReference, model_folder: Path) -> None:
    reference, cluster = make_reference()
    rows = table()
    policies = [Policy(str(model_folder)), Policy(str(model_folder)), Policy(str(model_folder), random_init_seed=1)]
    for policy in policies:
        policy.load()
    found = [reference.logprobs(policy, rows) for policy in policies]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert cluster.actors[0].calls.count("build") == 2


def test_the_learner_keeps_no_weights_of_the_reference(make_reference: MakeReference, model_folder: Path) -> None:
    reference, _ = make_reference()
    policy = Policy(str(model_folder))
    policy.load()
    reference.logprobs(policy, table())
    assert all(weight.is_meta for planner in reference._planners.values() for weight in planner.parameters())
    assert [served.snapshot.checksums() for served in reference._served.values()] == [{}]


def test_a_worker_that_dies_is_replaced_and_its_pass_made_again(
    make_reference: MakeReference, model_folder: Path
) -> None:
    reference, cluster = make_reference(2)
    policy, rows = Policy(str(model_folder), max_forward_tokens=64), table(24)
    policy.load()
    wanted = initial(Policy(str(model_folder), max_forward_tokens=64), rows)
    reference.logprobs(policy, rows)
    cluster.actors[1].before = lambda method: cluster.actors[1].kill() if method == "logprobs" else None
    assert torch.equal(reference.logprobs(policy, rows), wanted)
    assert reference.replaced == 1
    assert cluster.of(1) is not cluster.actors[1]
    assert "stage" in cluster.of(1).calls
    assert "logprobs" in cluster.of(1).calls


def test_a_worker_that_does_not_answer_is_told_with_who_waits(
    make_reference: MakeReference, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, _ = make_reference(replacements=0)
    policy, stuck = Policy(str(model_folder)), threading.Event()
    policy.load()
    reference.logprobs(policy, table())
    reference.deadlines = PoolDeadlines(60, 0.4, 60, 1)  # starting may take longer
    monkeypatch.setattr(
        "mrlm_pl.engines.ray.workers.pass_logprobs", lambda model, planned: stuck.wait(100) and torch.zeros(0)
    )
    with pytest.raises(
        EngineError,
        match=r"worker 0 of the reference pool on here: .*did not compute log-probabilities for the learner "
        r"within 0.4 s; 0 workers have been replaced",
    ):
        reference.logprobs(policy, table())
    stuck.set()


def test_files_that_have_changed_are_noticed_when_a_worker_is_replaced(
    make_reference: MakeReference, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    Policy(str(model_folder)).tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.save_pretrained(folder)
    reference, cluster = make_reference()
    policy = Policy(str(folder))
    policy.load()
    reference.logprobs(policy, table())
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(folder)
    cluster.actors[0].kill()
    with pytest.raises(EngineError, match=r"'model.norm.weight' has changed since the run began"):
        reference.logprobs(policy, table())


def test_what_the_model_raises_is_told(make_reference: MakeReference, model_folder: Path, monkeypatch: Any) -> None:
    reference, _ = make_reference(2)
    policy = Policy(str(model_folder), max_forward_tokens=64)
    policy.load()

    def fail(model: Any, planned: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("mrlm_pl.engines.ray.workers.pass_logprobs", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        reference.logprobs(policy, table())
    assert reference.replaced == 0
    monkeypatch.undo()


def test_a_closed_pool_says_so(make_reference: MakeReference, model_folder: Path) -> None:
    reference, cluster = make_reference()
    policy = Policy(str(model_folder))
    policy.load()
    reference.logprobs(policy, table())
    reference.close()
    reference.close()
    assert cluster.closed
    with pytest.raises(EngineError, match="the reference pool is closed"):
        reference.logprobs(policy, table())


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="workers is 0"):
        RayReference(0)


# GPUs.


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A machine of four."""
    ids = ("0", "1", "2", "3")
    monkeypatch.setattr(worker_group, "visible_gpus", lambda: ids)
    return ids


def given(cluster: FakeCluster) -> list[list[str]]:
    return [actor.gpus for actor in cluster.actors]


class NotedCluster(FakeCluster):
    """Remembers the visible GPUs of its workers, as under Ray."""

    def actor(self, cls: type, bundle: int, arguments: Any, calls: int, resources: Any) -> FakeActor:
        actor = super().actor(cls, bundle, arguments, calls, resources)
        actor.gpus = str(arguments[0]).split(",") if arguments and arguments[0] else []  # type: ignore[attr-defined]
        return actor


@pytest.mark.parametrize(
    ("place", "resources", "expected"),
    [
        (LearnerPlace((0,)), PoolResources(gpus=1), [["1"], ["2"]]),
        (LearnerPlace((1,)), PoolResources(gpus=0.5), [["0"], ["0"]]),
        (LearnerPlace((0, 1), 1, 2), PoolResources(gpus=0.5), [["3"], ["3"]]),
        (LearnerPlace((0, 1, 2, 3), 2, 4), PoolResources(gpus=0.25, share_learner_gpus=True), [["2"], ["2"]]),
        (LearnerPlace((0,)), PoolResources(), [[], []]),
    ],
)
def test_workers_of_an_own_ray_keep_off_the_learners_gpus(
    place: LearnerPlace,
    resources: PoolResources,
    expected: list[list[str]],
    make_reference: MakeReference,
    model_folder: Path,
    gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference, _ = make_reference(2, resources=resources)
    cluster = NotedCluster()
    monkeypatch.setattr(worker_group, "RayCluster", lambda *arguments: cluster)
    reference.meet_learner(place)
    policy = Policy(str(model_folder))
    policy.load()
    reference.logprobs(policy, table())
    assert given(cluster) == expected
    assert all("GPU" not in bundle or not bundle["GPU"] for bundle in cluster.reserved[0])


def test_without_a_gpu_left_the_remedy_is_told_at_once(
    make_reference: MakeReference, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, cluster = make_reference(resources=PoolResources(gpus=0.5))
    monkeypatch.setattr(worker_group, "visible_gpus", lambda: ("0",))
    reference.meet_learner(LearnerPlace((0,)))
    policy = Policy(str(model_folder))
    policy.load()
    with pytest.raises(ConfigurationError, match="share_learner_gpus: true"):
        reference.logprobs(policy, table())
    assert cluster.closed
    assert not cluster.actors


def test_a_cluster_that_keeps_the_wrong_gpu_free_is_refused(
    make_reference: MakeReference, model_folder: Path, gpus: Any
) -> None:
    policy = Policy(str(model_folder))
    policy.load()
    for reserved, refused in ((["1"], False), (["2"], True)):
        reference, cluster = make_reference(resources=PoolResources(learner_gpus=1))
        cluster.started_here, cluster.learner_gpus = False, reserved
        reference.meet_learner(LearnerPlace((1,)))
        if refused:
            with pytest.raises(ConfigurationError, match=r"Ray at here: .*keeps GPU 2 .*CUDA_VISIBLE_DEVICES=2"):
                reference.logprobs(policy, table())
        else:
            reference.logprobs(policy, table())


def test_a_cluster_that_gives_a_worker_the_learners_gpu_is_refused(
    make_reference: MakeReference, model_folder: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(str(model_folder))
    policy.load()
    host = worker_group.socket.gethostname()
    for device, share, machine, refused in (
        (1, False, host, True),
        (1, True, host, False),
        (0, False, host, False),
        (1, False, "another", False),
    ):
        reference, cluster = make_reference(resources=PoolResources(gpus=0.5, share_learner_gpus=share))
        cluster.started_here = False
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # Ray sets it for a worker's process
        monkeypatch.setattr(worker_group, "socket", SimpleNamespace(gethostname=lambda machine=machine: machine))
        reference.meet_learner(LearnerPlace((device,)))
        if not refused:
            reference.logprobs(policy, table())
        else:
            with pytest.raises(ConfigurationError, match=r"worker 0 of the reference pool on here was given GPU 1"):
                reference.logprobs(policy, table())


def test_a_rollout_pool_is_told_where_the_learner_computes(
    make_reference: MakeReference, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reference()
    cluster = NotedCluster()
    monkeypatch.setattr(worker_group, "RayCluster", lambda *arguments: cluster)
    transfer, deadlines = WeightTransfer(transport="gloo"), PoolDeadlines(60, 60, 60, 1)
    pool = RayPool(2, resources=PoolResources(gpus=1), transfer=transfer, deadlines=deadlines)
    pool.meet_learner(LearnerPlace((0, 2), 0, 2))
    with pytest.raises(ConfigurationError, match="2 workers want 1 GPUs"):
        pool.load("p", build("llama"), 1)
    pool.close()
    pool = RayPool(1, resources=PoolResources(gpus=1), transfer=transfer, deadlines=deadlines)
    pool.meet_learner(LearnerPlace((0, 2), 1, 2))
    pool.load("p", build("llama"), 1)
    assert given(cluster) == [["3"]]
    pool.close()
