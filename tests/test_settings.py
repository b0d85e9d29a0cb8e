"""Names of models and mappings of settings instead of instances, and messages for wrong ones."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Optional, TypeAlias, get_type_hints

import numpy
import pytest
import torch
from mrlm_environments import MathEnvironment, QuestionEnvironment
from mrlm_environments.question.environment import Reward

from mrlm_pl.algorithms import DPO, GRPO, KTO, MAGRPO, PPO, SFT, PairwiseRewardModel
from mrlm_pl.data import PreferenceDataModule, RolloutDataModule, TrajectoryDataModule
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.engines import PoolResources, RayPool, Sampling
from mrlm_pl.engines.base import PolicySampling
from mrlm_pl.engines.http.replicas import Terms
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode_files import EpisodeRetention
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.learner.policies.distillation import Distillation, Teacher
from mrlm_pl.learner.policies.reference import KL
from mrlm_pl.losses import Correction
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.runs import Trainer, collect, evaluate
from mrlm_pl.settings import (
    ChecksArguments,
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
    between,
    check_arguments,
    ranges_of,
    some_of,
)

Count: TypeAlias = int | None
Direction = Literal["up", "down"]
RANGES = re.compile(r"at_least|between|POSITIVE|(Positive|NonNegative)(Int|Float)|UnitInterval|Fraction(Above|Below)")


def test_a_policy_may_be_the_name_of_a_model_or_its_settings(model_folder: Path) -> None:
    settings = {"model": str(model_folder), "learning_rate": 0.25, "lora": {"rank": 2}}
    algorithm = GRPO({"one": str(model_folder), "two": settings}, {"a": "one", "b": "two"})  # type: ignore[dict-item]
    assert algorithm.policy("one").name_or_path == str(model_folder)
    assert (algorithm.policy("two").learning_rate, algorithm.policy("two").lora) == (0.25, LoRA(rank=2))


def test_settings_may_be_mappings(model_folder: Path) -> None:
    sampling: Any = {"temperature": 0.5, "max_tokens": 7}
    data = RolloutDataModule(MathEnvironment(), sampling=sampling)
    assert data.sampling == data.validation_sampling == Sampling(temperature=0.5, max_tokens=7)
    correction: Any = {"kind": "truncated", "cap": 3.0}
    algorithm = GRPO({"main": Policy(str(model_folder))}, correction=correction)
    assert algorithm.old_policy.correction == Correction("truncated", cap=3.0)


@pytest.mark.parametrize(
    ("policies", "fault"),
    [
        (
            {"main": {"lerning_rate": 1.0}},
            r"policies.main.lerning_rate: .* did you mean 'learning_rate'\?",
        ),
        ({"main": 3}, "policies.main is 3; give Policy or a mapping of its settings"),
        ({"a.b": {}}, "policies: 'a.b' is not a name of a policy, .* give one without dots and slashes"),
        ({"../main": {}}, "policies: '../main' is not a name of a policy"),
        ({"main": {"lora": 4}}, "lora is 4; give LoRA or a mapping of its settings"),
    ],
)
def test_a_policy_of_another_kind_is_named(policies: Any, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        GRPO(policies)


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ("math", "data.environment: 'math' is not an environment; give an instance of its class"),
        (MathEnvironment, r"is not an environment; call it: MathEnvironment\(\)"),
        ([], "data.environment is an empty list; give at least one environment"),
        ([MathEnvironment(), None], "data.environment: None is not an environment"),
    ],
)
def test_what_is_no_environment_is_named(environment: Any, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        RolloutDataModule(environment)


def test_a_misspelt_setting_is_named_with_the_nearest() -> None:
    sampling: Any = {"temprature": 1.0}
    with pytest.raises(ConfigurationError, match=r"Module: sampling.temprature: .*did you mean 'temperature'\?"):
        RolloutDataModule(MathEnvironment(), sampling=sampling)


def test_a_mapping_becomes_the_settings_of_the_annotation() -> None:
    sampling = Sampling(policies=MappingProxyType({"solver": {"top_k": 5}}))  # type: ignore[dict-item]
    assert sampling.policies == {"solver": PolicySampling(top_k=5)}
    assert PPO(kl={"coefficient": 0.1}).kl.settings == PPO(kl=KL(0.1)).kl.settings == KL(0.1, placement="reward")
    assert GRPO(kl=KL(0.1)).kl.settings.placement == "loss"


@pytest.mark.parametrize(
    ("make", "arguments", "fault"),
    [
        (GRPO, {"policies": [1]}, "policies is a list; give policies by name, as in {'main': policy}"),
        (GRPO, {"seats": ["main"]}, "seats is ['main']; name the policy of each agent, as in {'agent': 'main'}"),
        (Sampling, {"max_tokens": "8"}, "Sampling: max_tokens is '8'; it must be a whole number"),
        (collect, {"model": "builtin:tiny", "output": "e.jsonl", "seed": None}, "collect: seed is None; give a value"),
        (collect, {"model": "builtin:tiny", "output": "e", "num_episodes": -3}, "num_episodes is -3; it must be 1 or"),
        (evaluate, {"model": "builtin:tiny", "environment": "math", "num_episodes": -3}, "num_episodes is -3; it must"),
        (evaluate, {"model": "builtin:tiny", "environment": 3}, "environment is 3; give a short name, a class or an"),
        (evaluate, {"model": "builtin:tiny", "environment": "math", "max_turns": 0}, "max_turns is 0; it must be 1"),
        (Sampling, {"max_tokens": 8.0}, "Sampling: max_tokens is 8.0; it must be a whole number"),
        (RolloutDataModule, {"groups": 2.0}, "RolloutDataModule: groups is 2.0; it must be a whole number"),
        (RolloutDataModule, {"mode": None}, "RolloutDataModule: mode is None; give a value"),
        (Correction, {"kind": None}, "Correction: kind is None; give a value"),
        (GRPO, {"overlong_buffer": 4.0}, "GRPO: overlong_buffer is 4.0; it must be a whole number"),
        (LoRA, {"rank": 2.0}, "LoRA: rank is 2.0; it must be a whole number"),
        (TrajectoryDataModule, {"train": [{"prompt": "x"}]}, "data.train is a list; give the path of a file"),
        (Trainer, {"logger": "wandb"}, "trainer.logger: 'wandb' is not a logger; give an instance of its class"),
        (RolloutDataModule, {"engine": "vllm"}, "data.engine: 'vllm' is not an engine; give an instance of its class"),
        (RolloutDataModule, {"async_options": 3}, "Module: async_options is 3; give AsyncOptions or a mapping of its"),
        (RolloutDataModule, {"cross_policy": 0.5}, "Module: cross_policy is 0.5; give CrossPolicy or a mapping of its"),
        (GRPO, {"advantage": None}, "GRPO: advantage is None; give a value"),
        (SFT, {"reduction": "mean"}, "SFT: reduction is 'mean'; did you mean 'token_mean'? Choose from"),
        (RolloutDataModule, {"curriculum": 0.5}, "Module: curriculum is 0.5; give SuccessRateCurriculum or a mapping"),
        (RolloutDataModule, {"environment": MathEnvironment}, "is not an environment; call it: MathEnvironment()"),
        (check_environment, {"environment": "math"}, "check_environment: 'math' is not an environment; give"),
        (MathEnvironment, {"difficulty": 1}, "math: difficulty is 1; give [lowest, highest] from 1 to 5"),
    ],
)
def test_values_of_another_type_are_named(make: Any, arguments: dict[str, Any], fault: str) -> None:
    given = {"environment": MathEnvironment(), **arguments} if make is RolloutDataModule else arguments
    with pytest.raises(ConfigurationError, match=re.escape(fault)):
        make(**given)


@pytest.mark.parametrize("scalar", [numpy.float64, numpy.float32, torch.tensor])
def test_scalars_of_other_libraries_are_taken_as_python_numbers(scalar: Any) -> None:
    """A checkpoint with others, in an optimizer's settings, could not be read again."""
    whole = numpy.int64 if scalar is not torch.tensor else torch.tensor
    numbers: Any = {"groups": whole(4), "seed": whole(3), "sampling": Sampling(temperature=scalar(2))}
    data = RolloutDataModule(MathEnvironment(), **numbers)
    made = [
        Policy("builtin:tiny", scalar(0.5)).learning_rate,
        KL(coefficient=scalar(0.5)).coefficient,
        Optimization(betas=(scalar(0.5), scalar(0.5))).betas[1],
        PPO({"main": Policy()}, value_learning_rate=scalar(0.5)).critic.value_learning_rate,  # has keywords of any name
        data.sampling.temperature / 4,
    ]
    assert (made, {*map(type, made)}) == ([0.5] * 5, {float})
    assert (data.seed, type(data.seed), type(data.collection.plan.groups)) == (3, int, int)


