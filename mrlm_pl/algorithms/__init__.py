"""Algorithms: one LightningModule per file."""

from mrlm_pl.algorithms.at_grpo import ATGRPO
from mrlm_pl.algorithms.cispo import CISPO
from mrlm_pl.algorithms.coma import COMA
from mrlm_pl.algorithms.correctness_model import CorrectnessModel
from mrlm_pl.algorithms.dpo import DPO
from mrlm_pl.algorithms.dr_mas import DrMAS
from mrlm_pl.algorithms.grpo import GRPO
from mrlm_pl.algorithms.gspo import GSPO
from mrlm_pl.algorithms.ippo import IPPO
from mrlm_pl.algorithms.madpo import MADPO
from mrlm_pl.algorithms.magrpo import MAGRPO
from mrlm_pl.algorithms.maporl import MAPoRL
from mrlm_pl.algorithms.mappo import MAPPO
from mrlm_pl.algorithms.mareinforce import MAREINFORCE
from mrlm_pl.algorithms.maremax import MAREMAX
from mrlm_pl.algorithms.marloo import MARLOO
from mrlm_pl.algorithms.pairwise_reward_model import PairwiseRewardModel
from mrlm_pl.algorithms.ppo import PPO
from mrlm_pl.algorithms.rae import RAE
from mrlm_pl.algorithms.reinforce import REINFORCE
from mrlm_pl.algorithms.reinforce_plus_plus import REINFORCEPlusPlus
from mrlm_pl.algorithms.reinforce_plus_plus_baseline import REINFORCEPlusPlusBaseline
from mrlm_pl.algorithms.remax import ReMax
from mrlm_pl.algorithms.rloo import RLOO
from mrlm_pl.algorithms.sft import SFT
from mrlm_pl.learner.algorithm import Algorithm

__all__ = [
    "ATGRPO",
    "CISPO",
    "COMA",
    "DPO",
    "GRPO",
    "GSPO",
    "IPPO",
    "MADPO",
    "MAGRPO",
    "MAPPO",
    "MAREINFORCE",
    "MAREMAX",
    "MARLOO",
    "PPO",
    "RAE",
    "REINFORCE",
    "RLOO",
    "SFT",
    "Algorithm",
    "CorrectnessModel",
    "DrMAS",
    "MAPoRL",
    "PairwiseRewardModel",
    "REINFORCEPlusPlus",
    "REINFORCEPlusPlusBaseline",
    "ReMax",
]
