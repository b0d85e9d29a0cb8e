"""Training runs in this process with failing servers and connections: their cost, and no more than that."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from mrlm_pl.algorithms import GRPO
from mrlm_pl.concurrency.calls import QueueFullError, Workers
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Outcome, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.transport.connection import Connection
from tests.support.servers.environment_servers import Proxy, Served, eventually, offer, talk_nonsense
from tests.support.servers.served_training import episodes

Trouble = Callable[[Task, int], None]
ITERATIONS, GROUPS, GROUP_SIZE, TURNS = 3, 2, 4, 2
EPISODES, STEPS = ITERATIONS * GROUPS * GROUP_SIZE, ITERATIONS * GROUPS * GROUP_SIZE * TURNS


class Letters(SingleAgentEnvironment):
    """Rewards the fraction of digits in each of two replies; calls ``trouble`` before each step."""

    name = "letters"
    trouble: Trouble = staticmethod(lambda task, number: None)
    made: Counter[int] = Counter()  # noqa: RUF012 (shared by all instances on purpose)
    lock = threading.Lock()

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def begin(self, task: Task) -> str:
        self.task, self.left = task, TURNS
        return f"Say {task.data['n']}"

    def reply(self, message: Message) -> Outcome:
        with self.lock:
            self.made["steps"] += 1
            number = self.made["steps"]
        self.trouble(self.task, number)
        self.left -= 1
        share = sum(letter.isdigit() for letter in message.content) / max(len(message.content), 1)
        return Outcome({"digits": share}, "More" if self.left else None, success=share > 0.5)


@dataclass
class Run:
    """Results of a run: weights, token ids of the episodes, ``rollout/failed_episodes``, attempts of each episode."""

    weights: dict[str, torch.Tensor]
    tokens: list[list[int]]
    failed: list[float]
    attempts: list[int]
    errors: list[str]

    def equals(self, other: Run) -> bool:
        """Return whether the weights are the same, bit for bit."""
        return all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())

    def resembles(self, other: Run) -> bool:
        """Return whether the episodes are the same; batches of other turns round differently."""
        pairs = ((weight, other.weights[name]) for name, weight in self.weights.items())
        return self.tokens == other.tokens and all(torch.allclose(*pair, rtol=0, atol=1e-5) for pair in pairs)


class Failed(lightning.Callback):
    """Takes down how many episodes of each iteration failed."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.found.append(float(trainer.callback_metrics["rollout/failed_episodes"]))


def trained(
    model_folder: Path, trainer: lightning.Trainer, environment: Environment, trouble: Trouble | None, **options: Any
) -> Run:
    """A run that went to its end; options are those of the data module."""
    Letters.made.clear()
    Letters.trouble = staticmethod(trouble or (lambda task, number: None))
    sizes = {"groups": GROUPS, "group_size": GROUP_SIZE, "iterations": ITERATIONS, **options}
    data = RolloutDataModule(environment, sampling=Sampling(max_tokens=6), **sizes)
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
    failed = Failed()
    trainer.callbacks.append(failed)  # type: ignore[attr-defined]
    try:
        trainer.fit(algorithm, data)
    finally:
        Letters.trouble = staticmethod(lambda task, number: None)
    assert trainer.global_step == data.stream.iterations == len(failed.found), "it went to its end"
    found = episodes(Path(trainer.default_root_dir))
    assert len(found) == sizes["iterations"] * sizes["groups"] * sizes["group_size"]
    weights = {name: weight.clone() for name, weight in algorithm.policy("main").model.state_dict().items()}
    tokens = [row["token_ids"] for episode in found for rows in episode["trajectories"].values() for row in rows]
    errors = [episode["error"] for episode in found if episode["error"] is not None]
    assert sum(failed.found) == len(errors)
    return Run(weights, tokens, failed.found, [episode["attempts"] for episode in found], errors)


@pytest.fixture
def train(model_folder: Path, quiet_trainer: Any) -> Callable[..., Run]:
    """Train on an environment that calls ``trouble`` before each step."""
    return lambda environment, trouble=None, **options: trained(
        model_folder, quiet_trainer(), environment, trouble, **options
    )


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run in one process, without trouble."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=tmp_path_factory.mktemp("undisturbed"),
    )
    return trained(model_folder, trainer, Letters(), None)


def letters(serve: Callable[..., Served], **options: Any) -> Served:
    """A server with the environment; options are those of ``serve``."""
    return serve(offer=offer(more={"letters": lambda settings: Letters()}), **options)


