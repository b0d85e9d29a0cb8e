"""``mrlm eval``."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from mrlm_pl.cli.evaluate import EvaluatedModel, read_model, sampling_of, write_json
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError

FIELDS = {"environment", "model", "split", "seed", "episodes", "mean_reward", "ci95", "accuracy", "pass_at_k"}


@pytest.fixture
def evaluate(mrlm, model_folder):
    def run(*options, model=str(model_folder), status=0):
        arguments = ("--environment", "parrot", "--environment.difficulty", "[1]", "--max-tokens", "2", *options)
        result = mrlm("eval", "--model", model, *arguments)
        assert result[0] == status, result[2]
        return result[1] if status == 0 else result[2]

    return run


def test_report_is_complete_and_the_same_twice(evaluate):
    options = ("--num-episodes", "4", "--samples-per-task", "2", "--seed", "7")
    printed = evaluate(*options, "--output", "deep/a.json")
    evaluate(*options, "--output", "b.json")
    report = json.loads(Path("deep/a.json").read_text())
    assert FIELDS | {"components", "transcripts"} <= set(report)
    assert (report["environment"], report["split"], report["seed"], report["episodes"]) == ("parrot", "test", 7, 4)
    assert len(report["transcripts"]) == 4
    assert set(report["pass_at_k"]) == {"1", "2"}
    assert report["ci95"] == [None, None], "two samples of one word, twice: one problem tells nothing of the spread"
    assert Path("deep/a.json").read_bytes() == Path("b.json").read_bytes()
    assert [path.name for path in Path("deep").iterdir()] == ["a.json"]
    assert "mean reward" in printed
    assert "pass@2" in printed


def test_seed_and_sampling_reach_the_episodes(evaluate):
    def texts(*options):
        evaluate("--num-episodes", "4", "--output", "r.json", *options)
        return [
            item["messages"]["agent"][-1]["content"] for item in json.loads(Path("r.json").read_text())["transcripts"]
        ]

    assert texts("--seed", "1") != texts("--seed", "2")
    greedy = ("--temperature", "0", "--samples-per-task", "4")
    assert len(set(texts(*greedy))) == 1
    assert max(map(len, texts("--max-tokens", "9"))) > 2


def test_run_folder_gives_policies_seats_and_length(tmp_path):
    for name in ("solver", "critic"):
        (tmp_path / "run" / "policies" / name).mkdir(parents=True)
        (tmp_path / "run" / "policies" / name / "config.json").write_text("{}")
    policies = {
        "solver": {"model": "a", "chat_template": "x", "learning_rate": 1},
        "critic": {"model": "b", "chat_template": None},
        "judge": {"model": "c", "trained": False},
    }
    config = {
        "model": {"init_args": {"policies": policies, "seats": {"pro": "solver"}}},
        "data": {"init_args": {"sampling": {"max_tokens": 77}, "validation_sampling": {"temperature": 0.0}}},
    }
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_model("run") == EvaluatedModel(
        {
            "solver": {"model": "run/policies/solver", "chat_template": "x"},
            "critic": {"model": "run/policies/critic"},
            "judge": {"model": "c"},  # frozen policies are not written
        },
        {"pro": "solver"},
        {"max_tokens": 77},
        {"temperature": 0.0},
    )


def test_run_with_one_policy_is_evaluated(evaluate, model_folder):
    Path("run/policies").mkdir(parents=True)
    Path("run/policies/main").symlink_to(model_folder)
    evaluate("--num-episodes", "2", "--output", "r.json", model="run")
    evaluate("--num-episodes", "2", "--output", "m.json")
    run, model = (json.loads(Path(name).read_text()) for name in ("r.json", "m.json"))
    assert run["transcripts"] == model["transcripts"]


@pytest.mark.parametrize("validation", [None, {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "max_tokens": 4}])
def test_a_run_is_sampled_as_it_was_validated_unless_options_say_otherwise(evaluate, model_folder, validation):
    training = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 3}
    Path("run/policies").mkdir(parents=True)
    Path("run/policies/main").symlink_to(model_folder)
    data = {"init_args": {"sampling": training, "validation_sampling": validation}}
    Path("run/config.yaml").write_text(yaml.safe_dump({"data": data}))
    wanted = validation or training

    def report(*options):
        printed = evaluate(
            "--num-episodes", "4", "--samples-per-task", "4", "--output", "r.json", *options, model="run"
        )
        found = json.loads(Path("r.json").read_text())
        texts = {item["messages"]["agent"][-1]["content"] for item in found["transcripts"]}
        return found["sampling"], texts, printed

    sampling, texts, printed = report()
    assert sampling == {**wanted, "max_tokens": 2}, "the fixture asks for two tokens"
    assert len(texts) == 1, "it is greedy"
    assert f"temperature 0, top_p {wanted['top_p']:g}, top_k {wanted['top_k']}, max_tokens 2" in printed
    sampling, texts, _ = report("--temperature", "5", "--top-k", "0", "--top-p", "1")
    assert sampling == {"temperature": 5.0, "top_p": 1.0, "top_k": 0, "max_tokens": 2}
    assert len(texts) > 1


def test_what_neither_options_nor_the_run_say_is_as_by_default():
    options = SimpleNamespace(temperature=0.5, top_p=None, top_k=None, max_tokens=None)
    assert sampling_of(options, {"temperature": 0.0, "max_tokens": 77}) == Sampling(temperature=0.5, max_tokens=77)
    assert sampling_of(options, {}) == Sampling(temperature=0.5)


def test_agents_find_their_policy():
    two = EvaluatedModel({"a": {}, "b": {}}, {"pro": "a"})
    assert (two.policy_of("pro"), two.policy_of("b")) == ("a", "b")
    assert EvaluatedModel({"a": {}}).policy_of("anyone") == "a"
    with pytest.raises(ConfigurationError, match="agent 'con' has no seat"):
        two.policy_of("con")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--num-episodes", "3", "--samples-per-task", "2"), "multiple of samples_per_task"),
        (("--num-episode", "3"), "did you mean '--num-episodes'"),
        (
            ("--split", "trai"),
            "--split: expected one of 'train', 'validation', 'test', but the value is trai; did you mean",
        ),
        (("--temperature", "-1"), "temperature"),
        (("--seats", '{"agent": "solver"}'), "seats name the policies ['solver']"),
        (("--output", "."), "is a folder"),
        (("--device", "warp"), "device: 'warp' cannot be used"),
    ],
)
def test_mistakes(evaluate, options, words):
    error = evaluate(*options, status=2)
    assert words in error
    assert "Traceback" not in error


def test_model_that_cannot_be_used(evaluate):
    assert "absent" in evaluate(model="./absent", status=2)
    Path("run").mkdir()
    Path("run/config.yaml").write_text("{}")
    assert "has no policies yet" in evaluate(model="run", status=2)


def test_json_is_replaced_in_one_go_and_has_no_infinities():
    path = Path("r.json")
    write_json(path, {"ci95": (-float("inf"), 1.0)})
    assert json.loads(path.read_text()) == {"ci95": [None, 1.0]}
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"ci95": [None, 1.0]}
    assert [item.name for item in Path().iterdir()] == ["r.json"]


def test_a_split_with_fewer_tasks_than_episodes_is_told(mrlm, model_folder):
    Path("rows.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    data = ("--environment", "math", "--environment.data", '{"test": "rows.jsonl"}')
    options = ("eval", "--model", str(model_folder), *data, "--max-tokens", "2", "--num-episodes")
    status, _, err = mrlm(*options, "2")
    assert status == 0, err
    assert "mrlm: the test split has 1 episodes; for more of each task use --samples-per-task" in err
    assert "split has" not in mrlm(*options, "1")[2]


def test_metrics_and_the_gain_over_another_evaluation_are_told(mrlm, model_folder):
    team = ("--environment", "collaborative_reasoning", "--max-tokens", "2", "--model", str(model_folder))
    one = ("--environment.solvers", "1", "--environment.max_turns", "1", "--samples-per-task", "4")
    status, out, err = mrlm("eval", *team, *one, "--num-episodes", "16", "--output", "one.json")
    assert status == 0, err
    assert "majority@4" in out
    status, out, err = mrlm("eval", *team, "--num-episodes", "6", "--compare", "one.json", "--output", "team.json")
    assert status == 0, err
    assert "solver_2_turn_2_accuracy" in out
    gain = next(line for line in out.splitlines() if line.startswith("gain"))
    assert "over one.json, in 4 tasks: accuracy" in gain
    assert "with 4 decisions for a task, majority@4" in gain
    report = json.loads(Path("team.json").read_text())
    assert report["comparison"]["tasks"] == 4
    assert report["metrics"]["turn_2_improved"]["of"] + report["metrics"]["turn_2_declined"]["of"] == 12
    assert "cannot be read" in mrlm("eval", *team, "--compare", "absent.json")[2]


def test_an_evaluation_of_failures_alone_ends_with_a_report(evaluate, monkeypatch, caplog):
    from mrlm_toy.environments import ParrotEnvironment

    begun = []

    def away(self, task):
        begun.append(task)
        raise OSError("the back end is away")

    monkeypatch.setattr(ParrotEnvironment, "begin", away)
    evaluate("--num-episodes", "3", "--output", "r.json", status=1)
    report = json.loads(Path("r.json").read_text())
    assert (report["episodes"], report["failed"], report["mean_reward"], report["accuracy"]) == (0, 3, None, None)
    assert all("the back end is away" in item["error"] for item in report["transcripts"])
    assert len(begun) == 9, "each was begun three times, and no more"
    assert "3 of 3 episodes of 'parrot' failed" in caplog.text
