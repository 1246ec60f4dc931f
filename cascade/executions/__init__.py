"""Other ways to run a cascade, to compare the speculative one with: same arguments, same counts, laws of their own."""

from .bild import BiLD
from .oracle import OracleCascade
from .sequence import SequenceCascade
from .sequential import SequentialCascade

__all__ = ["BiLD", "OracleCascade", "SequenceCascade", "SequentialCascade"]
