"""Fixed numbers on which implementations are compared: B = 4 rows of up to T = 5 tokens, and 4 pairs of answers."""

LOGP = [
    [-0.20, -1.00, -2.50, -0.70, -0.05],
    [-0.70, -0.10, -3.00, -0.40, 0.0],
    [-1.20, -0.30, 0.0, 0.0, 0.0],
    [-0.90, -2.20, -0.60, 0.0, 0.0],
]
OLD = [
    [-0.30, -0.40, -2.50, -1.90, -0.06],
    [-1.90, -0.12, -0.50, -0.45, 0.0],
    [-1.00, -0.90, 0.0, 0.0, 0.0],
    [-0.85, -2.90, -0.10, 0.0, 0.0],
]
REF = [
    [-0.25, -0.80, -2.00, -1.00, -0.10],
    [-1.10, -0.20, -2.50, -0.30, 0.0],
    [-1.50, -0.20, 0.0, 0.0, 0.0],
    [-0.80, -2.00, -0.90, 0.0, 0.0],
]
LENGTHS = [5, 4, 2, 3]
ADVANTAGES = [1.5, -0.5, -2.0, 0.25]
REWARDS = [1.0, 0.0, 0.25, 3.0]
GROUPS = [0, 0, 1, 1]
COMPONENTS = [[1.0, 10.0], [0.0, 30.0], [0.25, 5.0], [3.0, 0.0]]
COMMON = [[9, 0, 1, 0], [0, 9, 0, 0], [1, 0, 9, 0], [0, 0, 0, 9]]
"""Steps that leaves of one task share: the third leaf leaves the first after a step."""
MAX_LENGTH = 8
GREEDY = [0.5, 0.5, 1.0, 1.0]
"""Reward of the greedy episode of each row's task."""
STEPS = [3, 1, 2, 2]
"""Turns of an agent in each episode."""
TOKEN_REWARDS = [
    [0.1, 0.0, -0.2, 0.0, 1.0],
    [0.0, 0.3, 0.0, -1.0, 0.0],
    [0.0, 0.25, 0.0, 0.0, 0.0],
    [0.5, 0.0, 2.0, 0, 0],
]
VALUES = [[0.4, 0.5, 0.1, 0.3, 0.8], [0.2, -0.1, 0.0, -0.6, 0.0], [0.3, 0.3, 0.0, 0.0, 0.0], [1.0, 1.2, 1.9, 0.0, 0.0]]
NEW_VALUES = [[0.9, 0.4, 0.1, 0.6, 1.5], [-0.2, 0.3, 0.1, -0.5, 0.0], [0.3, 0.0, 0.0, 0.0, 0.0], [1.6, 1.1, 2.4, 0, 0]]
ENTROPIES = [[0.7, 1.3, 0.1, 0.2, 2.1], [0.4, 0.9, 1.1, 0.3, 0.0], [1.7, 0.6, 0.0, 0.0, 0.0], [0.8, 0.5, 1.9, 0.0, 0.0]]

TURN_REWARDS = [1.0, 0.5, -2.0, 0.25, 3.0, 0.0]
"""Of one agent in three episodes of a task, of three, one and two turns."""
TURN_EPISODES, TURNS = [0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1]
STATES = [7, 8, 7, 7, 7, 8]
"""The agent's state before each turn: the first episode returns to one."""
SCORES = [{"a": 0.2, "b": 0.9}, {"a": 0.8, "b": 0.6}, {"a": 1.0, "b": 0.3}]
"""Of the answers of two agents in three turns of a discussion."""

CHOSEN, REJECTED = [-3.0, -5.5, -0.7, -12.0], [-4.0, -5.0, -2.5, -11.0]
REF_CHOSEN, REF_REJECTED = [-3.5, -5.0, -1.0, -13.0], [-3.6, -5.2, -2.0, -12.5]
MEAN_CHOSEN, MEAN_REJECTED = [-0.30, -0.55, -0.07, -1.20], [-0.40, -0.50, -0.25, -1.10]
LABELS = [True, False, True, False]
DIVERGENCE = 0.4

STUDENT = [[0.2, -1.0, 0.5, 2.0], [1.5, 0.0, -0.5, 0.3]]
"""Logits of a vocabulary of four at two positions."""
TEACHER = [[0.0, 0.7, -0.3, 1.0], [2.0, -1.0, 0.4, 0.1]]
