"""``mrlm push RUN --repo USER/NAME``: publish a policy of a run on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence

from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.runs.publication import push_to_hub


def run(arguments: Sequence[str]) -> int:
    """Upload the policy, print its page and return exit status 0.

    Raises:
        ConfigurationError: there is no such policy, or the repository's name is none.
        RemoteError: the hub rejects the request or does not answer.
    """
    parser = PlainParser("push", "Publish an exported policy with its model card on the Hugging Face Hub.")
    parser.add_argument("run", metavar="RUN", help="run folder, or the folder of a policy")
    parser.add_argument("--repo", required=True, metavar="USER/NAME", help="repository; created if it does not exist")
    parser.add_argument("--policy", metavar="NAME", help="policy of the run; default: its only one")
    parser.add_argument("--private", action="store_true", help="make a new repository private; refuse a public one")
    parser.add_argument("--license", metavar="ID", help="license of the card, such as apache-2.0; default: unknown")
    options = parser.parse_args(arguments)
    wanted = {name: getattr(options, name) for name in ("policy", "private", "license")}
    print(push_to_hub(options.run, options.repo, **wanted))
    return 0