@pytest.mark.parametrize(
    ("make", "name", "nearest"),
    [
        (GRPO, "beta", "kl"),
        (GRPO, "gama", "gamma"),
        (MAGRPO, "gama", "gamma"),  # of the class between it and the one that refuses
        (Policy, "lr", "learning_rate"),
        (RolloutDataModule, "num_generations", "group_size"),
        (SFT, "objectiv", "objective"),
        (DPO, "betta", "beta"),
        (KTO, "betta", "beta"),
        (PairwiseRewardModel, "marginn", "margin"),
        (TrajectoryDataModule, "batch", "batch_size"),
        (PreferenceDataModule, "gap", "reward_gap"),
        (KL, "coef", "coefficient"),
        (LoRA, "r", "rank"),
        (LoRA, "lora_alpha", "alpha"),
        (QuestionEnvironment, "reward_funcs", "rewards"),
        (Optimization, "warmup", "warmup_steps"),
        (Trainer, "max_epoch", "max_epochs"),
        (Sampling, "max_token", "max_tokens"),
        (Distillation, "teacher", "teachers"),
        (Teacher, "weights", "weight"),
        (PoolResources, "cpu", "cpus"),
        (RayPool, "adress", "address"),
        (Terms, "timeout", "timeout_seconds"),
        (AsyncOptions, "patient", "patience"),
        (CrossPolicy, "shares", "share"),
        (EpisodeRetention, "lasts", "last"),
        (Reward, "weights", "weight"),
        (evaluate, "n_episodes", "num_episodes"),
        (collect, "n_episodes", "num_episodes"),
    ],
)
def test_an_unknown_argument_is_named_with_the_nearest(make: Any, name: str, nearest: str) -> None:
    said = rf"{make.__name__} has no {name!r}; did you mean {nearest!r}\? It accepts: .*\b{nearest}\b"
    with pytest.raises(TypeError, match=said):
        make(*([] if make in (Trainer, RayPool) else ["builtin:tiny"]), **{name: 1})