def remote(*targets: str, **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment(list(targets), "letters", **{"open_seconds": 60.0, "step_seconds": 90.0, **options})


@pytest.mark.long
def test_steps_that_hang_cost_their_episodes_one_attempt(serve: Any, train: Any, undisturbed: Run) -> None:
    gate, hung = threading.Event(), (3, 20, 33)

    def trouble(task: Task, number: int) -> None:
        if number in hung:
            eventually(lambda: len(running) == 1)  # those beside it have ended
            (job,) = running
            job.timeout = 0.0
            gate.wait(100)

    served = letters(serve)
    running = served.server.workers._running
    run = train(remote(served.target), trouble)
    abandoned = served.server.workers.abandoned
    gate.set()
    assert run.failed == [0.0] * ITERATIONS
    assert Counter(run.attempts) == {1: EPISODES - len(hung), 2: len(hung)}
    assert abandoned == len(hung)
    assert run.resembles(undisturbed), "the same episodes, played again"


@pytest.mark.slow
def test_a_task_that_always_hangs_is_counted(serve: Any, train: Any) -> None:
    gate, tasks = threading.Event(), list[int]()

    def trouble(task: Task, number: int) -> None:
        tasks.append(task.index)
        if task.index == tasks[0]:  # the first group's, and of it alone
            gate.wait(30)

    served = letters(serve, step_seconds=0.3)
    run = train(remote(served.target), trouble, retries=1)
    gate.set()
    assert sum(run.failed) == run.failed[0] == GROUP_SIZE
    assert Counter(run.attempts) == {1: EPISODES - GROUP_SIZE, 2: GROUP_SIZE}
    assert all("no answer within 0.3 s" in error for error in run.errors), run.errors


@pytest.mark.slow
def test_an_address_that_falls_silent_beside_another(serve: Any, train: Any, undisturbed: Run) -> None:
    first, second = letters(serve), letters(serve)
    proxy = Proxy(first.target)
    run = train(
        remote(proxy.target, second.target, step_seconds=1.0),
        # The first step of the second iteration: every episode on that server has another turn to come.
        lambda task, number: proxy.silence() if number == STEPS // 3 + 1 else None,
    )
    proxy.close()
    assert run.failed == [0.0] * ITERATIONS
    again = [attempts for attempts in run.attempts if attempts > 1]
    assert 1 <= len(again) <= GROUPS * GROUP_SIZE // 2, "no more than were on that server"
    assert max(again) == 2
    assert run.resembles(undisturbed)


@pytest.mark.slow
def test_the_only_address_falls_silent_and_answers_new_connections(serve: Any, train: Any, undisturbed: Run) -> None:
    served = letters(serve)
    proxy = Proxy(served.target)
    started = time.monotonic()
    run = train(
        remote(proxy.target, step_seconds=90.0),
        lambda task, number: proxy.silence() if number == STEPS // 3 else None,
        step_timeout=120.0,
    )
    assert 10 < time.monotonic() - started < 80, "pings detect the silence"
    proxy.close()
    assert run.failed == [0.0] * ITERATIONS
    assert run.attempts == [1] * EPISODES
    assert Letters.made["steps"] == STEPS, "no turn is made twice"
    assert run.equals(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 200 OK\r\n\r\nhello", random.Random(0).randbytes(4000)])
def test_an_address_of_something_else_beside_a_server(
    serve: Any, train: Any, undisturbed: Run, greeting: bytes
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[float] = []

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                asked.append(time.monotonic())
                with suppress(OSError), connection:
                    connection.sendall(greeting)

    threading.Thread(target=answer, daemon=True).start()
    served = letters(serve)
    run = train(remote(f"127.0.0.1:{listener.getsockname()[1]}", served.target))
    listener.close()
    assert asked
    assert run.failed == [0.0] * ITERATIONS
    assert run.attempts == [1] * EPISODES
    assert run.equals(undisturbed)


@pytest.mark.parametrize("way", ["session", "turn", "kind"])
@pytest.mark.long_after(1)
def test_an_address_of_a_server_that_answers_wrongly_beside_another(
    serve: Any, train: Any, undisturbed: Run, way: str
) -> None:
    loop = EventLoopThread()
    wrong, port = loop.submit(talk_nonsense(way)).result(100)
    served = letters(serve)
    run = train(remote(served.target, f"127.0.0.1:{port}"))
    loop.submit(wrong.stop(0)).result(100)
    loop.close()
    assert run.failed == [0.0] * ITERATIONS
    assert 1 <= sum(attempts == 2 for attempts in run.attempts) <= EPISODES // 2
    assert max(run.attempts) == 2
    assert run.resembles(undisturbed)


@pytest.mark.slow
def test_a_server_with_twice_the_load_that_it_bears_and_a_slow_reader(
    serve: Any, train: Any, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def put(workers: Workers, job: Any, must: bool) -> None:
        try:
            whole(workers, job, must)
        except QueueFullError as error:
            refused.append(str(error))
            raise

    whole = Workers._put
    monkeypatch.setattr(Workers, "_put", put)
    served = letters(serve, threads=1, queue=3)  # eight steps at once, for four places
    run = train(remote(served.target), lambda task, number: time.sleep(0.05))
    assert len(refused) >= ITERATIONS * TURNS
    assert run.failed == [0.0] * ITERATIONS
    assert run.attempts == [1] * EPISODES
    assert Letters.made["steps"] == STEPS, "refused steps are not executed"
    assert run.equals(undisturbed)


def test_requests_that_come_twice_and_in_another_order(
    serve: Any, train: Any, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    sent: list[tuple[str, Any]] = []
    whole = Connection.call

    async def repeated(connection: Connection, method: str, request: Any, timeout: float, **options: Any) -> Any:
        if connection.address.target != served.target or method not in ("Open", "Step"):
            return await whole(connection, method, request, timeout, **options)
        sent.append((method, request))
        calls = [(method, request), (method, request), *rng.sample(sent, min(len(sent), 2))]
        rng.shuffle(calls)
        made = (whole(connection, *call, timeout, **options) for call in calls)
        answers = await asyncio.gather(*made, return_exceptions=True)
        return next(answer for call, answer in zip(calls, answers, strict=True) if call[1] is request)

    served = letters(serve)
    monkeypatch.setattr(Connection, "call", repeated)
    run = train(remote(served.target))
    assert len(sent) >= EPISODES + STEPS
    assert run.failed == [0.0] * ITERATIONS
    assert run.attempts == [1] * EPISODES
    assert Letters.made["steps"] == STEPS, "no turn is made twice"
    assert served.server.service.sessions.opened_total == EPISODES, "and no session opened twice"
    assert run.equals(undisturbed)
