"""``mrlm balance``: balance right and wrong answers to each question; split them for training and validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt

from mrlm_pl.answers.balance import BalancedAnswers, balance
from mrlm_pl.answers.records import Answer, answer_of_row, read_answers
from mrlm_pl.cli.parsing.parser import CommandParser, command_parser
from mrlm_pl.durable_files import check_new, unfinished, write_json
from mrlm_pl.environment.rows import numbered_rows
from mrlm_pl.episode_files import write_lines
from mrlm_pl.errors import ConfigurationError, counted

HELD_OUT = ".validation"
"""Part of the name of the file with the held-out questions, before the suffix."""


def run(arguments: Sequence[str]) -> int:
    """Write the files and return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or a file is there already.
        DataError: a row cannot be read, or nothing can be balanced.
    """
    options = balance_parser().read(arguments, {})
    output, report, pairs = options.output, options.report, options.pairs
    outputs = [path for path in (output, pairs) if path is not None]
    for path in outputs:
        if path.is_dir() or not path.name.endswith((".jsonl", ".jsonl.zst", ".jsonl.gz")):
            raise ConfigurationError(f"{str(path)!r} must be a file that ends in .jsonl, .jsonl.zst or .jsonl.gz")
    held_out = map(held_out_path, outputs) if options.validation_share else ()
    targets = [*outputs, *held_out, *filter(None, [report])]
    if len(set(targets)) < len(targets):
        raise ConfigurationError(f"output, pairs and report name one file twice: {', '.join(map(str, targets))}")
    for path in targets:
        check_new("report" if path == report else "output", path)
    answers, failed = _read_answers(options.answers, options.references)
    chosen = {name: options[name] for name in ("per_question", "seed", "fill_wrong", "validation_share")}
    balanced = balance(answers, **chosen)
    balanced.report["answers"]["failed_episodes"] = failed
    files = _write_splits(balanced, output, pairs)
    if report is not None:
        write_json(report, balanced.report)
    print(_table(balanced, files))
    return 0


def balance_parser() -> CommandParser:
    """Return the parser of ``mrlm balance``."""
    text = "Balance right and wrong answers to each question, and hold out questions for validation."
    parser = command_parser("balance", text)
    add = parser.add_argument
    add("answers", type=str, nargs="+", help="Files of `mrlm collect`, of episodes, or of {question, answer, correct}.")
    text = "File, .jsonl, .jsonl.zst or .jsonl.gz; held-out questions go to NAME.validation.jsonl next to it."
    add("--output", type=Path, required=True, help=text)
    text = "Maximum number of right, and of wrong, answers to a question; default: all that can be balanced."
    add("--per_question", type=PositiveInt | None, help=text)
    add("--seed", type=NonNegativeInt, default=0, help="Seed of dropping, generating and holding out.")
    add("--fill_wrong", action="store_true", help="Generate wrong answers, marked as such, where there are too few.")
    add("--references", type=str, nargs="+", default=[], help="Files of right answers to the same questions.")
    add("--validation_share", type=float, default=0.2, help="Fraction of the questions to hold out.")
    add("--pairs", type=Path | None, help="File for pairs {prompt, chosen, rejected}; and NAME.validation.jsonl.")
    add("--report", type=Path | None, help="JSON file for the counts of answers.")
    return parser


def held_out_path(path: Path) -> Path:
    """Return the path of the validation part of a file.

    >>> held_out_path(Path("runs/balanced.jsonl.gz")).name
    'balanced.validation.jsonl.gz'
    """
    stem, dot, suffix = path.name.partition(".jsonl")
    return path.with_name(f"{stem}{HELD_OUT}{dot}{suffix}")


def answer_pairs(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the right and wrong answers to each question as rows of pairs, in their order."""
    sides: dict[str, tuple[list[Answer], list[Answer]]] = {}
    for answer in answers:
        sides.setdefault(answer.question, ([], []))[0 if answer.correct else 1].append(answer)
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": right.answer}],
            "rejected": [{"role": "assistant", "content": wrong.answer}],
        }
        for question, (chosen, rejected) in sides.items()
        for right, wrong in zip(chosen, rejected, strict=True)
    ]


def _read_answers(sources: Sequence[str], references: Sequence[str]) -> tuple[list[Answer], int]:
    """Return the answers of all files and the number of failed episodes among them."""
    for source in sources:
        if unfinished(Path(source)):
            raise ConfigurationError(f"answers: {source!r} is half of a collection; complete it with `mrlm collect`")
    readings = [read_answers(source) for source in sources]
    answers = [answer for file_answers, _ in readings for answer in file_answers]
    tasks = {answer.question: answer.task for answer in answers}
    for source in references:
        for number, row in numbered_rows(source, "train", ("question", "answer")):
            # Other columns of a data set are its own, whatever their names.
            reference = {"question": row["question"], "answer": row["answer"], "correct": True}
            right = answer_of_row(reference, f"{source}, row {number}: ")
            if right.question in tasks:
                answers.append(Answer(right.question, right.answer, 1.0, tasks[right.question]))
    return answers, sum(failed for _, failed in readings)


def _write_splits(balanced: BalancedAnswers, output: Path, pairs: Path | None) -> dict[str, Path]:
    """Write the files; return the file of each split's answers."""
    files = {}
    for split, answers in balanced.splits.items():
        if split == "train" or answers:
            files[split] = output if split == "train" else held_out_path(output)
            write_lines(files[split], map(_line, (answer.to_row() for answer in answers)))
            if pairs is not None:
                write_lines(pairs if split == "train" else held_out_path(pairs), map(_line, answer_pairs(answers)))
    return files


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)


def _table(balanced: BalancedAnswers, files: dict[str, Path]) -> str:
    report = balanced.report
    questions, answers, right_share = report["questions"], report["answers"], report["right_share"]
    dropped = "".join(f", {count} with {why}" for why, count in questions["dropped"].items() if count)
    counts = ", ".join(
        f"{answers[name]} {meaning}"
        for name, meaning in (
            ("failed_episodes", "failed episodes left out"),
            ("duplicates", "duplicates"),
            ("contradicted", "called both right and wrong"),
            ("dropped", "without a counterpart"),
            ("generated", "generated"),
        )
        if answers[name]
    )
    lines = [
        ("questions", f"{questions['kept']} of {questions['read']} kept{dropped and '; dropped' + dropped[1:]}"),
        ("answers", f"{answers['kept']} kept of {answers['read']} read" + (f"; {counts}" if counts else "")),
        ("right", f"{right_share['before']:.4f} before, {right_share['after']:.4f} after"),
        ("balance", f"right and wrong differ by at most {report['balance']['max_difference']} in a question"),
    ]
    for split, path in files.items():
        split_counts = report["splits"][split]
        numbers = ", ".join(counted(split_counts[f"{noun}s"], noun) for noun in ("question", "answer"))
        lines.append((split, f"{numbers} in {path}"))
    return "\n".join(f"{name:<11} {text}" for name, text in lines)
