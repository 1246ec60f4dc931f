"""What runs: distributions, statistics, verification, caches, drafters and the decoding engine.

Knows no rule by name, no tokenizer, no file and no configuration.
"""

from .blocks import TargetRule, VerifyBlock
from .distributions import Sampling, logits_to_probs
from .drafters import ModelDrafter, early_exit
from .engine import SpeculativeCascade
from .lookup import PromptLookupDrafter
from .models import TransformersLM
from .pace import AdaptiveGamma
from .packing import pack_weights
from .single import SingleModel
from .statistics import STAT_FIELDS, Stats
from .verify import emission_law

__all__ = [
    "STAT_FIELDS",
    "AdaptiveGamma",
    "ModelDrafter",
    "PromptLookupDrafter",
    "Sampling",
    "SingleModel",
    "SpeculativeCascade",
    "Stats",
    "TargetRule",
    "TransformersLM",
    "VerifyBlock",
    "early_exit",
    "emission_law",
    "logits_to_probs",
    "pack_weights",
]
