"""Which GPUs workers get: never the learner's, unless the user says so."""

from __future__ import annotations

import pytest

from mrlm_pl.engines import PoolResources, WeightTransfer
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.ray.gpus import GpuLedger, room_for_workers, visible_gpus
from mrlm_pl.errors import ConfigurationError


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("0,1", ("0", "1")), (" 3 ,5", ("3", "5")), ("", ()), ("2,-1,3", ("2",)), ("GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd"))],
)
def test_ids_are_those_of_the_environment(listed: str, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == expected


def test_without_it_they_are_all_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert visible_gpus() == ("0", "1", "2")


def test_the_gpus_of_all_ranks_are_kept_from_the_workers_of_each() -> None:
    visible = ["4", "5", "6", "7", "8"]
    places = [LearnerPlace((0, 2), number, 2) for number in range(2)]
    rooms = [room_for_workers(visible, place) for place in places]
    assert rooms == [{"5": 1.0, "7": 0.5}, {"7": 0.5, "8": 1.0}], "three are free for two"
    assert room_for_workers(visible, places[1], share=True) == {"7": 0.5, "8": 1.0, "6": 1.0}, "its own comes last"
    assert room_for_workers(visible, LearnerPlace()) == dict.fromkeys(visible, 1.0)
    assert room_for_workers(["0"], LearnerPlace((0,))) == {}


def test_workers_take_the_first_that_have_room() -> None:
    ledger, room = GpuLedger(), {"1": 1.0, "2": 1.0, "3": 1.0}
    rollout = ledger.take(3, 0.5, room)
    assert rollout == [("1",), ("1",), ("2",)]
    assert ledger.take(1, 1, room) == [("3",)]
    assert ledger.take(1, 0.5, room) == [("2",)], "another pool fills it up"
    with pytest.raises(ConfigurationError, match=r"1 workers want 0.5 GPUs each.*share_learner_gpus: true"):
        ledger.take(1, 0.5, room)
    ledger.give_back(rollout, 0.5)
    assert ledger.take(1, 1, room) == [("1",)]


def test_whole_gpus_are_given_by_the_number() -> None:
    ledger, room = GpuLedger(), {"0": 1.0, "1": 0.5, "2": 1.0, "3": 1.0, "4": 1.0}
    assert ledger.take(2, 2, room) == [("0", "2"), ("3", "4")]
    with pytest.raises(ConfigurationError):
        ledger.take(1, 1, room)


def test_thirds_add_up_to_a_whole() -> None:
    room = room_for_workers(["0", "1"], LearnerPlace((0,), 0, 1))
    assert GpuLedger().take(3, 1 / 3, room) == [("1",)] * 3
    shares = [room_for_workers(["0"], LearnerPlace((), number, 3)) for number in range(3)]
    assert [GpuLedger().take(1, 1 / 3, share) for share in shares] == [[("0",)]] * 3


def test_weights_go_from_gpu_to_gpu_only_where_each_side_has_its_own() -> None:
    automatic, learner, whole = WeightTransfer(), LearnerPlace((0,)), PoolResources(gpus=1)
    assert automatic.between(learner, whole) == "nccl"
    assert automatic.between(learner, PoolResources(gpus=2)) == "nccl"
    assert automatic.between(LearnerPlace(), whole) == "gloo", "the learner computes on CPUs"
    assert automatic.between(learner, PoolResources(gpus=0.5)) == "gloo"
    assert automatic.between(learner, PoolResources(gpus=1, share_learner_gpus=True)) == "gloo"
    assert WeightTransfer(transport="gloo").between(learner, whole) == "gloo"
