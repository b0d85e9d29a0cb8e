"""``mrlm eval``."""

import hashlib
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mrlm_environments import CodeEnvironment, MathEnvironment
from mrlm_environments.code import generated

import mrlm_pl
from mrlm_pl.cli.commands.evaluate import sampling_of
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.model_folders import missing_folder
from mrlm_pl.runs.console import run_summary
from mrlm_pl.runs.records.environment_code import code_of
from mrlm_pl.runs.records.run import RecordedRun, read_run

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


def test_the_model_may_come_first(mrlm, model_folder, evaluate):
    options = ("--num-episodes", "2", "--environment", "parrot", "--environment.difficulty", "[1]", "--max-tokens", "2")
    evaluate(*options[:2], "--output", "named.json")
    assert mrlm("eval", str(model_folder), *options, "--output", "first.json")[0] == 0
    assert Path("first.json").read_bytes() == Path("named.json").read_bytes()


def test_two_options_for_models_are_refused(mrlm):
    for words in (
        ("eval", "a", "--model", "b"),
        ("eval", "--model", "a", "--model=b"),
        ("recredit", "a", "--run", "b"),
    ):
        status, _, err = mrlm(*words)
        option = "run" if words[0] == "recredit" else "model"
        told = f"{option} is given as 'a' and 'b'; give one, or, where the command takes several, `--{option} a b`"
        assert (status, told in err) == (2, True), err


def test_the_representation_of_a_report_holds_no_transcripts(model_folder):
    settings = {"num_episodes": 1, "sampling": Sampling(max_tokens=2)}
    report = mrlm_pl.evaluate(str(model_folder), MathEnvironment(difficulty=[1, 1]), **settings)
    assert report.transcripts
    assert "messages" not in repr(report)


