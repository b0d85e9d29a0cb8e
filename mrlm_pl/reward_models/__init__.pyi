from .model import RewardModel as RewardModel
from .scorer import TextScore as TextScore
from .scorer import TextScorer as TextScorer
