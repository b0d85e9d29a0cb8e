"""The results page, its plots and the README's table of numbers, drawn from ``benchmarks/results/*.json``.

    python -m benchmarks.results_page            # write docs/results.md, docs/images/results and the README's table
    python -m benchmarks.results_page --check    # exit status 1 if the page or the table is not that of the files

No number is written by hand: a file that a benchmark has written again changes all places that show it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.few_values import mean_and_half

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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


def read(name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def plus_minus(mean: float, half: float, sign: str = "") -> str:
    """Return a mean with the half width of its interval.

    >>> plus_minus(0.0104, 0.02), plus_minus(0.0104, 0.02, "+")
    ('0.010 ± 0.020', '+0.010 ± 0.020')
    """
    return f"{mean:{sign}.3f} ± {half:.3f}"


def between(low_and_high: Sequence[float], sign: str = "") -> str:
    """Return an interval.

    >>> between((0.1, 0.25))
    '[0.100, 0.250]'
    """
    return f"[{', '.join(f'{bound:{sign}.3f}' for bound in low_and_high)}]"


def quickstart(found: Any) -> str:
    """Return accuracies by seed."""
    rows = [
        [row["seed"], *(f"{row[moment]['accuracy']:.3f} {between(row[moment]['ci95'])}" for moment in found["summary"])]
        for row in found["rows"]
    ]
    mean = ["mean over the seeds", *(plus_minus(*found["summary"][moment]) for moment in found["summary"])]
    return table(["seed", "before", "after"], [*rows, mean])


def token_losses(found: Any) -> str:
    """Return accuracies by token loss, and their differences to PPO's."""
    rows = []
    for name, row in found["summary"].items():
        gap = plus_minus(row["difference"], row["difference_half"], "+") if "difference" in row else "-"
        means = [
            f"{statistics.fmean(run[key] for run in found['runs'][name]):.3f}"
            for key in ("loss_weight", "clip_fraction")
        ]
        rows.append([f"`{name}`", plus_minus(row["accuracy"], row["accuracy_half"]), gap, *means])
    return table(
        ["loss or option", "held-out accuracy", "difference to `ppo`", "`loss_weight`", "`clip_fraction`"], rows
    )


TURN_CREDIT = {
    "GRPO": "`GRPO` | .1",
    "GRPO turn": "`GRPO`, `credit: turn` | .1",
    "GiGPO": "`GiGPO` | .1",
    "GiGPO, entropy .2": "`GiGPO` | .2",
}
"""Arms with their entropy bonus."""


def turn_credit(found: Any) -> str:
    """Return held-out returns and those of the run by credit of turns."""
    rows = []
    for arm, shown in TURN_CREDIT.items():
        row = found["tasks"]["wheels"]["summary"][arm]
        cells = []
        for name in ("reward", "rollouts"):
            gap = row.get(f"{name} minus GRPO")
            cells += [plus_minus(*row[name]), plus_minus(*gap, "+") if gap else "-"]
        rows.append([shown, *cells])
    header = ["", "entropy bonus", "held-out return", "minus GRPO", "mean return of the run", "minus GRPO"]
    return table(header, rows)


def team_distillation(found: Any) -> str:
    """Return accuracies of a student, its team and the team's majority."""
    row = found["rows"][-1]["all seeds"]
    names = {
        "student before": "untrained student",
        "student": "student",
        "team": "team: mean of its solvers in the last turn",
        "majority": "team: majority of the last turn",
    }
    rows = []
    for name, shown in names.items():
        gap = row.get(f"student - {name}")
        differs = f"{gap['mean']:+.3f} {between(gap['ci95'], '+')}" if gap else ""
        rows.append([shown, f"{row[name]['mean']:.3f} {between(row[name]['ci95'])}", differs])
    return table(["", "held-out accuracy", "student minus it"], rows)


