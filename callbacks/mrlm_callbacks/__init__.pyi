from .anchor_games import AnchorGames as AnchorGames
from .anchor_games import CollapseAlarm as CollapseAlarm
from .held_out_evaluation import HeldOutEvaluation as HeldOutEvaluation
from .self_play import SelfPlay as SelfPlay
