from .influence import INCENTIVES as INCENTIVES
from .influence import Horizon as Horizon
from .influence import RewardShare as RewardShare
from .influence import incentive_signs as incentive_signs
from .influence import incentives as incentives
from .influence import influence_rewards as influence_rewards
from .information_gain import information_gains as information_gains
from .overlong import overlong_penalty as overlong_penalty
