from .backwards import Backwards as Backwards
from .plain_engine import PlainEngine as PlainEngine
from .reward_goal import RewardGoal as RewardGoal