def test_a_report_of_python_reads_as_that_of_the_command(mrlm, model_folder):
    model = str(model_folder)
    options = ("--environment", "math", "-n", "2", "--max-tokens", "2", "--output", "r.json")
    _, printed, _ = mrlm("eval", model, *options, "--environment.kinds", '["algebra"]')
    assert '\nsettings       kinds ["algebra"]\n' in printed
    _, printed, _ = mrlm("eval", model, *options)
    report = mrlm_pl.evaluate(model, "math", num_episodes=2, sampling=Sampling(max_tokens=2))
    assert f"{report}\n" in printed
    assert "\nsettings       defaults\n" in printed
    assert "\nsampling       temperature 1, top_p 1, top_k 0, max_tokens 2\n" in printed
    assert json.loads(Path("r.json").read_text())["sampling"]["max_tokens"] == 2
    instance = mrlm_pl.evaluate(model, MathEnvironment(), num_episodes=2, sampling=Sampling(max_tokens=2))
    assert str(instance) == str(report).replace("settings       defaults\n", ""), "the settings are not known"


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
        "critic": {"model": "b", "chat_template": None, "chat_template_kwargs": {"enable_thinking": False}},
        "judge": {"model": "c", "trained": False},
    }
    config = {
        "model": {"init_args": {"policies": policies, "seats": {"pro": "solver"}}},
        "data": {"init_args": {"sampling": {"max_tokens": 77}, "validation_sampling": {"temperature": 0.0}}},
    }
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_run("run") == RecordedRun(
        {
            "solver": {"model": "run/policies/solver", "chat_template": "x"},
            "critic": {"model": "run/policies/critic", "chat_template_kwargs": {"enable_thinking": False}},
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


@pytest.mark.parametrize(
    "validation", [None, {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "max_tokens": 4, "max_context": 50}]
)
def test_a_run_is_sampled_as_it_was_validated_unless_options_say_otherwise(evaluate, model_folder, validation):
    training = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 3, "max_context": None}
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
    assert sampling == {**wanted, "max_tokens": 2, "policies": {}}, "the fixture asks for two tokens"
    assert len(texts) == 1, "it is greedy"
    assert f"temperature 0, top_p {wanted['top_p']:g}, top_k {wanted['top_k']}, max_tokens 2" in printed
    sampling, texts, _ = report("--temperature", "5", "--top-k", "0", "--top-p", "1")
    assert sampling == {
        "temperature": 5.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 2,
        "max_context": wanted["max_context"],
        "policies": {},
    }
    assert len(texts) > 1


def test_what_neither_options_nor_the_run_say_is_as_by_default():
    options = SimpleNamespace(
        temperature=0.5, top_p=None, top_k=None, max_tokens=None, max_context=None, policy_sampling={}
    )
    assert sampling_of(options, {"temperature": 0.0, "max_tokens": 77}) == Sampling(temperature=0.5, max_tokens=77)
    assert sampling_of(options, {}) == Sampling(temperature=0.5)


def test_an_option_for_all_policies_replaces_their_own_and_one_for_a_policy_comes_on_top():
    run = {"max_tokens": 9, "policies": {"a": {"temperature": 0.1, "top_k": 3}, "b": {"temperature": 0.2}}}
    options = SimpleNamespace(
        temperature=0.5, top_p=None, top_k=None, max_tokens=None, max_context=None, policy_sampling={}
    )
    assert sampling_of(options, run) == Sampling(0.5, max_tokens=9, policies={"a": {"top_k": 3}})
    options.policy_sampling = {"a": {"max_tokens": 4}}
    found = sampling_of(options, run)
    assert (found.of("a"), found.of("b")) == (Sampling(0.5, top_k=3, max_tokens=4), Sampling(0.5, max_tokens=9))


def test_policies_of_a_run_sample_each_in_its_own_way(mrlm, model_folder):
    seats = {"row": "first", "column": "second"}
    for name in seats.values():
        Path("run/policies").mkdir(parents=True, exist_ok=True)
        Path(f"run/policies/{name}").symlink_to(model_folder)
    own = {"max_tokens": 5, "policies": {"second": {"max_tokens": 2}}}
    data = {"environment": {"class_path": "mrlm_environments.CoordinationGame"}, "validation_sampling": own}
    model = {"policies": {name: {"model": str(model_folder)} for name in seats.values()}, "seats": seats}
    Path("run/config.yaml").write_text(yaml.safe_dump({"model": {"init_args": model}, "data": {"init_args": data}}))

    def report(command, *words):
        status, printed, errors = mrlm(command, *words, "-n", "4", "--device", "cpu", "--output", "out.json")
        assert status == 0, errors
        return printed

    def tokens():
        agents = json.loads(Path("out.json").read_text())["agents"]
        return [agents[agent]["response_tokens"] for agent in seats]

    assert "max_tokens 5; second: max_tokens 2" in report("eval", "--model", "run")
    first, second = tokens()
    assert first > 2 >= second
    report("eval", "--model", "run", "--policy-sampling", "{first: {max_tokens: 1}}")
    first, second = tokens()
    assert (first, second > 1) == (1, True)
    report("eval", "--model", "run", "--max-tokens", "4")
    assert min(tokens()) > 2, "also of the second"
    report("arena", "x=run", "y=run", "--policy-sampling", "{first: {max_tokens: 1}}")
    status, _, errors = mrlm("eval", "--model", "run", "-n", "4", "--policy-sampling", "{secnd: {max_tokens: 1}}")
    assert status == 2
    assert "there is no policy 'secnd'; did you mean 'second'?" in errors
    status, _, errors = mrlm("eval", "--model", "run", "-n", "4", "--policy-sampling", "{second: {max_token: 1}}")
    assert status == 2
    assert "max_token" in errors


def test_an_environment_that_does_not_exist_causes_no_warning_of_its_agents(mrlm, recorded):
    recorded(({}, {"environment": parrot(1, 1)}))
    status, _, error = mrlm("eval", "--model", "run", "--environment", "WRONG")
    assert (status, "there is no environment 'WRONG'" in error, "warning" in error) == (2, True, False)


def test_players_come_before_the_options(mrlm):
    status, _, error = mrlm("arena", "--environment", "debate", "a=builtin:tiny", "b=builtin:tiny")
    expected = "arena: name the players before the options, as in `mrlm arena NAME=MODEL NAME=MODEL`"
    assert (status, error) == (2, f"mrlm: error: {expected}\n")


def test_agents_find_their_policy():
    two = RecordedRun({"a": {}, "b": {}}, {"pro": "a"})
    assert (two.policy_of("pro"), two.policy_of("b")) == ("a", "b")
    assert RecordedRun({"a": {}}).policy_of("anyone") == "a"
    with pytest.raises(ConfigurationError, match="agent 'con' has no seat"):
        two.policy_of("con")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--num-episodes", "3", "--samples-per-task", "2"), "multiple of samples_per_task"),
        (("--num-episode", "3"), "did you mean '--num_episodes'"),
        (
            ("--split", "trai"),
            "--split: expected one of 'train', 'validation', 'test', but the value is 'trai'; did you mean",
        ),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "hot"), "error: temperature: expected a number such as 0.5, but the value is 'hot'\n"),
        (("-n", "-3"), "error: num_episodes: expected a number > 0, but the value is -3\n"),
        (("-n", "many"), "error: num_episodes: expected an integer such as 2, but the value is 'many'\n"),
        (("-n", ""), "error: num_episodes: expected an integer such as 2, but the value is ''\n"),
        (("-n", "10" * 9), "num_episodes is 101010101010101010; it must be 1000000 or below"),
        (("-n", "{}"), "error: num_episodes: expected an integer such as 2, but the value is {}\n"),
        (("--max-tokens=null", "--top-k="), "error: top_k: expected an integer such as 2, but the value is ''\n"),
        (("--config", "{model: 3}"), "error: model: expected one name, but the value is 3; give one\n"),
        (("--policy-sampling", "main"), "error: policy_sampling: expected a mapping, as in `{NAME: VALUE}`, but the"),
        (
            ("--policy-sampling", "{main: {temprature: 1}}"),
            "error: policy_sampling.main.temprature: PolicySampling has no 'temprature'; did you mean 'temperature'?",
        ),
        (
            ("--seats", '{"agent": "solver"}'),
            "seat 'agent' names policy 'solver', which does not exist; the policies",
        ),
        (("--seats", "{agnt: main}"), "seats: environment 'parrot' has no agent 'agnt'; did you mean 'agent'?"),
        (("--output", "."), "output: '.' is a folder; name a file, as in `--output F.json`"),
        (("--output", ""), "output: '' is a folder; name a file, as in `--output F.json`"),
        (("--output", "run.yaml"), "output: 'run.yaml' must end in .json; name it `run.json`"),
        (("--output", f"{__file__}/a.json"), "test_evaluate.py/a.json' cannot be written: "),
        (("--device", "warp"), "device: 'warp' cannot be used"),
    ],
)
def test_mistakes(evaluate, options, words):
    error = evaluate(*options, status=2)
    assert words in error
    assert "Traceback" not in error


