"""Check rewards and observations of every shipped environment: ``mrlm check-env --level semantic`` on each of them.

    python -m benchmarks.robustness.semantic [NAME ...]

Writes benchmarks/results/semantic.json and docs/environments/checks.md. With names only these environments are checked
again. Needs the extras ``adapters`` and ``openai``, ``make openenv`` and ``make verifiers``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mrlm_environments as shipped

from benchmarks.provenance import provenance
from examples.questions.rewards import exact
from mrlm_pl.environment import Environment
from mrlm_pl.environment.check import CheckReport, check_semantics
from mrlm_pl.reward_models import TextScore, TextScorer
from mrlm_pl.serving import RemoteEnvironment
from tests.support.servers.foreign_servers import echo_server, verifiers_server

RESULTS = Path("benchmarks/results/semantic.json")
PAGE = Path("docs/environments/checks.md")
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)
TASKS = 8


class Length(TextScorer):
    """A stand-in for a reward model: the length of the last message, in tens of characters."""

    def score(self, messages: Any) -> TextScore:
        """Return the score of a conversation."""
        return TextScore(len(messages[-1].content) / 10)


def equal(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the row's answer, else 0."""
    return float(reply.strip() == row["answer"])


def _harness() -> Environment:
    from examples.gateway.two_agents import play  # imports openai

    rows, agents = "examples/questions/rows.csv", ["solver", "checker"]
    return shipped.HarnessEnvironment(rows, function=play, rewards=[exact], agents=agents, gold="{answer}")


ROWS = [{"question": f"How much is {n} + 7?", "answer": str(n + 7)} for n in range(100)]
ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "math": lambda: shipped.MathEnvironment(max_attempts=2, steps_bonus=0.2),
    "question": lambda: shipped.QuestionEnvironment(ROWS, [equal], prompt="{question}", gold="{answer}"),
    "tools": lambda: shipped.ToolEnvironment(),
    "sql": lambda: shipped.SqlEnvironment(),
    "shell": lambda: shipped.ShellEnvironment(),
    "code": lambda: shipped.CodeEnvironment(max_attempts=2),
    "collaborative_coding": lambda: shipped.CollaborativeCodingEnvironment(turns=2, feedback="level_feedback"),
    "class_completion": lambda: shipped.ClassCompletionEnvironment(),
    "collaborative_reasoning": lambda: shipped.CollaborativeReasoningEnvironment(role="leader", consensus_stop=True),
    "debate": lambda: shipped.DebateEnvironment(),
    "writing": lambda: shipped.WritingEnvironment(),
    "proposer": lambda: shipped.ProposerEnvironment(),
    "length_ratio": lambda: shipped.LengthRatioGame(),
    "coordination": lambda: shipped.CoordinationGame(),
    "word_emission": lambda: shipped.WordEmission(),
    "halves": lambda: shipped.Halves(),
    "helpers": lambda: shipped.Helpers(),
    "plan_path": lambda: shipped.PlanPath(),
    "tic_tac_toe": lambda: shipped.TicTacToe(),
    "kuhn_poker": lambda: shipped.KuhnPoker(),
    "knowledge_graph": lambda: shipped.KnowledgeGraphEnvironment(),
    "webshop": lambda: shipped.WebShopEnvironment(team=True),
    "alfworld": lambda: shipped.AlfWorldEnvironment(team=True),
    "reasoning_gym": lambda: shipped.ReasoningGymEnvironment({"leg_counting": None, "basic_arithmetic": None}),
    "gymnasium": lambda: shipped.GymnasiumEnvironment("FrozenLake-v1"),
    "pettingzoo": lambda: shipped.PettingZooEnvironment("classic/tictactoe_v3"),
    "textarena": lambda: shipped.TextArenaEnvironment("TicTacToe-v0"),
    "centralized": lambda: shipped.Centralized(shipped.LengthRatioGame()),
    "scored": lambda: shipped.ScoredEnvironment(shipped.CoordinationGame(), Length()),
    "harness": _harness,
}
"""With settings that use most of their code; all but those on servers of others."""


@contextmanager
def _openenv() -> Iterator[Environment]:
    with echo_server() as url:
        yield shipped.OpenEnvEnvironment(url, max_turns=2)


@contextmanager
def _verifiers() -> Iterator[Environment]:
    with verifiers_server("reverse_words") as address:
        yield RemoteEnvironment(address, "verifiers")


SERVED = {"openenv": _openenv, "verifiers": _verifiers}
NAMES = (*ENVIRONMENTS, *SERVED)
ADAPTERS = ("reasoning_gym", "gymnasium", "pettingzoo", "textarena")
PROGRAMS = ("shell", "code", "collaborative_coding", "class_completion", "harness")
SLOW = (*PROGRAMS, "webshop", "alfworld", "knowledge_graph", *ADAPTERS, *SERVED)
"""Those that run programs, are large, or need an extra or a server."""


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the reports as a Markdown table: an environment a row, a check a column."""
    ids = list(next(iter(reports.values()))["checks"])
    lines = [f"| environment | {' | '.join(ids)} |", f"|{'---|' * (len(ids) + 1)}"]
    for name, report in reports.items():
        cells = [_cell(check_id, check) for check_id, check in report["checks"].items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(check_id: str, check: Mapping[str, Any]) -> str:
    if not check["applies"]:
        return "-"
    if not check["passed"]:
        return "**fails**"
    measures = check["measures"]
    shown = {
        "oracle": lambda: f"{measures['gold']:.3g}",
        "floor": lambda: f"{measures['maximum'] - measures['margin']:.2g} of {measures['maximum']:.3g}",
    }
    return shown.get(check_id, lambda: "ok")()


def checked(name: str, tasks: int = TASKS, *, other_process: bool = True) -> CheckReport:
    """Return the report of a shipped environment."""
    with SERVED[name]() if name in SERVED else nullcontext(ENVIRONMENTS[name]()) as environment:
        return check_semantics(environment, tasks=tasks, other_process=other_process)


def main() -> int:
    """Check the environments; return 1 if one fails."""
    names = sys.argv[1:] or list(NAMES)
    reports = json.loads(RESULTS.read_text())["environments"] if sys.argv[1:] else {}
    for name in names:
        report = checked(name)
        reports[name] = report.as_json()
        for check in report.checks:
            print(f"{name}, {check.name}: {'' if check.passed else 'FAIL '}{check.message}", flush=True)
    reports = {name: reports[name] for name in NAMES}
    made = {**provenance(), "command": "python -m benchmarks.robustness.semantic", "environments": reports}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n")
    PAGE.write_text(TABLE.sub(lambda _: table(reports), PAGE.read_text()))
    return int(not all(report["passed"] for report in reports.values()))


if __name__ == "__main__":
    from benchmarks.robustness import semantic  # another process finds no class or function of `__main__`

    sys.exit(semantic.main())
