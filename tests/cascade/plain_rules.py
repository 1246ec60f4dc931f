"""Every rule beside its formula in docs/theory.md, written down plainly for one position: what the engine must emit.

The formulas share no code with `speccascade.router`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor

from speccascade import rules
from speccascade.cascade.blocks import TargetRule


@dataclass(frozen=True)
class Position:
    """q, p, q° and p° of one position, each ``[V]`` in float64."""

    q: Tensor
    p: Tensor
    q0: Tensor
    p0: Tensor

    @property
    def tv(self) -> float:
        return float((self.p - self.q).abs().sum() / 2)

    @property
    def p0_of_draft(self) -> float:
        """p° of the drafter's favourite."""
        return float(self.p0[self.q0.argmax()])


Formula = Callable[[Position], Tensor]


def entropy(probs: Tensor) -> float:
    return -sum(value * torch.tensor(value).log().item() for value in probs.tolist() if value > 0)


def one_hot(probs: Tensor) -> Tensor:
    return torch.eye(len(probs), dtype=probs.dtype)[probs.argmax()]


def switch(defers: Callable[[Position], bool]) -> Formula:
    """π = p where the rule defers, q elsewhere."""
    return lambda x: x.p if defers(x) else x.q


def move(replaced: Callable[[Position], Tensor], onto: Formula = lambda x: x.p) -> Formula:
    """π = q(1 − r) + η·s, η = Σ r q."""
    return lambda x: torch.where(replaced(x), 0, x.q) + x.q[replaced(x)].sum() * onto(x)


def temper(temperature: float) -> Formula:
    return lambda x: x.p ** (1 / temperature) / (x.p ** (1 / temperature)).sum()


def lossy(alpha: float) -> Formula:
    """max{min{q, p/(1 − α)}, p/β} with the β at which it sums to one."""

    def formula(x: Position) -> Tensor:
        def law(scale: float) -> Tensor:
            return torch.maximum(torch.minimum(x.q, x.p / (1 - alpha)), x.p * scale)

        # The largest scale at which no more than the whole is given out; below it the law may be flat, and sums to 1.
        if float(law(0).sum()) > 1 - 1e-12:
            return law(0)
        return law(brentq(lambda scale: float(law(scale).sum()) - 1, 0, 1.001, xtol=1e-14))

    return formula


def lossy_as_written(alpha: float) -> Formula:
    """β = 1: accept with min(1, p/((1 − α)q)), replace from norm(max(0, p − q))."""

    def formula(x: Position) -> Tensor:
        accepted = torch.minimum(x.q, x.p / (1 - alpha))
        excess = (x.p - x.q).clamp_min(0)
        return accepted + (1 - accepted.sum()) * excess / excess.sum().clamp_min(1e-300)

    return formula


def learned_lossy(alpha: float) -> Formula:
    """max{min{q, P/ν}, P/(ν + α)} with the ν at which it sums to one; P is p° over what q or p may emit, normalised."""

    def formula(x: Position) -> Tensor:
        belief = torch.where((x.q > 0) | (x.p > 0), x.p0, 0)
        belief = belief / belief.sum()

        def law(inner: float) -> Tensor:
            return torch.maximum(torch.minimum(x.q, belief / inner), belief / (inner + alpha))

        return law(brentq(lambda inner: float(law(inner).sum()) - 1, max(1 - alpha, 1e-9), 1.001, xtol=1e-14))

    return formula


def typical(x: Position) -> Tensor:
    return x.p0 <= min(0.3, 0.6 * torch.tensor(-entropy(x.p0)).exp().item())


def below_second(x: Position) -> Tensor:
    return x.p0 < x.p0.topk(2).values[-1]


CASES: dict[str, tuple[TargetRule, Formula]] = {
    "specdecode": (rules.SpecDecode(), switch(lambda x: True)),
    "chow": (rules.Chow(0.4), switch(lambda x: float(x.q0.max()) < 0.6)),
    "chow_log": (rules.ChowLog(0.9), switch(lambda x: entropy(x.q0) > 0.9)),
    "diff": (rules.Diff(0.05), switch(lambda x: float(x.q0.max()) < float(x.p0.max()) - 0.05)),
    "diff_log": (rules.DiffLog(0.07), switch(lambda x: entropy(x.q0) > entropy(x.p0) + 0.07)),
    "opt": (rules.OPT(0.2), switch(lambda x: float(x.q0.max()) < float(x.p0.max()) - 0.2 * x.tv)),
    "opt_log": (rules.OPTLog(0.2), switch(lambda x: entropy(x.q0) > entropy(x.p0) + 0.2 * x.tv)),
    "bild_star": (rules.BiLDStar(1.3), switch(lambda x: -torch.tensor(x.p0_of_draft).log().item() > 1.3)),
    "verifier_gap": (rules.VerifierGap(0.5), switch(lambda x: float(x.p0.max()) - x.p0_of_draft > 0.5 * x.tv)),
    "expected_gain": (rules.ExpectedGain(0.2), switch(lambda x: float((x.p0 * (x.p - x.q)).sum()) > 0.2 * x.tv)),
    "token_v1": (rules.TokenV1(0.2), move(lambda x: x.q0 < x.p0.max() - 0.2)),
    "token_v2": (rules.TokenV2(0.2), move(lambda x: x.p0 < x.p0.max() - 0.2)),
    "token_v3": (rules.TokenV3(0.6), move(lambda x: x.p0 < 0.4 * x.p0.max())),
    "token_v1, hot": (
        rules.TokenV1(0.2, replacement_temperature=2.0),
        move(lambda x: x.q0 < x.p0.max() - 0.2, temper(2.0)),
    ),
    "token_v2, greedy": (
        rules.TokenV2(0.2, replacement_temperature=0),
        move(lambda x: x.p0 < x.p0.max() - 0.2, lambda x: one_hot(x.p)),
    ),
    "token_v3, cold": (
        rules.TokenV3(0.6, replacement_temperature=0.4),
        move(lambda x: x.p0 < 0.4 * x.p0.max(), temper(0.4)),
    ),
    "token_v2, processed": (
        rules.TokenV2(0.2, confidence="processed"),
        move(lambda x: x.p < x.p.max() - 0.2),
    ),
    "greedyward": (rules.Greedyward(0.2), move(lambda x: x.p0 < x.p0.max() - 0.2, lambda x: one_hot(x.p0))),
    "lossy": (rules.Lossy(0.4), lossy(0.4)),
    "lossy, beta=1": (rules.Lossy(0.4, beta=1.0), lossy_as_written(0.4)),
    "learned_lossy": (rules.LearnedLossy(0.4), learned_lossy(0.4)),
    "ensemble": (rules.Ensemble(0.4), lambda x: 0.6 * x.q + 0.4 * x.p),
    "typical": (rules.Typical(0.3, 0.6), move(typical)),
    "top_k": (rules.TopK(2), move(below_second)),
}