def test_an_empty_name_is_refused(mrlm, model_folder):
    model = ("eval", "--model", str(model_folder))
    assert (
        "error: environment: expected one name, but the value is null; give one, or"
        in mrlm(*model, "--environment=")[2]
    )
    told = mrlm("eval", "--model=", "--environment", "parrot")[2]
    assert "error: model: expected one name, but the value is null; give one\n" in told


def test_a_mapping_is_no_model(evaluate):
    told = evaluate(model="{main: builtin:tiny}", status=2)
    assert 'error: model: expected one name, but the value is {"main": "builtin:tiny"}; give one\n' in told


def test_a_report_may_go_to_a_device(evaluate):
    assert "report in /dev/null" in evaluate("-n", "1", "--output", "/dev/null")


def test_an_output_that_cannot_be_written_is_named_before_anything_is_played(evaluate, monkeypatch):
    monkeypatch.setattr("mrlm_pl.cli.commands.evaluate.evaluate_model", lambda *_, **__: pytest.fail("it has played"))
    Path("file").touch()
    error = evaluate("--output", "file/a.json", status=2)
    assert error.startswith("mrlm: error: output: 'file/a.json' cannot be written: ")
    assert "; name a place where you can write\n" in error


def test_a_report_that_cannot_be_written_any_more_is_printed(mrlm, model_folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mrlm_pl.cli.commands.evaluate.write_json", full)
    options = ("--environment", "parrot", "--max-tokens", "2", "-n", "2", "--output", "a.json")
    status, out, err = mrlm("eval", "--model", str(model_folder), *options)
    assert (status, "mean reward" in out) == (1, True), err
    assert "error: no space is left on the device" in err


def test_model_that_cannot_be_used(evaluate):
    assert "absent" in evaluate(model="./absent", status=2)
    Path("run").mkdir()
    Path("run/config.yaml").write_text("{}")
    assert "has no policies" in evaluate(model="run", status=2)


def test_a_split_with_fewer_tasks_than_episodes_is_told(mrlm, model_folder):
    Path("rows.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    data = ("--environment", "math", "--environment.data", '{"test": "rows.jsonl"}')
    options = ("eval", "--model", str(model_folder), *data, "--max-tokens", "2", "--num-episodes")
    status, _, err = mrlm(*options, "2")
    assert status == 0, err
    remedy = "raise `samples_per_task` to play each more often"
    assert f"mrlm: the test split has tasks for 1 of up to 2 episodes; {remedy}\n" in err
    more = mrlm(*options, "6", "--samples-per-task", "2")[2]
    assert f"mrlm: the test split has tasks for 2 of up to 6 episodes; {remedy}\n" in more
    status, out, err = mrlm(*options, "200", "--output", "r.json")
    assert "episodes       1 of up to 200 (no more tasks)" in out
    report = json.loads(Path("r.json").read_text())
    assert (report["requested"], report["episodes"]) == (200, 1)
    assert "of up to" not in "".join(mrlm(*options, "1")[1:])


def test_an_evaluation_on_one_file_says_that_other_rows_are_left_out(mrlm, model_folder):
    rows = [json.dumps({"question": f"{n}+2?", "answer": f"#### {n + 2}"}) for n in range(30)]
    Path("rows.jsonl").write_text("\n".join(rows))
    options = ("eval", "--model", str(model_folder), "--environment", "math", "--max-tokens", "2")
    remedy = "; other rows of the data are left out, and `data: {test: FILE}` plays a whole file\n"
    divided = mrlm(*options, "--environment.data", "rows.jsonl")
    assert (divided[0], remedy in divided[2]) == (0, True), divided[2]
    whole = mrlm(*options, "--environment.data", '{"test": "rows.jsonl"}')
    assert "episodes       30 of up to 200 (no more tasks)" in whole[1]
    assert remedy not in whole[2]


def test_metrics_and_the_gain_over_another_evaluation_are_told(mrlm, model_folder):
    team = ("--environment", "collaborative_reasoning", "--max-tokens", "2", "--model", str(model_folder))
    one = ("--environment.solvers", "1", "--environment.max_turns", "1", "--samples-per-task", "4")
    status, out, err = mrlm("eval", *team, *one, "--num-episodes", "16", "--output", "one.json")
    assert status == 0, err
    assert "majority@4" in out
    status, out, err = mrlm("eval", *team, "--num-episodes", "6", "--compare", "one.json", "--output", "team.json")
    assert status == 0, err
    assert "solver_2_turn_2_accuracy" in out
    gain = next(line for line in out.splitlines() if line.startswith("paired gain of accuracy against majority@4"))
    assert "over one.json, in 4 of 6 tasks: accuracy" in gain
    assert "(4 decisions per task) against majority@4" in gain
    assert gain.endswith("(4 decisions per task)")
    assert "one.json has other environment settings: max_turns is 2 here and 1 there; solvers is 2 here and 1" in err
    report = json.loads(Path("team.json").read_text())
    assert report["comparison"]["tasks"] == 4
    assert "reward_comparison" not in report, "all rewards are accuracies"
    assert report["metrics"]["turn_2_improved"]["of"] + report["metrics"]["turn_2_declined"]["of"] == 12
    other = json.loads(Path("one.json").read_text())
    Path("few.json").write_text(json.dumps({**other, "tasks": [{**other["tasks"][0], "reward": 0.3}]}))
    options = ("--num-episodes", "3", "--compare", "few.json", "--output", "team.json")
    _, out, err = mrlm("eval", *team, *one[:4], *options)
    assert "few.json has only 1 of the 3 tasks of this evaluation" in err
    assert any(line.startswith("paired gain in mean reward ") for line in out.splitlines())
    assert json.loads(Path("team.json").read_text())["reward_comparison"]["other"] == 0.3


def test_a_comparison_without_equal_tasks_is_refused_before_anything_is_played(mrlm, evaluate, monkeypatch):
    Path("rows.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(9)))
    play = ("eval", "--model", "builtin:tiny", "--environment", "math", "--environment.data", '{"test": "rows.jsonl"}')
    assert mrlm(*play, "-n", "1", "--max-tokens", "2", "--output", "r.json")[0] == 0
    evaluate("--num-episodes", "1", "--output", "other.json")
    Path("table.json").write_text('{"scores": []}')
    recorded = json.loads(Path("r.json").read_text())
    Path("none.json").write_text(json.dumps({**recorded, "tasks": []}))
    del recorded["tasks"][0]["problem"]
    Path("old.json").write_text(json.dumps(recorded))
    for folder, name in (("run", "evaluation_before.json"), ("table", "a--math.json")):
        Path(folder).mkdir()
        Path(folder, name).touch()
    monkeypatch.setattr("mrlm_pl.cli.commands.evaluate.evaluate_model", lambda *_, **__: pytest.fail("it has played"))
    for path, message in (
        (
            "other.json",
            "have no task in common: 1 of 'math' (test split, seed 0) and 1 of 'parrot' (test split, seed 0)",
        ),
        ("none.json", "the report of 'math' (test split, seed 0) has no episodes; compare with another one"),
        ("old.json", "'old.json' is not a report of `mrlm eval --output` or of a run; write it again with this"),
        ("run", "'run' is a folder, not a report; name run/evaluation_before.json\n"),
        ("table.json", "'table.json' is a table, not a report of one model and environment; name table/a--math.json\n"),
    ):
        status, _, err = mrlm(*play, "-n", "1", "--compare", path)
        assert (status, message in err) == (2, True), err
    other_seed = [mrlm(*play, "-n", "1", "--seed", str(seed), "--compare", "r.json")[2] for seed in range(1, 3)]
    assert any("1 of 'math' (test split, seed 0); play both" in err for err in other_seed)


def test_fewer_problems_than_tasks_are_told(evaluate):
    for words, noun in (("[1]", "problem"), ("[1, 2]", "problems")):
        options = ("--num-episodes", "9", "--environment.difficulty", words)
        evaluate(*options, "--output", "r.json")
        asked = {
            item["messages"]["agent"][0]["content"] for item in json.loads(Path("r.json").read_text())["transcripts"]
        }
        told = f"{len(asked)} different {noun}"
        out = evaluate(*options, "--compare", "r.json")
        assert f"\nepisodes       9; {told}\n" in out
        assert f"over r.json, in 9 tasks of {told}: accuracy" in out


def test_other_settings_than_those_of_the_compared_report_are_told(mrlm, model_folder):
    Path("rows.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    play = ("eval", "--model", str(model_folder), "--environment", "math", "-n", "1", "--environment.data")
    here, there = '{"test": "rows.jsonl"}', json.dumps({"test": str(Path("rows.jsonl").resolve())})
    assert mrlm(*play, there, "--max-tokens", "2", "--output", "r.json")[0] == 0
    status, _, err = mrlm(*play, here, "--max-tokens", "2", "--compare", "r.json")
    assert (status, "warning" in err) == (0, False), err
    _, _, err = mrlm(*play, here, "--max-tokens", "3", "--temperature", "0.5", "--compare", "r.json")
    assert (
        "r.json has other sampling settings: max_tokens is 3 here and 2 there; temperature is 0.5 here and 1.0" in err
    )
    Path("copy.jsonl").write_text(Path("rows.jsonl").read_text())
    _, _, err = mrlm(*play, '{"test": "copy.jsonl"}', "--max-tokens", "2", "--compare", "r.json")
    assert "r.json has other environment settings: data is" in err


def test_other_code_than_that_of_the_compared_report_is_told(mrlm, model_folder):
    Path("rows.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    Path("graded_here.py").write_text("def same(reply, answer):\n    return float(reply == answer)\n")
    Path("rewarded_here.py").write_text(
        "from graded_here import same\n\n\ndef exact(reply, row):\n    return same(reply, row)\n"
    )
    arguments = {"data": {"test": "rows.jsonl"}, "rewards": ["rewarded_here.exact"], "prompt": "{question}"}
    environment = json.dumps({"class_path": "question", "init_args": arguments})
    play = ("eval", "--model", str(model_folder), "--environment", environment, "-n", "1", "--max-tokens", "2")
    assert mrlm(*play, "--output", "r.json")[0] == 0
    code = json.loads(Path("r.json").read_text())["code"]
    assert {"mrlm_environments.question.environment", "rewarded_here", "graded_here"} <= set(code)
    assert code["rewarded_here"] == hashlib.sha256(Path("rewarded_here.py").read_bytes()).hexdigest()[:16]
    assert not any(name.startswith("mrlm_pl") for name in code)
    status, _, err = mrlm(*play, "--compare", "r.json")
    assert (status, "warning" in err) == (0, False), err
    Path("graded_here.py").write_text("def same(reply, answer):\n    return 1.0\n")
    _, _, err = mrlm(*play, "--compare", "r.json")
    assert "warning: r.json was played with other code of graded_here; rewards may differ" in err


def test_the_rules_that_an_environment_of_a_plugin_reads_from_yaml_are_its_code():
    rules = Path(generated.__file__).with_name("rules.yaml")
    code = code_of(CodeEnvironment())
    assert code["mrlm_environments.code/rules.yaml"] == hashlib.sha256(rules.read_bytes()).hexdigest()[:16]
    assert [name for name in code if name.endswith(".yaml")] == ["mrlm_environments.code/rules.yaml"]


def test_a_report_or_a_folder_that_does_not_exist_is_told_at_once(mrlm, evaluate, monkeypatch):
    Path("base.json").write_text("{}")
    for option, words in (("bsae.json", "did you mean 'base.json'?"), ("absent/x.json", "check the path")):
        error = evaluate("--compare", option, status=2)
        assert error == f"mrlm: error: there is no report {option!r}; {words}\n"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    Path("runs/quickstart").mkdir(parents=True)
    meant = "mrlm: error: there is no folder 'runs/quickstat'; did you mean 'runs/quickstart'?\n"
    assert evaluate(model="runs/quickstat", status=2) == meant
    assert mrlm("eval", "--model", "runs/quickstat")[2] == meant
    assert missing_folder("owner/model") is None, "without a folder of the owner it may be a hub id"
    assert missing_folder("gpt2") is None
    assert "no folder 'nowhere' either" in missing_folder("./nowhere/run")
    run = "it is of a run that is not here: train it with `mrlm fit --config CONFIG --output runs/a`, or as the head of"
    assert run in missing_folder("runs/a/policies/main")
    assert "hf download runs/xyz" in missing_folder("runs/xyz")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "cache/config.json")
    assert missing_folder("runs/quickstat") is None


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


@pytest.fixture
def recorded(model_folder):
    """Makes a run folder: its policies, and its configurations in their order."""

    def make(*configurations, policies=("main",)):
        for name in policies:
            folder = Path("run/policies") / name
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(model_folder)
        for number, (model, data) in enumerate(configurations, start=1):
            name = "config.yaml" if number == 1 else f"config-{number}.yaml"
            Path("run", name).write_text(yaml.safe_dump({"model": {"init_args": model}, "data": {"init_args": data}}))

    return make


def parrot(*difficulty):
    return {"class_path": "mrlm_toy.ParrotEnvironment", "init_args": {"difficulty": list(difficulty)}}


def from_files(*splits):
    return {"class_path": "mrlm_environments.MathEnvironment", "init_args": {"data": dict.fromkeys(splits, "a.jsonl")}}


def question(rewards, **options):
    return {"class_path": "mrlm_environments.QuestionEnvironment", "init_args": {"rewards": rewards, **options}}


def evaluated(mrlm, *options):
    status, out, err = mrlm("eval", "--model", "run", "-n", "4", "--max-tokens", "2", "--output", "r.json", *options)
    assert status == 0, err
    return json.loads(Path("r.json").read_text()), out, err


def lengths(report):
    """Lengths of the words that the parrot was asked for."""
    return {len(item["messages"]["agent"][0]["content"].split()[-1]) for item in report["transcripts"]}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), {1}),
        (("--environment", "parrot"), {1}),
        (("--environment", "ParrotEnvironment"), {1}),
        (("--environment", "mrlm_toy.ParrotEnvironment"), {1}),
        (("--environment.difficulty", "[2]"), {2}),
        (("--environment", "parrot", "--environment.difficulty", "[2]"), {2}),
    ],
)
def test_a_run_is_evaluated_in_its_environment_with_its_settings(mrlm, recorded, options, found):
    recorded(({}, {"environment": parrot(1)}))
    report, out, _ = evaluated(mrlm, *options)
    assert lengths(report) == found
    assert report["settings"] == {"difficulty": sorted(found)}
    assert f"settings       difficulty {sorted(found)}" in out


