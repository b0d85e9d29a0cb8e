"""``mrlm recredit``: credit the episodes of a run with another algorithm or setting."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt

from mrlm_pl.cli.parsing.classes import LOSS
from mrlm_pl.cli.parsing.config_files import with_first_as
from mrlm_pl.cli.parsing.configuration import ARGUMENTS, CLASS, merge_arguments
from mrlm_pl.cli.parsing.parser import check_needed, command_parser
from mrlm_pl.errors import ConfigurationError, counted
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.runs.console import silence_noise
from mrlm_pl.runs.plugins import import_exports, import_packages
from mrlm_pl.runs.records.credit import recredit
from mrlm_pl.runs.records.credit_report import AgentChange
from mrlm_pl.runs.records.run import recorded_configuration

SHOWN = 10
"""Number of changes that are listed."""

LOSS_ARGUMENTS = (*LOSS, "reduction", "max_length")
"""Arguments of an algorithm without which its credit is the same, and which another algorithm may refuse."""


def run(arguments: Sequence[str]) -> int:
    """Print how the advantages of recorded turns change; return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or the credit needs weights or other episodes.
        DataError: the episodes cannot be read.
    """
    silence_noise()
    import_packages()
    import_exports()
    parser = command_parser("recredit", "Compute the advantages of a run's episodes with another algorithm.")
    parser.usage = "mrlm recredit RUN [--model NAME] [--model.ARGUMENT VALUE ...] [options]"
    parser.add_subclass_arguments(Algorithm, "model", required=True)
    add = parser.add_argument
    add("--run", type=str, required=True, help="Run folder; may be given as the first argument.")
    add("--iteration", type=NonNegativeInt | None, help="Only the episodes of this iteration, counted from 0.")
    add("--output", type=str | None, help="Folder for the episodes with their new advantages and the report.")
    add("--policies", type=str | None, help="Run or model with weights, to compare the gradients under both credits.")
    add("--device", type=str, default="auto", help="cpu, cuda:0, ...; auto prefers an accelerator.")
    options = parser.instantiate(parser.read(_with_recorded_model(arguments), {"model": Algorithm}))
    check_needed(options, parser, {"device": ("policies",)})
    chosen = {name: options[name] for name in ("iteration", "output", "policies", "device")}
    report = recredit(options.run, options.model, **chosen)
    episodes = counted(report.episodes, "episode")
    print(f"{episodes} with the credit of {report.algorithm}; advantages, recorded against new:")
    for agent, change in report.agents.items():
        print(f"  {agent}: {_change_line(change)}")
        for turn, step_change in report.turns[agent].items() if len(report.turns[agent]) > 1 else ():
            print(f"    step {turn}: {_change_line(step_change)}")
    for policy, cosine in report.gradient_cosines.items():
        print(f"  policy {policy}: cosine of the gradients {_text(cosine)}")
    if report.largest:
        print("largest changes:")
    for credit in report.largest[:SHOWN]:
        print(f"  {credit.episode} {credit.agent} step {credit.turn}: {credit.recorded:+z.4f} -> {credit.new:+z.4f}")
    if options.output:
        view = shlex.join(["mrlm", "view", str(options.run), str(options.output)])
        print(f"written to {options.output}; `{view}` shows both")
    return 0


def _change_line(change: AgentChange) -> str:
    """Return a change in one line."""
    extra = ", groups without signal " + " -> ".join(f"{share:.1%}" for share in change.zero_groups)
    extra += f", {counted(change.one_sided, 'turn')} on one side alone" if change.one_sided else ""
    extra += "" if change.gradient_cosine is None else f", cosine of the gradients {_text(change.gradient_cosine)}"
    counts = (counted(change.turns, "turn"), counted(change.sign_changes, "sign change"))
    return f"{counts[0]}, correlation {_text(change.correlation)}, {counts[1]}{extra}"


def _text(value: float | None) -> str:
    return "undefined" if value is None else f"{value:z.4f}"


def _with_recorded_model(arguments: Sequence[str]) -> list[str]:
    """Return the options behind the run's algorithm, with those of its arguments that a chosen other one takes.

    Raises:
        ConfigurationError: there is no such run, or its algorithm is unknown and none is given.
    """
    words = with_first_as("--run", arguments)
    config, _ = merge_arguments(words, ("model", "run"))
    run, chosen = config.get("run"), config.get("model")
    if run is None or "--help" in words or "-h" in words:
        return words
    if not Path(run).is_dir():
        raise ConfigurationError(f"run: there is no folder {run!r}; name a run folder, as in `mrlm recredit runs/a`")
    recorded = recorded_configuration(Path(run)).get("model")
    named = chosen.get(CLASS) if isinstance(chosen, dict) else chosen
    if recorded is None:
        return words
    chosen_words = []
    if named is not None:
        kept_arguments = {
            key: value for key, value in (recorded.get(ARGUMENTS) or {}).items() if key not in LOSS_ARGUMENTS
        }
        recorded = {**recorded, ARGUMENTS: kept_arguments}
        chosen_words = [f"--model={json.dumps({CLASS: named, ARGUMENTS: {}})}"]
    return [f"--model={json.dumps(recorded, default=str)}", *chosen_words, *words]