def branches(found: Any) -> str:
    """Return rewards of counterfactual credit at equal generated tokens."""
    rows = [
        [
            f"`{row['experiment']}`",
            row["arm"],
            f"{row['mean']:.3f} {between(row['ci95'])}",
            f"{row['minus MAGRPO']:+.3f} {between(row['ci95 of it'], '+')}" if row["arm"] != "MAGRPO" else "-",
        ]
        for row in found
        if "mean" in row
    ]
    return table(["task", "algorithm", "held-out reward", "minus MAGRPO"], rows)


def marginal(found: Any) -> str:
    """Return rewards of credit from replays without an agent at equal generated tokens."""
    rewards: dict[tuple[int, str], list[float]] = {}
    for row in found:
        if "seed" in row:
            rewards.setdefault((row["budget"], row["arm"]), []).append(row["reward"])
    rows = [[budget, arm, len(seeds), plus_minus(*mean_and_half(seeds))] for (budget, arm), seeds in rewards.items()]
    return table(["generated tokens", "algorithm", "seeds", "held-out reward"], rows)


def against(found: Any, peer: str) -> list[str]:
    """Return processor time and memory of a step, as fractions of a peer's."""
    ours, other = found["ours"], found[peer]
    return [
        f"{found['cpu_ratio']:.2f} ({ours['cpu_s']:.2f} s / {other['cpu_s']:.2f} s)",
        f"{found['peak_ratio']:.2f} ({ours['peak_mib']:.0f} MiB / {other['peak_mib']:.0f} MiB)",
    ]


STEP = ("processor time", "peak memory")


def grpo_step(found: Any) -> str:
    """Return the costs of a GRPO step."""
    return table(["", *STEP], [["GRPO, mrlm / TRL", *against(found, "trl")]])


def distillation_step(found: Any) -> str:
    """Return the costs of a step of distillation."""
    return table(["", *STEP], [["distillation, mrlm / TRL", *against(found, "trl")]])


def team_step(found: Any) -> str:
    """Return the costs of a step of a team by turns."""
    rows = [[f"{row['turns']} turns", *against(row, "comlrl")] for row in found["rows"]]
    return table(["MAGRPO, mrlm / CoMLRL", *STEP], rows)


def kill_resume(found: Any) -> str:
    """Return kills and equal resumed runs by case."""
    rows = [[f"`{name}`", case["kills"], len(case["runs"]), case["same"]] for name, case in found["cases"].items()]
    return table(
        ["run", "kills", "resumed runs", "with the weights of the undisturbed run"], [*rows, ["all", *kills(found)]]
    )


def kills(found: Any) -> tuple[int, int, int]:
    """Return the numbers of kills, of resumed runs, and of those with equal weights."""
    cases = found["cases"].values()
    runs = [len(case["runs"]) for case in cases]
    return sum(case["kills"] for case in cases), sum(runs), sum(case["same"] for case in cases)


def attacks(found: Any) -> str:
    """Return successful attacks by level."""
    rows = [
        [
            f"`{level}`",
            row["attacks"],
            row["through"],
            row["harm"],
            f"{row['honest_with_full_score']} of {row['honest']}",
        ]
        for level, row in found["levels"].items()
    ]
    return table(["level", "attacks", "successful", "harm outside", "honest programs with the full score"], rows)


def interval_coverage(found: Any) -> str:
    """Return the least coverage of intervals in simulations."""
    row = found["summary"]["now"]
    return table(
        ["settings", "least coverage", "least coverage with 20 tasks or more"],
        [[row["settings"], row["least coverage"], row["least coverage of 20 tasks or more"]]],
    )


def families(found: Any) -> str:
    """Return the numbers of model families that agree with the model's own forward pass."""
    rows = [row for row in found["families"].values() if "error" not in row]
    names = ("engine", "batch", "session", "learner", "gradient")
    compared = [[row[name] for row in rows if name in row] for name in names]
    equal = [sum(value <= 1e-5 for value in values) for values in compared]
    return table(["families", *names], [["compared", *map(len, compared)], ["difference at most 1e-5", *equal]])


