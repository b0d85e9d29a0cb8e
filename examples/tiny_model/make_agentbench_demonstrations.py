"""Write demonstrations of tasks of AgentBench, and an untrained model with a tokenizer made of their words.

    python examples/tiny_model/make_agentbench_demonstrations.py --environment webshop --output runs/webshop-data
    python examples/tiny_model/make_agentbench_demonstrations.py --environment knowledge_graph --output runs/graph-data
    python examples/tiny_model/make_agentbench_demonstrations.py --environment alfworld --team --output runs/house-data
    python examples/tiny_model/make_agentbench_demonstrations.py --output runs/five-data --episodes 1000

The scripted expert (`Environment.gold`) plays small tasks of the training split, but is hurried: in the shop it often
opens a random product or leaves out an option, in the graph it often follows a random relation, in the house it often
takes a random object, and in the shell and the database it often ends without a look. Half of the rows end after the
first reply. With ``--team`` the environment's team plays, and a row is one agent's conversation. Without
``--environment`` the rows are of all five, each with ``--episodes``.

The fixed parts of a call and the names of products, options, entities, paths and columns are single tokens, so that one
attention head can copy a name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from mrlm_environments import (
    AlfWorldEnvironment,
    KnowledgeGraphEnvironment,
    ShellEnvironment,
    SqlEnvironment,
    WebShopEnvironment,
)
from mrlm_environments.sql.tasks import SUBJECTS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mrlm_pl.environment import Environment, Task
from mrlm_pl.environment.tools import written_call
from mrlm_pl.episode import Message
from mrlm_pl.policy.tiny import build_config
from mrlm_pl.seeding import keyed_random

ENVIRONMENTS: dict[str, tuple[Callable[..., Environment], dict[str, Any]]] = {
    "shell": (ShellEnvironment, {"max_turns": 3}),
    "sql": (
        SqlEnvironment,
        {"kinds": ["select", "count", "delete"], "rows": (3, 4), "max_turns": 3, "instruction": ""},
    ),
    "knowledge_graph": (
        KnowledgeGraphEnvironment,
        {
            "kinds": ["join", "reverse", "count"],
            "hops": (1, 2),
            "entities": 120,
            "max_turns": 8,
            "instruction": "",
        },
    ),
    "webshop": (
        WebShopEnvironment,
        {"products": 60, "page_size": 3, "list_actions": False, "max_turns": 8, "instruction": ""},
    ),
    "alfworld": (
        AlfWorldEnvironment,
        {
            "kinds": ["pick"],
            "rooms": ["bathroom"],
            "steps": (1, 6),
            "list_actions": False,
            "max_turns": 8,
            "instruction": "",
        },
    ),
}
ROWS = 4000
HURRY = {"shell": 0.5, "sql": 0.5, "webshop": 0.3, "knowledge_graph": 0.5, "alfworld": 0.3}
"""Probability of an error, at each choice."""
CONTEXT_LENGTH = 1024

PAD, UNKNOWN, END = "<pad>", "<unk>", "<|end|>"
ROLE_TOKENS = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))
CALL = r'<tool_call>\{"name": "\w+", "arguments": \{(?:"\w+": ["\[])?|", "\w+": "|["\]]?\}\}</tool_call>'
"""The fixed parts of a call."""
PARTS = r"Final Answer: #|Back to Search|Buy Now|Next >|< Prev|Description \[SEP\] Features \[SEP\] Reviews"
"""Fixed parts of answers and pages."""
WORDS = r" \[[A-Z]+\] |[a-z]+(?:[._][a-z_]+)+|\d+\.\d+| ?\d+| ?(?![a-z]+[._][a-z])[A-Za-z]+|[\s\S]"
"""Separators, names with dots, numbers, words, characters."""
CHAT_TEMPLATE = """\
{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Names of tools instead of schemas, which would be most of the context."""

_PRODUCT = re.compile(r"B0[A-Z0-9]{8}")
_TAKE, _OBJECT = re.compile(r'"take (.+) from '), re.compile(r"\ban? ([a-z]+ \d+)")
_LIST = re.compile(r"Observation: \[(.*)\]")


def make_environment(name: str, **changes: Any) -> Environment:
    """Return the environment of the demonstrations with these settings changed."""
    cls, settings = ENVIRONMENTS[name]
    return cls(**{**settings, **changes})


def hurried_purchase(replies: list[str], page: str, rng: Random) -> list[str]:
    """Return the replies still to give, with a random product of the page or without some options."""
    parts = page.split(" [SEP] ")
    products = [part for part in parts if _PRODUCT.fullmatch(part)]
    if products and rng.random() < HURRY["webshop"]:
        after = 1 + next(place for place, reply in enumerate(replies) if _PRODUCT.search(reply))
        return [written_call("click_action", value=rng.choice(products)), *replies[after:]]
    if "Buy Now" in parts[-1].partition("\n")[0]:
        values = {part.lower() for part in parts}
        while "Buy Now" not in replies[0] and (_argument(replies[0]) not in values or rng.random() < HURRY["webshop"]):
            replies = replies[1:]
    return replies


def hurried_exploration(replies: list[str], observed: str, rng: Random) -> list[str]:
    """Return the replies still to give, often with a random listed relation."""
    listed = _LIST.search(observed)
    if listed is None or '"get_neighbors"' not in replies[0] or rng.random() >= HURRY["knowledge_graph"]:
        return replies
    relation = rng.choice(listed[1].split(", "))
    return [written_call("get_neighbors", variable=_argument(replies[0]), relation=relation), *replies[1:]]


def hurried_errand(replies: list[str], observed: str, rng: Random) -> list[str]:
    """Return the replies still to give, often with a random object of those in sight."""
    take = _TAKE.search(replies[0])
    seen = _OBJECT.findall(observed.partition("you see")[2])
    if take is None or not seen or rng.random() >= HURRY["alfworld"]:
        return replies
    taken = rng.choice(seen)
    return [reply.replace(f" {take[1]} ", f" {taken} ") for reply in replies]


def hurried_command(replies: list[str], observed: str, rng: Random) -> list[str]:
    """Return the replies still to give: the answer that the command printed, or often a guess in its place."""
    if '"answer_action"' in replies[0]:
        return [written_call("answer_action", answer=observed.strip())]
    if '"bash_action"' not in replies[0] or rng.random() >= HURRY["shell"]:
        return replies
    return [written_call("answer_action", answer="1") if "answer_action" in replies[-1] else replies[-1]]


def hurried_statement(replies: list[str], observed: str, rng: Random) -> list[str]:
    """Return the replies still to give, often without the statement and its result."""
    if '"execute_sql"' not in replies[0] or rng.random() >= HURRY["sql"]:
        return replies
    return [written_call("commit_final_answer", answers=[])]


def planned(environment: Environment, task: Task) -> dict[str, list[str]]:
    """Return the best replies of each agent; in the shell the answer is that of the command."""
    if environment.name != "shell":
        return {agent: list(replies) for agent, replies in (environment.gold(task) or {}).items()}
    change = task.data["description"].startswith("Write")
    command = written_call("bash_action", script=task.data["reference"].removesuffix(" || true"))
    end = written_call("finish_action") if change else written_call("answer_action", answer="")
    return {environment.agents[0]: [command, end]}


EXPERTS: dict[str, Callable[[list[str], str, Random], list[str]]] = {
    "shell": hurried_command,
    "sql": hurried_statement,
    "knowledge_graph": hurried_exploration,
    "webshop": hurried_purchase,
    "alfworld": hurried_errand,
}


def _argument(reply: str) -> str:
    """Return the first argument of a call."""
    text = reply.partition("<tool_call>")[2].partition("</tool_call>")[0]
    return next(iter(json.loads(text)["arguments"].values()))


def demonstrations(environment: Environment, task: Task, rng: Random) -> Iterator[dict[str, Any]]:
    """Yield the conversation of each agent in an episode of the hurried expert, rows for ``TrajectoryDataModule``."""
    plan = planned(environment, task)
    seen: dict[str, list[Message]] = {agent: [] for agent in environment.agents}
    observations = environment.reset(task) if plan else {}
    while any(plan[agent] for agent in observations):  # a house has no wrong answer that ends the episode
        ((agent, messages),) = observations.items()
        reply, *plan[agent] = EXPERTS[environment.name](plan[agent], messages[-1].content, rng)
        seen[agent] += [*messages, Message("assistant", reply)]
        observations = environment.step({agent: seen[agent][-1]}).observations
    for agent, messages in seen.items():
        if messages:
            schemas = [schema.to_chat() for schema in environment.tools(agent)]
            yield {"messages": [message.to_chat() for message in messages], "tools": schemas}


def first_reply(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages up to the first reply."""
    return messages[: 1 + next(place for place, message in enumerate(messages) if message["role"] == "assistant")]


def names(environment: Environment) -> str:
    """Return a pattern of the names that calls repeat from observations, a token each."""
    if isinstance(environment, WebShopEnvironment):
        return "|".join(re.escape(name) for name in sorted(set(_phrases(environment)), key=len, reverse=True))
    if environment.name == "knowledge_graph":
        return r"[A-Z][a-z]+ [A-Z][a-z]+(?=[ ?.,\]\"])"
    if environment.name == "shell":
        return r"~/d\d+(?:/\w+(?:\.\w+)?)?"
    if environment.name == "sql":
        tables = {name for table, columns, names, groups in SUBJECTS for name in (table, *columns, *names, *groups)}
        return "|".join(sorted(tables, key=len, reverse=True))
    return "(?!)"  # none: a thing in a house is a word and a number, which is copied from behind the word


def _phrases(environment: WebShopEnvironment) -> Iterator[str]:
    """Yield the numbers, kinds, attributes and options of the shop's products, as goals and as titles have them."""
    for product in environment.catalog.products.values():
        yield product.asin
        for text in (product.query, *product.attributes):
            yield from (text, text.title())
        for values in product.options.values():
            yield from values


def build_tokenizer(texts: list[str], names: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the texts' words, with names and the fixed parts of calls as tokens."""
    names = rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])"
    words = Regex(rf"{CALL}|{PARTS}|{names}|[,:]?[ ](?={names})|{WORDS}")
    core = Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    core.decoder = decoders.Fuse()
    special = [PAD, UNKNOWN, END, *ROLE_TOKENS]
    core.train_from_iterator(
        [*texts, *CHARACTERS], trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=ROLE_TOKENS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Write ``rows.jsonl`` and ``untrained`` to the command line's folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--environment", choices=list(EXPERTS), help="default: all five")
    parser.add_argument("--team", action="store_true")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--episodes", type=int, default=ROWS, help="of each environment")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    patterns: list[str] = []
    for name in [options.environment] if options.environment else ENVIRONMENTS:
        environment = make_environment(name, **({"team": True} if options.team else {}))
        tasks = environment.tasks("train")
        for index in range(options.episodes):
            rows += demonstrations(environment, tasks[index], keyed_random("demonstration", index))
        patterns.append(names(environment))
        environment.close()
    rows += [{**row, "messages": first_reply(row["messages"])} for row in rows]  # short rows, which copy a name each
    (options.output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = {tool["function"]["name"] for row in rows for tool in row["tools"]}
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer = build_tokenizer([*texts, " ".join([*tools, *tools, ""])], "|".join(patterns))
    tokenizer.save_pretrained(options.output / "untrained")
    # five times the usual spread of initial weights: with tied embeddings, copying a token is then learned in 400 steps
    shape = {"num_hidden_layers": 2, "initializer_range": 0.1, "max_position_embeddings": CONTEXT_LENGTH}
    config = build_config(vocab_size=len(tokenizer), **shape)
    config.save_pretrained(options.output / "untrained")


if __name__ == "__main__":
    main()
