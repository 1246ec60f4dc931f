"""What runs: distributions, statistics, verification, caches, drafters and the decoding engine.

Knows no rule by name, no tokenizer, no file and no configuration.
"""

from .bild import BiLD
from .blocks import TargetRule, VerifyBlock
from .distributions import Sampling, logits_to_probs
from .drafters import ModelDrafter, early_exit
from .engine import SpeculativeCascade
from .lookup import PromptLookupDrafter
from .models import TransformersLM
from .oracle import OracleCascade
from .pace import AdaptiveGamma
from .packing import pack_weights
from .sequence import SequenceCascade
from .sequential import SequentialCascade
from .single import SingleModel
from .statistics import STAT_FIELDS, Stats
from .verify import emission_law

__all__ = [
    "STAT_FIELDS",
    "AdaptiveGamma",
    "BiLD",
    "ModelDrafter",
    "OracleCascade",
    "PromptLookupDrafter",
    "Sampling",
    "SequenceCascade",
    "SequentialCascade",
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
