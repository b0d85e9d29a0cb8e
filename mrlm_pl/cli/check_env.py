"""``mrlm check-env``: check that an environment keeps to the contract."""

from __future__ import annotations

from collections.abc import Sequence

from mrlm_pl.cli.environment_option import environment_parser, parse


def run(arguments: Sequence[str]) -> int:
    """Exit status 0 when all checks pass, 1 when one fails; each check is a line.

    Raises:
        ConfigurationError: a mistake in the options or in the environment's arguments.
        RemoteError: it is on a server that does not answer.
        DataError: its data cannot be read.
    """
    parser = environment_parser("check-env", "Check that an environment keeps to the contract.")
    parser.usage = "mrlm check-env ENVIRONMENT [--environment.ARGUMENT VALUE ...] [--config FILE]"
    words = list(arguments)
    if words and not words[0].startswith("-"):
        words[:1] = ["--environment", words[0]]
    environment = parse(parser, words).environment

    from mrlm_pl.environment_check import check_environment

    _ = environment.agents  # one on a server is asked for here: if it cannot be, no check tells more
    results = check_environment(environment).checks
    for result in results:
        print(f"{'ok  ' if result.passed else 'FAIL'} {result.name}: {result.message}")
    failed = sum(not result.passed for result in results)
    print(f"{environment.name}: {len(results) - failed} of {len(results)} checks passed")
    return 1 if failed else 0