@pytest.mark.parametrize(
    ("environment", "risk"),
    [
        (
            {
                "class_path": "mrlm_environments.ToolEnvironment",
                "init_args": {
                    "tools": [
                        "calculator",
                        {
                            "class_path": "mrlm_environments.toolbox.mcp.McpTools",
                            "init_args": {"command": "touch", "args": ["started"]},
                        },
                    ]
                },
            },
            "McpTools starts the command 'touch'",
        ),
        ({"class_path": "run.theirs.Env"}, "'run.theirs.Env' is a program in the run folder"),
        ({"class_path": "./run/theirs.py:Env"}, "'./run/theirs.py:Env' is a program in the run folder"),
        ({"class_path": "run.pack.Env"}, "is a program in the run folder"),
        (
            {
                "class_path": "mrlm_environments.QuestionEnvironment",
                "init_args": {"data": "a.jsonl", "rewards": [{"call": "run.theirs.f"}], "prompt": "a.b " * 9999},
            },
            "'run.theirs.f' is a program in the run folder",
        ),
        *(
            (question([reward]), f"{reward!r} is a function of an installed package that would be called")
            for reward in ("builtins.exec", "os.system", "torch.load", "mrlm_pl.runs.plugins.os.system", "brief_reply")
        ),
        (question([{"call": "mrlm_pl.durable_files.write_json"}]), "would be called"),
        (
            question([{"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "started"]}}]),
            "'subprocess.Popen'",
        ),
        (
            {"class_path": "mrlm_environments.CodeEnvironment", "init_args": {"sandbox": {"level": "limits"}}},
            "it plays with `sandbox.level: limits`",
        ),
    ],
)
@pytest.mark.parametrize("command", [("eval",), ("collect", "--output", "e.jsonl")])
def test_a_program_in_a_run_is_refused_unless_the_environment_is_named(mrlm, recorded, environment, risk, command):
    recorded(({}, {"environment": environment}))
    program = "open('started', 'w').close()\n"
    Path("run/pack").mkdir()
    for file in ("run/theirs.py", "run/pack/__init__.py", "run/__init__.py"):
        Path(file).write_text(program)
    status, _, err = mrlm(*command, "--model", "run", "-n", "1")
    assert (status, risk in err, len(err.splitlines())) == (2, True, 1), err
    assert f"name the environment: `--environment {environment['class_path']}`" in err
    assert not Path("started").exists()


@pytest.mark.parametrize(("place", "model"), [(".", "run/checkpoints/best.ckpt"), ("run/checkpoints", "best.ckpt")])
def test_a_program_in_the_run_of_a_checkpoint_is_refused_too(mrlm, recorded, monkeypatch, place, model):
    program = Path("run/theirs.py").absolute()
    recorded(({}, {"environment": question([f"{program}:exact"])}))
    program.write_text("open('started', 'w').close()\n")
    Path("run/checkpoints").mkdir()
    Path("run/checkpoints/best.ckpt").touch()
    monkeypatch.chdir(place)
    status, _, err = mrlm("eval", "--model", model, "-n", "1")
    assert (status, "is a program in the run folder" in err) == (2, True), err
    assert not Path("started").exists()


@pytest.mark.parametrize(
    ("data", "next_command"),
    [
        ({"environment": parrot(1)}, "mrlm eval --model run"),
        (
            {"environment": {"class_path": "mrlm_environments.HarnessEnvironment", "init_args": {"command": ["true"]}}},
            "mrlm eval --model run --environment mrlm_environments.HarnessEnvironment",
        ),
        ({"environment": from_files("train")}, "mrlm eval --model run --split train"),
        ({"environment": from_files("train", "validation")}, "mrlm eval --model run --split validation"),
        ({"environment": from_files("train", "test")}, "mrlm eval --model run"),
        (
            {"environment": [parrot(1), parrot(2)], "names": ["short", "long"]},
            "mrlm eval --model run --environment short",
        ),
    ],
)
def test_the_end_of_a_run_names_the_environment_where_its_evaluation_needs_it(recorded, data, next_command):
    recorded(({}, data))
    assert f"\n  {next_command}\n" in run_summary("run")


def test_the_end_of_a_run_on_files_asks_for_an_environment(recorded):
    recorded(({}, {"environment": parrot(1)}))
    shown = run_summary("run", played=False)
    assert "\n  mrlm eval --model run --environment NAME\n" in shown
    assert "  # curves in a browser" in shown
    Path("run").rename("my run")
    shown = run_summary("my run", played=False)
    assert "\n  mrlm eval --model 'my run' --environment NAME\n  mrlm view 'my run'  # " in shown


def test_the_end_of_a_verifiers_run_serves_it(tmp_path):
    head = tmp_path / "policies" / "main" / "value_head.safetensors"
    head.parent.mkdir(parents=True)
    head.touch()
    (tmp_path / "config.yaml").touch()
    shown = run_summary(tmp_path, played=False)
    assert (f"\n  mrlm serve --verifier {head.parent}\n" in shown, "mrlm eval" in shown) == (True, False)


def test_the_end_of_a_scripts_run_names_the_function(recorded):
    recorded(({}, {"environment": parrot(1)}))
    Path("run/config.yaml").unlink()
    assert '\n  mrlm_pl.evaluate("run", environment)  # in Python\n' in run_summary("run")


def test_names_that_are_no_functions_are_no_risk(mrlm, recorded):
    """A data file may be named like a module, and is not imported; functions of the user's own modules are called."""
    Path("rows.py").write_text("open('started', 'w').close()\n")
    Path("judge_of_mine.py").write_text("def length(reply, row):\n    return len(reply)\n")
    for name in ("rows.jsonl", "math.jsonl"):
        Path(name).write_text("".join(f'{{"q": "question {number}"}}\n' for number in range(60)))
        recorded(({}, {"environment": question(["judge_of_mine.length"], data=name, prompt="{q}")}))
        status, _, err = mrlm("eval", "--model", "run", "-n", "2", "--max-tokens", "2")
        assert status == 0, err
        Path("run/policies/main").unlink()
    assert not Path("started").exists()


def test_a_named_environment_of_a_run_may_run_programs(mrlm, recorded):
    sandbox = {"level": "limits", "wall_seconds": 7.0}
    code = {"class_path": "mrlm_environments.CodeEnvironment", "init_args": {"sandbox": sandbox}}
    recorded(({}, {"environment": code}))
    report, _, _ = evaluated(mrlm, "--environment", "CodeEnvironment")
    assert report["settings"]["sandbox"]["wall_seconds"] == 7.0


def test_another_environment_has_its_own_settings(mrlm, recorded):
    recorded(({}, {"environment": parrot(1)}))
    report, out, _ = evaluated(mrlm, "--environment", "math")
    assert report["environment"] == "math"
    assert "settings       defaults" in out


def test_the_last_configuration_of_a_continued_run_counts(mrlm, recorded):
    """``config-10.yaml`` comes after ``config-9.yaml``."""
    recorded(*[({}, {"environment": parrot(1), "sampling": {"max_tokens": 3}})] * 9, ({}, {"environment": parrot(2)}))
    assert Path("run/config-10.yaml").is_file()
    assert lengths(evaluated(mrlm)[0]) == {2}
    assert read_run("run").sampling == {}


def test_one_of_several_environments_is_chosen_by_its_name_in_the_run(mrlm, recorded):
    several = {"environment": [parrot(1), parrot(2)], "names": ["short", "long"]}
    recorded(({}, {**several, "task_settings": {"long": {"max_turns": 3}}, "max_turns": 5}))
    status, _, err = mrlm("eval", "--model", "run")
    assert status == 2
    assert "the run 'run' has short, long; choose one with `--environment short`" in err
    report, _, _ = evaluated(mrlm, "--environment", "long")
    assert lengths(report) == {2}
    assert report["environment"] == "long"
    assert all(item["task"].startswith("long/test/") for item in report["tasks"])
    assert (read_run("run").turn_limit("long"), read_run("run").turn_limit("short")) == (3, 5)


def test_a_model_by_itself_needs_an_environment(mrlm, model_folder):
    for command in (("eval",), ("collect", "--output", "e.jsonl")):
        status, _, err = mrlm(*command, "--model", str(model_folder))
        assert status == 2
        assert "give it as `--environment NAME`" in err


def test_a_run_s_own_evaluation_is_compared_with(mrlm, recorded, evaluate):
    recorded(({}, {"environment": parrot(1)}))
    evaluate("--num-episodes", "4", "--output", "other.json")
    other = json.loads(Path("other.json").read_text())
    Path("run/evaluation_before.json").write_text(json.dumps({"parrot": other}))
    report, out, _ = evaluated(mrlm, "--compare", "run/evaluation_before.json")
    assert report["comparison"]["tasks"] == len({(item["task"], item["problem"]) for item in other["tasks"]}) == 4
    assert "over run/evaluation_before.json, in 4 tasks" in out
    Path("run/evaluation_before.json").write_text(json.dumps({"math": other, "code": other}))
    error = mrlm("eval", "--model", "run", "--compare", "run/evaluation_before.json")[2]
    assert "has no environment 'parrot'; choose from math, code" in error


def test_agents_and_policies_that_do_not_play_are_named(mrlm, recorded):
    seats = {"seats": {"agent": "main", "critic": "main", "judge": "other"}}
    recorded((seats, {"environment": parrot(1)}), policies=("main", "other"))
    _, _, err = evaluated(mrlm)
    assert "warning: the agents critic, judge of 'run' do not play: 'parrot' has the agents agent" in err
    assert "warning: the policies other of 'run' do not play" in err


def test_an_environment_that_the_run_does_not_have_is_named(mrlm, recorded):
    recorded(({}, {"environment": {"class_path": "mrlm_environments.WordEmission", "init_args": {"num_agents": 3}}}))
    _, _, err = evaluated(mrlm, "--environment", "parrot")
    assert "warning: 'parrot' is not an environment of 'run', which was trained in WordEmission" in err


@pytest.mark.parametrize(("number", "status", "name"), [(2, 130, "Ctrl-C"), (15, 143, "SIGTERM")])
def test_a_signal_ends_it_in_order_and_tells_the_command(mrlm, model_folder, monkeypatch, number, status, name):
    def interrupted(*_, **__):
        signal.raise_signal(number)

    monkeypatch.setattr("mrlm_pl.runs.seated_model.summarize", interrupted)
    found, out, err = mrlm(
        "eval", "--model", str(model_folder), "--environment", "parrot", "-n", "4", "--output", "e.json"
    )
    assert (found, out) == (status, "")
    kept = "a table keeps its finished cells"
    assert f"{name} has ended eval; {kept}; start again with `mrlm eval --model" in err
    assert "Traceback" not in err
    assert not list(Path().glob("*e.json*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_agents_and_policies_are_reported(mrlm, recorded):
    """Two solvers with their own policy, each asked twice, of which neither knows the answer."""
    environment = {"class_path": "mrlm_environments.CollaborativeReasoningEnvironment"}
    seats = {"seats": {"solver_1": "one", "solver_2": "two"}}
    recorded((seats, {"environment": environment}), policies=("one", "two"))
    report, out, _ = evaluated(mrlm)
    assert report["seats"] == {"solver_1": "one", "solver_2": "two"}
    for owners in (report["agents"], report["policies"]):
        assert len(owners) == 2
        for part in owners.values():
            assert (part["turns"], part["first_turn"], part["opens"]) == (2.0, 0.0, 1.0)
            assert part["stop_reasons"] == {"turns": 4}
            assert sum(part["finish_reasons"].values()) == 8
            assert part["truncated_turns"] == part["finish_reasons"].get("length", 0) / 8
            assert 0 < part["response_tokens"] <= 2
            assert part["components"]["score"] == part["reward"]
    lines = [line.split() for line in out.splitlines()]
    assert ["agent", "policy", "reward"] in [line[:3] for line in lines]
    assert ["solver_2", "two"] in [line[:2] for line in lines]
    assert ["two", "solver_2"] in [line[:2] for line in lines]
    assert ["stop", "reasons", "turns", "4;", "0.0000", "truncated", "by", "a", "limit"] in lines


@pytest.mark.long
def test_a_comparison_of_two_precisions_is_told(evaluate, mrlm, model_folder):
    evaluate("--output", "full.json")
    evaluate("--output", "half.json", "--precision", "bf16-mixed")
    reports = {name: json.loads(Path(f"{name}.json").read_text()) for name in ("full", "half")}
    assert {name: report["precision"] for name, report in reports.items()} == {"full": "32-true", "half": "bf16-mixed"}
    del reports["full"]["precision"]
    Path("former.json").write_text(json.dumps(reports["full"]))
    options = ("--environment", "parrot", "--environment.difficulty", "[1]", "--max-tokens", "2")
    for name, precision in (("full", "bf16-mixed"), ("former", "bf16-mixed"), ("half", "32-true")):
        words = ("--model", str(model_folder), *options, "--precision", precision, "--compare", f"{name}.json")
        other = {"bf16-mixed": "32-true", "32-true": "bf16-mixed"}[precision]
        assert f"{name}.json was generated in {other}, and this evaluation in {precision}" in mrlm("eval", *words)[2]
        same = (*words[:-4], "--precision", other, "--compare", f"{name}.json")
        assert "was generated in" not in mrlm("eval", *same)[2]
