"""The results page, its plots and the README's table of numbers, drawn from ``benchmarks/results/*.json``.

    python -m benchmarks.results_page            # write docs/results.md, docs/images/results and the README's table
    python -m benchmarks.results_page --check    # exit status 1 if the page or the table is not that of the files

No number is written by hand: a file that a benchmark has written again changes all places that show it.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results_tables as tables
from benchmarks.few_values import mean_and_half

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
PLOTS = ROOT / "docs" / "images" / "results"
README = ROOT / "README.md"
MARKS = ("<!-- numbers: make results -->\n", "<!-- end of numbers -->\n")

HEAD = """\
# Results

Every number is drawn from a file in `benchmarks/results` that its command wrote; `make results` draws this page again,
and `make benchmarks` measures again. Intervals cover 95 %: over the seeds (Student's t), or over the tasks of an
evaluation. All measurements are on CPUs with small models, so ratios tell more than absolute numbers.
"""


@dataclass(frozen=True)
class Section:
    """A file of results on the page.

    Args:
        title: its heading.
        text: the measurement in a sentence or two.
        show: returns the table of the file's content.
        plot: whether it has a plot.
    """

    title: str
    text: str
    show: Callable[[Any], str]
    plot: bool = False


CHAPTERS: dict[str, dict[str, Section]] = {
    "Learning": {
        "quickstart": Section(
            "Quick start",
            "`configs/quickstart.yaml`: GRPO on generated problems; accuracy on 500 held-out ones.",
            tables.quickstart,
            plot=True,
        ),
        "learning": Section(
            "Algorithms of one policy",
            "Accuracy on 500 held-out problems before and after, by configuration; SFT and preferences train on 6,000 "
            "of the policy's own episodes. Curves are the mean reward of the rollouts.",
            tables.learning,
            plot=True,
        ),
        "team_algorithms": Section(
            "Algorithms of teams and of turns",
            "Mean held-out reward of the tiny model before and after a run of some CPU seconds, and the mean rewards "
            "of the rollouts. Runs differ in size; sections below compare some at equal tokens. Acting alone in "
            "`coordination` earns .4 for certain: DrMAS and Shapley credit agents with their own rewards and may "
            "settle there. MAPoRL's size replaced a smaller one that learned nothing.",
            tables.team_algorithms,
            plot=True,
        ),
        "parity": Section(
            "Learning curves beside TRL and CoMLRL",
            "The same random models, prompts, seeds and rewards (the fraction of even words) with the same optimizer.",
            tables.parity,
            plot=True,
        ),
        "token_losses": Section(
            "Token losses",
            "A shortened quick start with four updates per rollout: [algorithms](algorithms.md#token-losses).",
            tables.token_losses,
            plot=True,
        ),
        "turn_credit": Section(
            "Credit of turns",
            "Four wheels, 30,000 generated tokens: [algorithms](algorithms.md#credit-of-turns).",
            tables.turn_credit,
        ),
        "agentbench": Section(
            "Tasks of AgentBench",
            "A small model after its recipe, at equal generated tokens of all agents, on new tasks (shop and graph: of "
            "the split train): "
            "[shop](environments/webshop.md#measured), [graph](environments/knowledge_graph.md#measured), "
            "[house](environments/alfworld.md#measured).",
            tables.agentbench,
        ),
        "five_tasks": Section(
            "AgentBench's five tasks in one run",
            "A small model after its recipe, mean rewards in the first and the last fifth of the iterations: "
            "[several environments](multi_task.md#measured).",
            tables.five_tasks,
        ),
        "team_distillation": Section(
            "A team distilled into one model",
            "A student of two specialists: [on-policy distillation](algorithms/on_policy_distillation.md).",
            tables.team_distillation,
        ),
        "pairs": Section(
            "GDPO, M-GRPO and IGPO against GRPO",
            "At equal generated tokens (`benchmarks/learning/pairs.py`): "
            "[GDPO](algorithms/gdpo.md) on problems with a small reward for short replies, "
            "[M-GRPO](algorithms/mgrpo.md) on a planner that may ask helpers, "
            "[IGPO](algorithms/igpo.md) on three attempts at a problem.",
            tables.pairs,
        ),
        "budget": Section(
            "A team against one policy and its majority",
            "At as many generated tokens of a problem, after training with as many: "
            "[teams](teams.md#against-one-policy).",
            tables.budget,
        ),
        "effects": Section(
            "Effects of papers",
            "Each against the arm that its paper compares with (`benchmarks/learning/effects.py`): "
            "[AT-GRPO](algorithms/at_grpo.md#measured), [Dr.MAS](algorithms/dr_mas.md#measured), "
            "[asynchronous rollouts](async.md#measured), [RAE](algorithms/rae.md#measured), "
            "[self-play](self_play.md#measured).",
            tables.effects,
        ),
        "branches": Section(
            "C3 against MAGRPO and COMA",
            "At equal generated tokens: [C3](algorithms/c3.md).",
            tables.branches,
        ),
        "marginal": Section(
            "Credit from replays without an agent",
            "`halves` at equal generated tokens: [CCPO](algorithms/ccpo.md) and its relatives.",
            tables.marginal,
        ),
    },
    "Speed and memory": {
        "grpo_step": Section(
            "A GRPO step against TRL",
            "The same model, prompts and lengths: generation, reward, loss, backward pass and optimizer.",
            tables.grpo_step,
        ),
        "team_step": Section(
            "A team's step against CoMLRL", "Two agents with a turn tree: [teams](teams.md#speed).", tables.team_step
        ),
        "cost_curves": Section(
            "Growth of the costs",
            "Slopes of logarithms, over all points and between the last two: 1 is linear (dotted in the plot). "
            "Processor time of a step, rollout and update, and peak memory beyond the loaded models, on one thread; "
            "see [long contexts](scaling.md#long-contexts).",
            tables.cost_curves,
            plot=True,
        ),
        "distillation_step": Section(
            "A distillation step against TRL",
            "Full-vocabulary divergence over 32,000 words: [distillation](algorithms/on_policy_distillation.md).",
            tables.distillation_step,
        ),
        "int8_weights": Section(
            "Weights in int8",
            "int8 / float32 in one thread, and `builtin:tiny` on the problems of the quick start: "
            "[scaling](scaling.md#weights-in-int8).",
            tables.int8_weights,
        ),
        "kernel_shapes": Section(
            "Shapes of products in bf16 on a CPU",
            "Distinct shapes in ten steps of GRPO with replies of different lengths: [scaling](scaling.md#precision).",
            tables.kernel_shapes,
        ),
        "shared_machine": Section(
            "A busy machine",
            "A GRPO step by OpenMP setting: [scaling](scaling.md#machines-shared-with-other-processes).",
            tables.shared_machine,
        ),
        "batching": Section(
            "Batching",
            "Processor time of the in-process engine with one call for several policies against a call for each, with "
            "adapters on one base against adapters added to copies of it, and for unequal lengths against `generate` "
            "in waves: [engines](engines.md#in-this-process).",
            tables.batching,
        ),
        "rounds": Section(
            "Rounds against lockstep",
            "32 episodes of 4 turns of unequal lengths, size s; an answer takes a random time with this mean: "
            "[engines](engines.md#rounds).",
            tables.rounds,
        ),
        "limit": Section(
            "Limit of the machine",
            "A GRPO step by phase beside its matrix products, each measured alone in its shape; one thread. The last "
            "column is the ratio to TRL of a step that consists of its products alone.",
            tables.limit,
        ),
        "start_up": Section(
            "Start-up",
            "`mrlm fit --config configs/quickstart.yaml` up to its first update, beside earlier commits: "
            "[scaling](scaling.md#start-up).",
            tables.start_up,
        ),
        "records": Section(
            "Recorded episodes", "Size of the tiny model's debates: [data](data.md#episodes).", tables.records
        ),
    },
    "Correctness and robustness": {
        "kill_resume": Section(
            "Kills",
            "Runs killed by SIGKILL at random moments, up to three times each: "
            "[scaling](scaling.md#checkpoints-and-resume).",
            tables.kill_resume,
        ),
        "attacks": Section(
            "Attacks on the sandbox",
            "Hostile programs by isolation level: [sandbox](sandbox.md#levels).",
            tables.attacks,
        ),
        "conformance_peers": Section(
            "Conformance",
            "Values computed by the peers' own code, compared one by one in [conformance](conformance.md).",
            tables.conformance_peers,
        ),
        "families": Section(
            "Model families",
            "Absolute differences of engine and learner to each model's own forward pass: "
            "[engines](engines.md#in-this-process).",
            tables.families,
        ),
        "semantic": Section(
            "Rewards and observations of the environments",
            "Environments by result of `mrlm check-env --level semantic`; all of them in [checks](checks.md).",
            tables.semantic,
        ),
        "interval_coverage": Section(
            "Confidence intervals",
            "Coverage of the 95 % interval of an accuracy in simulations with correlated samples.",
            tables.interval_coverage,
        ),
    },
    "Earlier measurements": {
        "earlier": Section(
            "Numbers of other pages",
            "Measured before results were kept in files, without date and versions; the command repeats each.",
            tables.earlier,
        ),
    },
}


ELSEWHERE = {
    "adapters": "[FrozenLake](environments/gymnasium.md), tic-tac-toe of [PettingZoo](environments/pettingzoo.md) and "
    "[TextArena](environments/textarena.md)",
    "call_path": "files on the path of a GRPO step through the code",
    "environment_steps": "steps of the [knowledge graph](environments/knowledge_graph.md#generated-questions), the "
    "[shop](environments/webshop.md#many-sessions) and the [house](environments/alfworld.md#generated-games)",
    "gateway": "tokens per second through the [gateway](gateway.md)",
    "reasoning_gym": "[sums of reasoning-gym](environments/reasoning_gym.md)",
    "run_size": "[bytes that a run writes](operations.md#written-files)",
    "training_forward": "the learner's pass, also with [compiled layers](scaling.md#compiled-layers), and a padded one",
}
"""Files that other pages show."""


def page() -> str:
    """Return the whole page."""
    text = HEAD
    for chapter, sections in CHAPTERS.items():
        text += f"\n## {chapter}\n"
        for name, section in sections.items():
            found = tables.read(name)
            shown = f"\n![{section.title}](images/results/{name}.svg)\n" if section.plot else ""
            text += f"\n### {section.title}\n\n{section.text}\n{shown}\n{section.show(found)}\n{source(name, found)}\n"
    text += "\n## Other files\n\n"
    return text + "".join(f"- `{name}.json`: {shown}\n" for name, shown in ELSEWHERE.items())


def source(name: str, found: Any) -> str:
    """Return file, command, date, machine and versions of a result."""
    facts = found if isinstance(found, dict) else {}
    link = f"[`{name}.json`](../benchmarks/results/{name}.json)"
    if "command" not in facts:
        return f"{link}; written before files recorded command, date and versions."
    machine = ", ".join(f"{value} {key}" if key == "cores" else str(value) for key, value in facts["machine"].items())
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    return f"{link}: `{facts['command']}`, {facts['date']}, {machine}, {versions}."


def numbers() -> str:
    """Return the README's measured numbers beside the peers', and its curve."""
    grpo, team, killed, attacked = (tables.read(name) for name in ("grpo_step", "team_step", "kill_resume", "attacks"))
    turn, step = team["rows"][-1], grpo["rows"][0]
    count, runs, same = tables.kills(killed)
    levels = attacked["levels"]
    tried = " and ".join(f"{row['attacks']} at `{level}`" for level, row in levels.items())
    rows = [
        [
            f"a GRPO step against TRL {grpo['versions']['trl']}",
            f"**{step['cpu_ratio']:.2f}** of its processor time, **{step['peak_ratio']:.2f}** of its peak memory",
            "grpo_step",
        ],
        [
            f"a MAGRPO step of two agents and {turn['turns']} turns against CoMLRL {team['versions']['comlrl']}",
            f"**{turn['cpu_ratio']:.2f}** of its processor time, **{turn['peak_ratio']:.2f}** of its peak memory",
            "team_step",
        ],
        [
            f"{count} `kill -9` at random moments of SFT, GRPO, PPO, DPO and MAGRPO runs",
            f"**{same} of {runs}** resumed runs end with the weights of the undisturbed run, bit for bit",
            "kill_resume",
        ],
        [
            f"hostile programs in the sandbox: {tried}",
            f"**{sum(row['through'] for row in levels.values())}** succeed",
            "attacks",
        ],
    ]
    peers = tables.read("conformance_peers")
    version, same, both = peers["versions"]["verl"], *agreeing("verl")
    what = f"losses and advantages against verl {version}'s code (its rollouts need vLLM, SGLang or TensorRT-LLM)"
    rows.append([what, f"**{same} of {both}** have its values, within 1e-6", "conformance_peers"])
    shown = [[what, value, f"[{name}.json](benchmarks/results/{name}.json)"] for what, value, name in rows]
    curve = tables.read("quickstart")
    begin, end = (curve["summary"][moment][0] for moment in ("before", "after"))
    return (
        f"{tables.table(['measured on a CPU', 'result', 'file'], shown)}\n"
        "![Reward of the quick start by iteration](docs/images/results/quickstart.svg)\n\n"
        f"The quick start: mean reward of {len(curve['rows'])} seeds with its 95 % interval. The accuracy on 500\n"
        f"held-out problems rises from {begin:.2f} to {end:.2f} "
        "([quickstart.json](benchmarks/results/quickstart.json)).\n"
    )


def agreeing(peer: str) -> tuple[int, int]:
    """Return the numbers of formulas with the values of a peer's code on the page of conformance, and of all such."""
    lines = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.search(rf"[|;] {peer} -?\d", line)]
    return sum(line.endswith("| < 1e-6 |") for line in rows), len(rows)


