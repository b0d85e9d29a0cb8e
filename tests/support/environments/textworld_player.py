"""Plays ALFWorld's games in TextWorld, in its own process: games and actions on the standard input, as JSON."""

import json
import sys


def shown(state):
    return [state.feedback, list(state["admissible_commands"]), bool(state["won"])]


def played(game, actions):
    # Of the Python with TextWorld, which is not that of the tests.
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)))
    env.load(game)
    found = [shown(env.reset())]
    return found + [shown(env.step(action)[0]) for action in actions]


if __name__ == "__main__":
    print(json.dumps([played(**asked) for asked in json.load(sys.stdin)]))
