"""Scorers: a generated answer and its reference in, a quality between 0 and 1 out. Known libraries, or trivially exact.

A scorer of one's own is one function with the signature of `Scorer`; pass it by name after `register_scorer`, or
name it as ``package.module:function``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

from ..router.checks import check_choice

__all__ = ["SCORERS", "Scorer", "exact_match", "final_answer", "find_scorer", "register_scorer", "rouge_l", "token_f1"]


class Scorer(Protocol):
    """Anything that grades an answer."""

    def __call__(self, prediction: str, reference: str) -> float:
        """Return the quality of ``prediction``, 0 (worst) to 1 (best)."""
        ...


_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_MARKED = re.compile(r"####\s*(-?\$?\d[\d,]*(?:\.\d+)?)")


def final_answer(prediction: str, reference: str) -> float:
    """Whether the final number is right: what follows ``####`` (the form of GSM8K), else the last number.

    >>> final_answer("She pays 3 * 4 = 12 dollars.", "3 * 4 = 12. #### 12")
    1.0
    """
    expected = _final_number(reference)
    return float(expected is not None and _final_number(prediction) == expected)


def _final_number(text: str) -> float | None:
    found = _MARKED.findall(text) or _NUMBER.findall(text)
    if not found:
        return None
    # A marked answer ends the text it belongs to: what a model goes on to invent afterwards does not count.
    digits = found[0] if _MARKED.search(text) else found[-1]
    return float(digits.replace(",", "").replace("$", ""))


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 with stemming, by rouge-score.

    >>> round(rouge_l("the cat sat", "the cat sat down"), 3)
    0.857
    """
    return float(_rouge().score(reference, prediction)["rougeL"].fmeasure)


@lru_cache(maxsize=1)
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def exact_match(prediction: str, reference: str) -> float:
    """Whether the two are the same up to letter case and white space.

    >>> exact_match("  Paris ", "paris")
    1.0
    """
    return float(prediction.casefold().split() == reference.casefold().split())


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the words of both, as SQuAD defines it: lower case, without punctuation and English articles.

    >>> token_f1("The Eiffel Tower, Paris", "Eiffel Tower")
    0.8
    """
    given, expected = _squad_words(prediction), _squad_words(reference)
    if not given or not expected:
        return float(given == expected)
    shared = sum((Counter(given) & Counter(expected)).values())
    return 2 * shared / (len(given) + len(expected))


def _squad_words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


SCORERS: dict[str, Scorer] = {
    "final_answer": final_answer,
    "rouge_l": rouge_l,
    "exact_match": exact_match,
    "token_f1": token_f1,
}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Offer a scorer of one's own under a name that configs can use."""
    SCORERS[name] = scorer


def find_scorer(name: str, scorers: Mapping[str, Scorer] | None = None) -> Scorer:
    """Find a scorer by its name, or as ``package.module:function``.

    Raises:
        ValueError: no such scorer.
    """
    known = SCORERS if scorers is None else scorers
    if name in known:
        return known[name]
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            found = getattr(import_module(module), function)
        except (ImportError, AttributeError, SyntaxError, ValueError) as error:
            raise ValueError(f"scorer: cannot load {name!r}: {error}") from error
        if not callable(found):
            raise ValueError(f"scorer: expected a function at {name!r}, got {type(found).__name__}")
        return found  # type: ignore[no-any-return]  # a user's function; its signature is Scorer's by contract
    check_choice("scorer", name, sorted(known))
    raise AssertionError(f"{name!r} is known after all")