def records(found: Any) -> str:
    """Return the time of an iteration with writing by one without, and the size of 1,000 episodes by compression."""
    per = found["per_1000_episodes"]
    rows = [
        [name, f"{row['bytes'] / 1e6:.2f} MB", f"{row['compress_s']:.2f} s"]
        for name, row in per.items()
        if isinstance(row, dict)
    ]
    ratios = " ".join(f"{ratio:.2f}" for ratio in sorted(found["ratios"]))
    written = f"An iteration that writes its episodes takes {found['ratio']:.2f} of the time of one that does not "
    return f"{written}(median of {ratios}).\n\n" + table(["compression", "1,000 episodes", "to compress"], rows)


def shared_machine(found: Any) -> str:
    """Return the seconds of a step beside a busy process by OpenMP setting."""
    rows = [
        [f"`{name}`", f"{row['quiet_s']:.2f}", f"{row['busy_s']:.2f}", f"{row['busy_by_quiet']:.1f}"]
        for name, row in found["settings"].items()
    ]
    return table(["setting", "seconds alone", "with one busy process", "ratio"], rows)


def conformance_peers(found: Any) -> str:
    """Return the number of values that the peers' own code computed."""
    counts = {name: sum(name in row for row in found["values"].values()) for name in found["versions"]}
    rows = [[f"{name} {found['versions'][name]}", count] for name, count in counts.items()]
    return table(["peer", "losses and advantages"], rows)


def semantic(found: Any) -> str:
    """Return the numbers of environments that pass each check."""
    reports = [report["checks"] for report in found["environments"].values()]
    rows = []
    for name in reports[0]:
        applied = [report[name]["passed"] for report in reports if report[name]["applies"]]
        rows.append([f"`{name}`", sum(applied), len(applied) - sum(applied), len(reports) - len(applied)])
    return table(["check", "passes", "fails", "does not apply"], rows)


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
            quickstart,
            plot=True,
        ),
        "token_losses": Section(
            "Token losses",
            "A shortened quick start with four updates per rollout: [algorithms](algorithms.md#token-losses).",
            token_losses,
            plot=True,
        ),
        "turn_credit": Section(
            "Credit of turns",
            "Four wheels, 30,000 generated tokens: [algorithms](algorithms.md#credit-of-turns).",
            turn_credit,
        ),
        "team_distillation": Section(
            "A team distilled into one model",
            "A student of two specialists: [distillation](distillation.md).",
            team_distillation,
        ),
        "branches": Section(
            "C3 against MAGRPO and COMA",
            "At equal generated tokens: [counterfactual credit](counterfactual.md).",
            branches,
        ),
        "marginal": Section(
            "Credit from replays without an agent",
            "`halves` at equal generated tokens: [counterfactual credit](counterfactual.md).",
            marginal,
        ),
    },
    "Speed and memory": {
        "grpo_step": Section(
            "A GRPO step against TRL",
            "The same model, prompts and lengths: generation, reward, loss, backward pass and optimizer.",
            grpo_step,
        ),
        "team_step": Section(
            "A team's step against CoMLRL", "Two agents with a turn tree: [teams](teams.md#speed).", team_step
        ),
        "distillation_step": Section(
            "A distillation step against TRL",
            "Full-vocabulary divergence over 32,000 words: [distillation](distillation.md).",
            distillation_step,
        ),
        "shared_machine": Section(
            "A busy machine",
            "A GRPO step by OpenMP setting: [scaling](scaling.md#machines-shared-with-other-processes).",
            shared_machine,
        ),
        "records": Section("Recorded episodes", "Size of the tiny model's debates: [data](data.md#episodes).", records),
    },
    "Correctness and robustness": {
        "kill_resume": Section(
            "Kills",
            "Runs killed by SIGKILL at random moments, up to three times each: "
            "[scaling](scaling.md#checkpoints-and-resume).",
            kill_resume,
        ),
        "attacks": Section(
            "Attacks on the sandbox", "Hostile programs by isolation level: [sandbox](sandbox.md#levels).", attacks
        ),
        "conformance_peers": Section(
            "Conformance",
            "Values computed by the peers' own code, compared one by one in [conformance](conformance.md).",
            conformance_peers,
        ),
        "families": Section(
            "Model families",
            "Absolute differences of engine and learner to each model's own forward pass: "
            "[engines](engines.md#in-this-process).",
            families,
        ),
        "semantic": Section(
            "Rewards and observations of the environments",
            "Environments by result of `mrlm check-env --level semantic`; all of them in [checks](checks.md).",
            semantic,
        ),
        "interval_coverage": Section(
            "Confidence intervals",
            "Coverage of the 95 % interval of an accuracy in simulations with correlated samples.",
            interval_coverage,
        ),
    },
}