def test_a_float_by_position_is_named_too() -> None:
    with pytest.raises(ConfigurationError, match=r"LoRA: rank is 2\.5; it must be a whole number"):
        LoRA(2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("postponed", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize(
    ("arguments", "error", "fault"),
    [
        ({"kind": "maskd"}, ConfigurationError, r"Mine: kind is 'maskd'; did you mean 'masked'\?"),
        ({"level": "row"}, ConfigurationError, "Mine: level is 'row'; choose from token, sequence, geometric_mean"),
        ({"side": "middle"}, ConfigurationError, "Mine: side is 'middle'; choose from left, right"),
        ({"size": 1.5}, ConfigurationError, r"Mine: size is 1\.5; it must be a whole number"),
        ({"cap": None}, ConfigurationError, "Mine: cap is None; give a value"),
        ({"siez": 1}, TypeError, r"Mine has no 'siez'; did you mean 'size'\?"),
    ],
)
def test_a_data_class_of_a_users_module_keeps_the_checks_of_the_settings_that_it_extends(
    arguments: dict[str, Any], error: type[Exception], fault: str, postponed: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Neither module knows the names in the annotations of the other."""
    (tmp_path / "module_of_a_user.py").write_text(
        f"{postponed}from dataclasses import dataclass\nfrom typing import Literal as OneOf\n"
        "from mrlm_pl.losses import Correction\n\n@dataclass(frozen=True)\nclass Mine(Correction):\n"
        "    size: int = 1\n    side: OneOf['left', 'right'] = 'left'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_a_user", raising=False)  # that of other arguments
    mine = importlib.import_module("module_of_a_user")
    assert type(mine.Mine(size=numpy.int64(3)).size) is int
    with pytest.raises(error, match=fault):
        mine.Mine(**arguments)


def test_arguments_of_any_name_and_number_are_none_to_name() -> None:
    class Own(GRPO):
        def __init__(self, *args: Any, mine: int = 1, **options: Any) -> None:
            super().__init__(*args, **options)

    with pytest.raises(TypeError, match=r"Own has no 'mien'; did you mean 'mine'\? It accepts: mine, policies"):
        Own("builtin:tiny", mien=1)


def test_a_policy_without_a_name_is_refused() -> None:
    policy: Any = Policy()
    with pytest.raises(ConfigurationError, match="policies is a Policy; give policies by name"):
        GRPO(policy)


def test_an_option_that_may_be_left_out_may_be_none_however_its_type_is_written() -> None:
    @check_arguments
    def of_a_plugin(goal: Optional[float], count: Count = None) -> tuple[Any, Any]:  # noqa: UP045
        return goal, count

    assert of_a_plugin(goal=None, count=None) == (None, None)


def test_a_value_that_the_annotation_does_not_list_is_refused() -> None:
    @check_arguments
    def of_a_plugin(way: Direction | Literal["left"] | None = None, rule: Direction | type = "up") -> tuple[Any, Any]:
        return way, rule

    assert [of_a_plugin(way)[0] for way in ("up", "down", "left", None)] == ["up", "down", "left", None]  # type: ignore[arg-type]
    for arguments in (["right"], [["up"]], [0]):
        with pytest.raises(ConfigurationError, match=r"of_a_plugin: way is .*; choose from up, down, left"):
            of_a_plugin(*arguments)  # type: ignore[arg-type]
    assert of_a_plugin(rule=int)[1] is int, "a choice or a class: the function checks it"


def test_a_choice_that_may_be_a_function_is_one_of_the_listed_values_or_a_function() -> None:
    @check_arguments
    def of_a_plugin(rule: Direction | Callable[[int], int] = "up", way: Direction = "up") -> Any:
        return rule

    assert [of_a_plugin("down"), of_a_plugin(abs)] == ["down", abs]
    for options, fault in [
        ({"rule": "upp"}, r"rule is 'upp'; did you mean 'up'\? Choose from up, down"),
        ({"rule": 3}, "rule is 3; choose from up, down"),
        ({"rule": None}, "rule is None; give a value"),
        ({"way": abs}, "way is <built-in function abs>; choose from up, down"),
        ({"way": None}, "way is None; give a value"),
    ]:
        with pytest.raises(ConfigurationError, match=f"of_a_plugin: {fault}"):
            of_a_plugin(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("annotation", ["a number", "torch.NoSuchType", "NoSuchName", [int], 3])
def test_an_annotation_that_is_no_type_is_no_fault_of_a_plugin(annotation: Any) -> None:
    def of_a_plugin(size: Any) -> Any:
        return size

    of_a_plugin.__annotations__["size"] = annotation
    assert check_arguments(of_a_plugin)(size=2) == 2


def test_arguments_of_a_plugin_that_are_no_numbers_are_taken_as_they_are() -> None:
    @check_arguments
    def of_a_plugin(*parts: Any, scale: torch.Tensor, rate: float, count: int = 1) -> tuple[Any, ...]:
        return (*parts, scale, rate, count)

    weight = torch.nn.Parameter(torch.tensor(0.5))
    *parts, scale, rate, count = of_a_plugin("a", None, scale=weight, rate=numpy.float64(0.25))
    assert parts == ["a", None]
    assert scale is weight
    assert (type(rate), rate, count) == (float, 0.25, 1)


def test_annotations_of_checked_arguments_can_be_evaluated() -> None:
    """Else their choices would not be checked, without a word."""
    checked = check_arguments(lambda: None).__code__  # the code of every checked function
    found = 0
    for name in [
        name for name in sys.modules if name.startswith(("mrlm_pl.", "mrlm_environments.", "mrlm_callbacks."))
    ]:
        for member in [*vars(sys.modules[name]).values()]:
            function = vars(member).get("__init__") if isinstance(member, type) else member
            if getattr(function, "__code__", None) is checked:
                get_type_hints(function)
                found += 1
    assert found > 20


def test_ranges_in_the_annotations_of_constructors_are_checked() -> None:
    """Else they would be words: a class without the check, or with keywords of any name in a package beside ours."""
    checked = check_arguments(lambda: None).__code__
    names = [name for name in sys.modules if name.startswith(("mrlm_pl.", "mrlm_environments.", "mrlm_callbacks."))]
    classes = {member for name in names for member in vars(sys.modules[name]).values() if isinstance(member, type)}
    found = 0
    for function in [function for cls in classes if (function := vars(cls).get("__init__"))]:
        text = " ".join(map(str, getattr(function, "__annotations__", {}).values()))
        if RANGES.search(text):
            assert function.__code__ is checked, function.__qualname__
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("name", "valid", "fault"),
    [
        ("whole", (1, 10**9), [(0, "1 or above"), (2.5, "a whole number")]),
        ("left_out", (None, 0), [(-1, "0 or above"), (2.5, "a whole number")]),
        ("positive", (5e-324, 1e308), [(0, "above 0 and finite"), (float("inf"), "above 0 and finite")]),
        ("part", (0, 1.0), [(1.5, "from 0 to 1"), (float("nan"), "from 0 to 1"), ("x", "from 0 to 1")]),
        ("decay", (0.0, 0.99), [(1, "at least 0 and below 1"), (None, "a value")]),
        ("few", (3, 9), [(2, "from 3 to 9"), (10, "from 3 to 9")]),
    ],
)
@pytest.mark.parametrize("by_position", [False, True])
def test_numbers_out_of_the_range_of_their_annotation_are_refused(
    name: str, valid: Sequence[Any], fault: Sequence[tuple[Any, str]], by_position: bool
) -> None:
    @dataclass(frozen=True)
    class Base(Settings):
        whole: PositiveInt = 1
        left_out: NonNegativeInt | None = None
        positive: PositiveFloat = 1.0

    @dataclass(frozen=True)
    class Mine(Base):
        part: UnitInterval = 0.5
        decay: FractionBelowOne = 0.5
        few: Annotated[int, between(3, 9)] = 3

    def make(value: Any) -> Any:
        before = itertools.takewhile(lambda field: field.name != name, fields(Mine))
        return Mine(*(field.default for field in before), value) if by_position else Mine(**{name: value})

    assert [getattr(make(value), name) for value in valid] == list(valid)
    for value, words in fault:
        with pytest.raises(ConfigurationError, match=rf"^Mine: {name} is {value!r}.*{words}"):
            make(value)
    assert ranges_of(Mine)["few"] == "from 3 to 9"


@pytest.mark.parametrize("other", ["pandas_of_checkers.DataFrame | None", "callable | None", "no type"])
def test_an_annotation_that_is_no_type_hides_no_other(other: str) -> None:
    def of_a_plugin(table: Any = None, count: Any = 1, mode: Any = "a") -> Any:
        return table, count, mode

    of_a_plugin.__annotations__ |= {"table": other, "count": "int", "mode": "Literal['a', 'b']"}
    for options in ({"count": 1.5}, {"mode": "c"}):
        with pytest.raises(ConfigurationError, match=r"of_a_plugin: (count is 1\.5|mode is 'c')"):
            check_arguments(of_a_plugin)(**options)


def test_annotations_around_unions_and_choices_are_checked_too() -> None:
    @check_arguments
    def of_a_plugin(
        mode: Annotated[Literal["a", "b"], "of mine"] = "a",
        count: Annotated[int | None, between(1, 9)] = None,
        size: PositiveInt | Literal["auto"] | Callable[[int], int] | dict[str, int] = "auto",
    ) -> Any:
        return mode, count, size

    for options in ({"mode": "c"}, {"count": 1.5}, {"count": 0}, {"size": 0}):
        ((name, value),) = options.items()
        with pytest.raises(ConfigurationError, match=f"of_a_plugin: {name} is {value!r}; "):
            of_a_plugin(**options)
    for size in ("auto", abs, {"a": 1}):  # the range is that of the numbers among them
        assert of_a_plugin(size=size)[-1] == size


def test_an_argument_of_another_type_has_no_range_of_the_base() -> None:
    class Mine(KTO):
        def __init__(self, beta: str = "", **settings: Any) -> None:
            super().__init__(**settings)

    assert "beta" in ranges_of(KTO)
    assert "beta" not in ranges_of(Mine)


def test_a_name_that_only_type_checkers_import_hides_no_range() -> None:
    def of_a_plugin(size: Any, count: Any = 1) -> Any:
        return size, count

    of_a_plugin.__annotations__ |= {"size": "NoSuchName[str] | None", "count": "PositiveInt"}
    with pytest.raises(ConfigurationError, match="of_a_plugin: count is 0; it must be 1 or above"):
        check_arguments(of_a_plugin)("any", 0)


def test_arguments_that_have_no_keyword_keep_their_places() -> None:
    @check_arguments
    def of_a_plugin(first: str, /, second: int) -> tuple[str, int]:
        return first, second

    assert of_a_plugin("a", second=2) == of_a_plugin("a", 2) == ("a", 2)
    with pytest.raises(ConfigurationError, match=r"second is 2\.5; it must be a whole number"):
        of_a_plugin("a", 2.5)  # type: ignore[arg-type]


def test_constructors_of_a_plugin_keep_the_frames_that_save_hyperparameters_follows() -> None:
    class Mine(GRPO):
        def __init__(self, policies: Any = None, gain: int = 7, **settings: Any) -> None:
            super().__init__(policies, **settings)
            self.save_hyperparameters(ignore=["policies"])

    class Other(Mine):
        def __init__(self, policies: Any = None, bias: int = 5, **settings: Any) -> None:
            super().__init__(policies, **settings)

    hyperparameters = Other({"main": "builtin:tiny"}, bias=6).hparams
    assert (hyperparameters["gain"], hyperparameters["bias"]) == (7, 6)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"flag": "false"}, "flag is 'false'; it must be true or false"),
        ({"flag": 1}, "flag is 1; it must be true or false"),
        ({"count": True}, "count is True; it must be a whole number, 1 or above"),
        ({"rate": "0.5"}, "rate is '0.5'; it must be a number"),
        ({"pair": (1, 0)}, "pair[1] is 0; it must be 1 or above"),
        ({"parts": [0.5, 1.5]}, "parts[1] is 1.5; it must be from 0 to 1"),
        ({"weights": {"a": "1"}}, "weights['a'] is '1'; it must be a number"),
        ({"nested": [[1], [2.5]]}, "nested[1][0] is 2.5; it must be a whole number"),
        ({"sides": ["up", "dwn"]}, "sides[1] is 'dwn'; did you mean 'down'? Choose from up, down"),
    ],
)
def test_truth_values_and_the_values_in_containers_are_checked(options: Any, fault: str) -> None:
    @dataclass(frozen=True)
    class Mine(Settings):
        flag: bool = False
        count: PositiveInt = 1
        rate: float | None = None
        pair: tuple[PositiveInt, PositiveInt] = (1, 1)
        parts: list[UnitInterval] | None = None
        weights: dict[str, float] | None = None
        nested: list[list[int]] | None = None
        sides: Sequence[Direction] = ()
        labeled: tuple[int, str] = (1, "")

    good: Any = {"flag": numpy.bool_(True), "parts": (0, 1), "weights": {"a": numpy.float32(2)}, "labeled": (2, "b")}
    made = Mine(**good)
    assert (made.flag, made.parts, made.weights, made.labeled) == (True, (0, 1), {"a": 2.0}, (2, "b"))
    assert [type(made.flag), type((made.weights or {})["a"])] == [bool, float]
    with pytest.raises(ConfigurationError, match=re.escape(f"Mine: {fault}")):
        Mine(**options)


def test_containers_without_a_change_stay_the_same_objects_and_arrays_are_sequences() -> None:
    class Mine(ChecksArguments):
        def __init__(self, seen: list[int], weights: dict[str, PositiveFloat]) -> None:
            self.seen, self.weights = seen, weights

    seen, weights = [1], {"a": 1.0}
    made = Mine(seen, weights)
    assert (made.seen is seen, made.weights is weights) == (True, True), "others may add to them"
    for betas in (numpy.array([0.5, 0.75]), torch.tensor([0.5, 0.75])):
        assert [(type(beta), beta) for beta in Optimization(betas=betas).betas] == [(float, 0.5), (float, 0.75)]  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=re.escape("betas[1] is 1.5; it must be at least 0 and below 1")):
        Optimization(betas=numpy.array([0.5, 1.5]))  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [[], ["a", "x"]])
def test_a_choice_of_several_holds_one_or_more_of_them(kinds: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"math: kinds is {kinds}; choose from a, b")):
        some_of(["a", "b"], "math: ", kinds=kinds)
