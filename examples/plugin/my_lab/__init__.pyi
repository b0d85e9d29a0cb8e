from .median_grpo import MedianGRPO as MedianGRPO
from .median_grpo import median_advantages as median_advantages
from .plain_engine import PlainEngine as PlainEngine
from .reward_goal import RewardGoal as RewardGoal
from .sums import Sums as Sums