ELSEWHERE = {
    "adapters": "[FrozenLake](environments/gymnasium.md), tic-tac-toe of [PettingZoo](environments/pettingzoo.md) and "
    "[TextArena](environments/textarena.md)",
    "call_path": "files on the path of a GRPO step through the code",
    "environment_steps": "steps of the [knowledge graph](environments/knowledge_graph.md#generated-questions) and the "
    "[shop](environments/webshop.md#many-sessions)",
    "gateway": "tokens per second through the [gateway](gateway.md)",
    "reasoning_gym": "[chain sums of reasoning-gym](environments/reasoning_gym.md)",
}
"""Files that other pages show."""


def page() -> str:
    """Return the whole page."""
    text = HEAD
    for chapter, sections in CHAPTERS.items():
        text += f"\n## {chapter}\n"
        for name, section in sections.items():
            found = read(name)
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
    grpo, team, killed, attacked = (read(name) for name in ("grpo_step", "team_step", "kill_resume", "attacks"))
    turn = team["rows"][-1]
    count, runs, same = kills(killed)
    levels = attacked["levels"]
    tried = " and ".join(f"{row['attacks']} at `{level}`" for level, row in levels.items())
    rows = [
        [
            f"a GRPO step against TRL {grpo['versions']['trl']}",
            f"**{grpo['cpu_ratio']:.2f}** of its processor time, **{grpo['peak_ratio']:.2f}** of its peak memory",
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
    shown = [[what, value, f"[{name}.json](benchmarks/results/{name}.json)"] for what, value, name in rows]
    curve = read("quickstart")
    begin, end = (curve["summary"][moment][0] for moment in ("before", "after"))
    return (
        f"{table(['measured on a CPU', 'result', 'file'], shown)}\n"
        "![Reward of the quick start by iteration](docs/images/results/quickstart.svg)\n\n"
        f"The quick start: mean reward of {len(curve['rows'])} seeds with its 95 % interval. The accuracy on 500\n"
        f"held-out problems rises from {begin:.2f} to {end:.2f} "
        "([quickstart.json](benchmarks/results/quickstart.json)).\n"
    )


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

    PLOTS.mkdir(parents=True, exist_ok=True)

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    curves = [row["rewards"] for row in read("quickstart")["rows"]]
    points = [mean_and_half(values) for values in zip(*map(smooth, curves), strict=True)]
    low, high = ([mean + sign * half for mean, half in points] for sign in (-1, 1))
    iterations = range(1, len(points) + 1)
    axes.plot(iterations, [mean for mean, _ in points], color="tab:blue")
    axes.fill_between(iterations, low, high, color="tab:blue", alpha=0.25, linewidth=0)
    axes.set(xlabel="iteration", ylabel="mean reward of the rollout", ylim=(None, 1))
    save(figure, "quickstart")

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    rows = read("token_losses")["summary"]
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
