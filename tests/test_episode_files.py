"""Episodes are written in the background, at most two files behind the learner."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from mrlm_pl import algorithms, episode_files
from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from mrlm_pl.episode_files import EpisodeRetention, EpisodeWriter, iteration_file, read_episodes, write_episodes
from mrlm_pl.errors import ConfigurationError, DataError, StorageError
from mrlm_pl.policy import Policy
from tests.support.runs.short_fits import make


def episode(number: int) -> Episode:
    return Episode(str(number), Task("t", "train", 0), "g", 0, 0, {}, "end")


def branching(number: int, group: str, said: int, state: str = "root") -> Episode:
    """A path of a turn tree with one decision, whose token is ``said``."""
    turn = Turn("a", 0, 1, 2, 0.0, {}, "stop", "main", 0, "e", node=state, sample=number)
    row = Trajectory("a", "main", (5, said), (False, True), (0.0, -1.0), (turn,))
    return Episode(f"{group}/{number}", Task("t", "train", 0), group, 0, 0, {"a": (row,)}, "end")


@pytest.mark.parametrize(
    "episodes",
    [
        [branching(0, "g", 8), branching(1, "g", 9), branching(0, "h", 7)],
        [branching(0, "g", 8), branching(0, "h", 7), branching(1, "g", 9)],
        [branching(0, "g", 8), branching(0, "g", 9)],
        [episode(0), branching(0, "g", 8), episode(1)],
    ],
    ids=["two trees", "interleaved", "two runs of one group", "mixed"],
)
@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_files_keep_every_episode_and_their_order(tmp_path: Path, suffix: str, episodes: list[Episode]) -> None:
    write_episodes(tmp_path / f"e.jsonl{suffix}", episodes)
    assert list(read_episodes(tmp_path)) == episodes


@pytest.mark.parametrize("line", ["[1]", "3", "null", '{"paths": 3}', '{"paths": [1], "decisions": {}}'])
def test_another_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "e.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"e\.jsonl, line 1 is not an episode record: .*restore the file from a copy"):
        list(read_episodes(tmp_path / "e.jsonl"))


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl.zst", [episode(0)])
    (tmp_path / "e.jsonl.zst").write_bytes((tmp_path / "e.jsonl.zst").read_bytes()[:-9])
    with pytest.raises(
        DataError, match=r"e\.jsonl\.zst cannot be read: .*; restore the file from a copy, or leave it out"
    ):
        list(read_episodes(tmp_path))


def test_an_empty_file_of_an_iteration_is_named(tmp_path: Path) -> None:
    iteration_file(tmp_path, 3).parent.mkdir()
    iteration_file(tmp_path, 3).touch()
    with pytest.raises(DataError, match=r"iteration-000003\.jsonl\.zst cannot be read: .*empty; restore the file"):
        list(read_episodes(tmp_path / "episodes"))


def test_an_empty_file_of_collected_episodes_has_none(tmp_path: Path) -> None:
    (tmp_path / "collected.jsonl.zst").touch()
    assert not list(read_episodes(tmp_path / "collected.jsonl.zst"))


def test_a_file_of_another_user_has_another_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(file))

    (tmp_path / "e.jsonl").touch()
    monkeypatch.setattr(episode_files, "unpacked", refuse)
    with pytest.raises(
        DataError, match=r"e\.jsonl cannot be read: Perm.*; let your user read it, or leave it out: move"
    ):
        list(read_episodes(tmp_path / "e.jsonl"))


def test_the_third_file_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Semaphore(0), episode_files.write_episodes

    def slow(path: Any, episodes: Any, parents: bool) -> None:
        gate.acquire()
        write(path, episodes, parents)

    monkeypatch.setattr(episode_files, "write_episodes", slow)
    writer = EpisodeWriter()
    writer.write(tmp_path / "0.jsonl.zst", [episode(0)])
    writer.write(tmp_path / "1.jsonl.zst", [episode(1)])
    assert list(tmp_path.iterdir()) == []
    third = threading.Thread(target=writer.write, args=(tmp_path / "2.jsonl.zst", [episode(2)]))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.release()
    third.join(100)
    assert not third.is_alive()
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl.zst"]
    gate.release(2)
    writer.finish()
    assert [item.id for item in read_episodes(tmp_path)] == ["0", "1", "2"]


def test_a_run_folder_that_is_moved_while_a_file_is_made_is_not_made_again(tmp_path: Path) -> None:
    def moving() -> Iterator[str]:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        yield "{}"

    writer = EpisodeWriter()
    writer.write(tmp_path / "run" / "episodes" / "0.jsonl.zst", [episode(0)])
    writer.write_lines(tmp_path / "run" / "episodes" / "1.jsonl.zst", moving())
    with pytest.raises(StorageError, match=r"the run folder '.*run' was moved or deleted while the run trains"):
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_checkpoint_waits_for_the_episodes_that_it_will_not_collect_again(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = episode_files.write_episodes
    late = threading.Event()

    def slow(path: Any, episodes: Any, parents: bool) -> None:
        late.wait(0.2)
        write(path, episodes, parents)

    monkeypatch.setattr(episode_files, "write_episodes", slow)
    algorithm, data = make(model_folder, echo(), iterations=1)
    trainer = quiet_trainer()
    found: list[int] = []
    state_dict = data.state_dict

    def watched() -> dict[str, Any]:
        state = state_dict()
        found.append(len(list((Path(trainer.default_root_dir) / "episodes").glob("*.zst"))))
        return state

    monkeypatch.setattr(data, "state_dict", watched)

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    trainer.callbacks.append(Saves())
    trainer.fit(algorithm, data)
    assert found == [1]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"every": 2}, [0, 2, 4]),
        ({"last": 2}, [3, 4]),
        ({"every": 3, "last": 1, "tokens": 2}, [0, 3, 4]),
    ],
)
@pytest.mark.long_after(1)
def test_a_run_keeps_the_chosen_iterations_also_when_it_is_resumed(
    retention: Any, kept: list[int], model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    def fit(folder: str, steps: int, checkpoint: Path | None = None) -> list[tuple[str, list[Episode]]]:
        algorithm, data = make(model_folder, echo(), iterations=5, save_episodes=EpisodeRetention(**retention))
        trainer = quiet_trainer(default_root_dir=tmp_path / folder, max_steps=steps)
        trainer.fit(algorithm, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{folder}.ckpt")
        found = sorted((tmp_path / folder / "episodes").iterdir())
        return [(path.name, [replace(item, timings={}) for item in read_episodes(path)]) for path in found]

    whole = fit("whole", 5)
    assert [name for name, _ in whole] == [f"iteration-{number:06d}.jsonl.zst" for number in kept]
    fit("killed", 3)
    assert fit("killed", 5, tmp_path / "killed.ckpt") == whole
    if "tokens" in retention:
        tokens = [
            {path.name: path.read_bytes() for path in (tmp_path / name / "tokens").iterdir()}
            for name in ("whole", "killed")
        ]
        assert tokens[0] == tokens[1]
        assert sorted(tokens[0]) == ["iteration-000000.jsonl.zst", "iteration-000004.jsonl.zst"]


def test_files_of_all_ranks_are_displaced_also_of_those_before_a_resume_with_fewer(tmp_path: Path) -> None:
    displaced = ["iteration-000000-rank0.jsonl.zst", "iteration-000000-rank1.jsonl.zst", "iteration-000000.jsonl.zst"]
    names = [*displaced, "iteration-000002.jsonl.zst", "predict-0-000000.jsonl.zst", "iteration-000000.jsonl.zst.part"]
    for name in names:
        (tmp_path / name).touch()
    writer = EpisodeWriter(EpisodeRetention(last=1))
    writer.write(tmp_path / "iteration-000001.jsonl.zst", [episode(0)])
    writer.finish()
    kept = {*names, "iteration-000001.jsonl.zst"} - {*displaced}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_files_that_an_earlier_setting_kept_stay(tmp_path: Path) -> None:
    def write(retention: EpisodeRetention, numbers: range) -> list[int]:
        writer = EpisodeWriter(retention)
        for number in numbers:
            writer.write(tmp_path / f"iteration-{number:06d}.jsonl.zst", [episode(number)])
        writer.finish()
        return sorted(int(path.name[10:16]) for path in tmp_path.iterdir())

    assert write(EpisodeRetention(), range(5)) == [0, 1, 2, 3, 4]
    assert write(EpisodeRetention(every=3), range(5, 8)) == [0, 1, 2, 3, 4, 6]
    assert write(EpisodeRetention(last=2), range(8, 12)) == [0, 1, 2, 3, 4, 10, 11]  # 6 was the newest
    assert write(EpisodeRetention(last=2), range(10, 13)) == [0, 1, 2, 3, 4, 11, 12]  # from an older checkpoint


@pytest.mark.parametrize("kind", ["episodes", "tokens"])
def test_a_run_folder_that_was_moved_is_not_made_again(kind: str, tmp_path: Path) -> None:
    run, writer = tmp_path / "run", EpisodeWriter()
    writer.write(iteration_file(run, 0), [episode(0)])
    writer.finish()
    run.rename(tmp_path / "elsewhere")
    if kind == "episodes":
        writer.write(iteration_file(run, 1), [episode(1)])
    else:
        writer.write_lines(iteration_file(run, 1, kind="tokens"), ["{}"])
    with pytest.raises(StorageError, match="run' was moved or deleted while the run trains; put it back"):
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def write_until_it_fails(writer: EpisodeWriter, path: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        writer.write(path, [episode(1)])


def test_a_failure_ends_the_run_also_where_the_next_iteration_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = EpisodeWriter(EpisodeRetention(every=2))
    writer.write(tmp_path / "file" / "iteration-000000.jsonl.zst", [episode(0)])
    with pytest.raises(StorageError, match="iteration-000000"):
        write_until_it_fails(writer, tmp_path / "file" / "iteration-000001.jsonl.zst")


def test_files_that_are_removed_while_a_folder_is_read_are_left_out(tmp_path: Path) -> None:
    for number in range(3):
        write_episodes(tmp_path / f"{number}.jsonl.zst", [episode(number)])
    found = read_episodes(tmp_path)
    assert next(found).id == "0"
    (tmp_path / "1.jsonl.zst").unlink()
    assert [item.id for item in found] == ["2"]


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"EpisodeRetention: last is 0; it must be 1 or above"):
        EpisodeRetention(last=0)


@pytest.mark.parametrize(
    ("algorithm", "environment", "settings", "expected"),
    [
        ("ReMax", {}, {}, {None: 16, "greedy": 4}),
        ("GRPO", {"reward": 1.0}, {"resample_rounds": 1}, {None: 16, "replaced": 16}),
        ("GRPO", {"fail_every": 2}, {"failed_members": "drop", "retries": 0}, {None: 8, "left_out": 8}),
    ],
)
def test_episodes_that_are_not_trained_on_say_why(
    algorithm: str,
    environment: Any,
    settings: Any,
    expected: Any,
    model_folder: Path,
    echo: Any,
    quiet_trainer: Any,
) -> None:
    learner = getattr(algorithms, algorithm)({"main": Policy(str(model_folder), learning_rate=1e-3)})
    _, data = make(model_folder, echo(**environment), iterations=1, **settings)
    trainer = quiet_trainer()
    trainer.fit(learner, data)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    assert Counter(item.excluded for item in episodes) == expected
    for item in episodes:
        trained = any(turn.advantage is not None for row in item.rows() for turn in row.turns)
        assert trained == (item.excluded is None)


@pytest.mark.parametrize(("steps", "first"), [(2, 1), (3, 2)])
def test_a_run_that_continues_with_other_ranks_has_each_episode_once(
    steps: int, first: int, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """Two updates are an iteration; ``first`` is the one that the resumed run collects next."""

    def fit(checkpoint: Path | None = None, **options: Any) -> Any:
        algorithm, data = make(model_folder, echo(), minibatches=2, save_episodes=EpisodeRetention(tokens=1))
        trainer = quiet_trainer(**options)
        trainer.fit(algorithm, data, ckpt_path=checkpoint)
        return trainer

    fit(max_steps=steps).save_checkpoint(tmp_path / "last.ckpt")
    folder = tmp_path / "run" / "episodes"
    names = {number: [f"iteration-{number:06d}-rank{rank}.jsonl.zst" for rank in range(2)] for number in range(3)}
    for name in itertools.chain(*names.values()):  # as two ranks have left them that were killed later
        shutil.copy(folder / "iteration-000000.jsonl.zst", folder / name)
        shutil.copy(folder / "iteration-000000.jsonl.zst", folder.with_name("tokens") / name)
    for number in range(first):
        (folder / f"iteration-{number:06d}.jsonl.zst").unlink()
    fit(tmp_path / "last.ckpt")
    kept = [*itertools.chain(*(names[number] for number in range(first)))]
    collected = [f"iteration-{number:06d}.jsonl.zst" for number in range(first, 3)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept + collected)
    tokens = {path.name for path in folder.with_name("tokens").iterdir()}
    assert {name for name in tokens if "rank" in name} == {*kept}


def test_a_resumed_run_replaces_the_file_of_an_earlier_version(tmp_path: Path) -> None:
    for number in (0, 1):
        write_episodes(tmp_path / f"iteration-{number:06d}.jsonl.gz", [episode(number)])
    writer = EpisodeWriter()
    writer.write(tmp_path / "iteration-000001.jsonl.zst", [episode(2)])
    writer.finish()
    assert [item.id for item in read_episodes(tmp_path)] == ["0", "2"]


def test_a_closed_writer_has_no_thread_and_may_write_again(tmp_path: Path) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("mrlm-episodes")}

    before, writer = threads(), EpisodeWriter()
    for number in range(2):
        file = iteration_file(tmp_path, number)
        writer.write(file, [episode(number)])
        assert len(threads() - before) == 1
        writer.close()
        assert threads() <= before
        assert [item.id for item in read_episodes(file)] == [str(number)]


def test_a_finished_run_has_no_thread(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    before = set(threading.enumerate())
    algorithm, data = make(model_folder, echo(), iterations=1)
    quiet_trainer().fit(algorithm, data)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("mrlm-")]