def with_numbers(readme: str) -> str:
    """Return the README with the table of the present files."""
    begin, end = map(re.escape, MARKS)
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: f"\n{numbers()}\n", readme, flags=re.DOTALL)


def draw() -> None:
    """Draw the plots."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "mrlm",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    from matplotlib import pyplot

    (PLOTS / "curves").mkdir(parents=True, exist_ok=True)

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    curves = [smooth(row["rewards"]) for row in tables.read("quickstart")["rows"]]
    draw_band(axes, curves, len(curves[0]), "tab:blue")
    axes.set(xlabel="iteration", ylabel="mean reward of the rollout", ylim=(None, 1))
    save(figure, "quickstart")

    parity = tables.read("parity")
    figure, panels = pyplot.subplots(ncols=len(parity["pairs"]), figsize=(6, 3), sharey=True, layout="constrained")
    for axes, (name, pair) in zip(panels, parity["pairs"].items(), strict=True):
        for side, label, color in (("ours", "mrlm", "tab:blue"), ("peer", pair["peer"], "tab:orange")):
            draw_band(axes, [row[side] for row in pair["rows"]], parity["steps"], color, label)
        axes.set(title=name, xlabel="step")
        axes.legend(frameon=False)
    panels[0].set(ylabel="mean reward")
    save(figure, "parity")

    for file in ("learning", "team_algorithms"):
        found = tables.learning_curves(tables.read(file))
        rows = math.ceil(len(found) / 5)
        shared = file == "learning"  # one task
        figure, grid = pyplot.subplots(
            rows, 5, figsize=(10, 2.1 * rows), sharex=shared, sharey=shared, layout="constrained"
        )
        for axes in grid.flat[len(found) :]:
            axes.set_axis_off()
        for axes, (name, curves) in zip(grid.flat, found.items(), strict=False):
            draw_band(axes, [smooth(curve) for curve in curves], len(curves[0]), "tab:blue")
            axes.set_title(name, fontsize="small")
        figure.supxlabel("iteration")
        figure.supylabel("mean reward of the rollout")
        save(figure, file)
    for stem, curves in curves_by_page().items():
        figure, axes = pyplot.subplots(figsize=(4.2, 2.4), layout="constrained")
        draw_band(axes, [smooth(curve) for curve in curves], len(curves[0]), "tab:blue")
        axes.set(xlabel="iteration", ylabel="mean reward")
        save(figure, f"curves/{stem}")
        pyplot.close(figure)

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    rows = tables.read("token_losses")["summary"]
    axes.errorbar(
        [row["accuracy"] for row in rows.values()],
        range(len(rows)),
        xerr=[row["accuracy_half"] for row in rows.values()],
        fmt="o",
        color="tab:blue",
        capsize=3,
    )
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="held-out accuracy after 6 rollouts")
    axes.invert_yaxis()
    save(figure, "token_losses")

    found = tables.read("cost_curves")
    figure, grid = pyplot.subplots(4, 4, figsize=(10, 9), layout="constrained")
    for number, (name, axis) in enumerate(found["axes"].items()):
        for row, (measure, label) in enumerate((("cpu_s", "processor seconds"), ("memory_mib", "memory in MiB"))):
            axes = grid[2 * (number // 4) + row, number % 4]
            for side, color in (("ours", "tab:blue"), (axis["peer"], "tab:orange")):
                known = [point for point in tables.points(found, name, side) if "reason" not in point]
                if known:
                    x, y = [point["x"] for point in known], [point[measure] for point in known]
                    axes.loglog(x, y, "o-", color=color, markersize=3, label=tables.SIDES[side])
                    axes.loglog([x[0], x[-1]], [y[-1] * x[0] / x[-1], y[-1]], ":", color=color, linewidth=1)
            ticks = [point["x"] for point in tables.points(found, name, "ours")]
            labels = [f"{tick / 1000:.0f}k" if tick > 1000 else str(tick) for tick in ticks]
            axes.set_xticks(ticks, labels, fontsize="small")
            axes.minorticks_off()
            axes.set_ylabel(label, fontsize="small")
            axes.set_xlabel(axis["unit"], fontsize="small")
            if not row:
                axes.set_title(axis["algorithm"], fontsize="small")
                axes.legend(frameon=False, fontsize="small")
    save(figure, "cost_curves")


def curves_by_page() -> dict[str, list[list[float]]]:
    """Return the rewards of each seed by the file of the algorithm, of all that have rollouts."""
    stems = {path.stem.replace("_", ""): path.stem for path in (ROOT / "mrlm_pl" / "algorithms").glob("*.py")}
    files = (tables.learning_curves(tables.read(name)) for name in ("team_algorithms", "learning"))
    found = {name.lower(): curves for file in files for name, curves in file.items()}
    return {stems[name]: curves for name, curves in found.items() if name in stems}  # DAPO is GRPO with settings


def draw_band(axes: Any, curves: Sequence[Sequence[float]], steps: int, color: str, label: str = "") -> None:
    """Draw the mean of curves of equal length over steps, with its 95 % interval."""
    points = [mean_and_half(values) for values in zip(*curves, strict=True)]
    low, high = ([mean + sign * half for mean, half in points] for sign in (-1, 1))
    x = [steps * (number + 1) / len(points) for number in range(len(points))]
    axes.plot(x, [mean for mean, _ in points], color=color, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Return means over each value and those before it.

    >>> smooth([1.0, 2.0, 6.0], 2)
    [1.0, 1.5, 4.0]
    """
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def save(figure: Any, name: str) -> None:
    """Write a plot without the date, so that equal results give equal files."""
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Write the page, the plots and the table, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is not current")
    options = parser.parse_args()
    current = {PAGE: page(), README: with_numbers(README.read_text(encoding="utf-8"))}
    if options.check:
        old = [
            path.name for path, text in current.items() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        raise SystemExit(f"{', '.join(old)} differ from benchmarks/results: run `make results`" if old else 0)
    draw()
    for path, text in current.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
