"""A trained router that reads order, in the engine: the law of what it emits, wherever blocks began."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from speccascade.cascade import ModelDrafter, SpeculativeCascade, VerifyBlock
from speccascade.cascade.engine import Round
from speccascade.router.bundle import Bundle
from speccascade.router.config import RouterConfig
from speccascade.router.features import build_features
from speccascade.router.heads import make_head
from speccascade.router.learned import LearnedRouter, _GapMemory
from speccascade.router.runtime import TorchHead

from .conftest import Check, TableLM

CONTEXT = 3
PROMPT = [1, 3, 2]


def router_of(drafter: TableLM, verifier: TableLM) -> LearnedRouter:
    """Random weights, normalised on the two tables, each loss as likely to defer as not."""
    head = make_head("attention", "gap", "verified", (16, 16), context=CONTEXT)
    generator = torch.Generator().manual_seed(3)
    q, p = (model.table.flatten(end_dim=1).softmax(dim=-1).unsqueeze(1) for model in (drafter, verifier))
    features = build_features(VerifyBlock.from_probs(q, p).stats, "verified")
    with torch.no_grad():
        for values in head.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.5)
        head.set_normalisation(features.flatten(end_dim=1).mean(dim=0), features.flatten(end_dim=1).std(dim=0))
        head.trunk.last.bias -= head._outputs(features).mean(dim=(0, 1))  # type: ignore[union-attr,operator]
    config = replace(RouterConfig("q", "p", "f" * 64, "d" * 64, 0.0), **vars(head.spec))
    return LearnedRouter(Bundle(config, {}), _GapMemory(TorchHead(head), "verified", reads_order=True), alpha=0.05)


def sides(drafter: TableLM, verifier: TableLM, prefixes: Sequence[list[int]]) -> VerifyBlock:
    """One sequence [1, T, V]: both models after each prefix."""
    q, p = (
        torch.stack([model.logits_after(prefix) for prefix in prefixes]).softmax(dim=-1).unsqueeze(0)
        for model in (drafter, verifier)
    )
    return VerifyBlock.from_probs(q, p)


def test_sequences_follow_the_target_of_the_whole_prefix(check_follows: Check) -> None:
    drafter, verifier, draws, length = TableLM(1, 4), TableLM(2, 4), 4000, 4
    rule = router_of(drafter, verifier)
    cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rule, gamma=2, bonus="target")
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, draws, 200):
        out = cascade.generate(torch.tensor([PROMPT]).expand(200, -1), max_new_tokens=length, seed=seed, temperature=1)
        counts.update(tuple(row) for row in out.sequences[:, 3:].tolist())
    law, alone, decisions = dict[tuple[int, ...], float](), set[bool](), set[tuple[bool, ...]]()
    for sequence in product(range(4), repeat=length):
        prefixes = [[*PROMPT, *sequence[:place]] for place in range(length)]
        block = sides(drafter, verifier, prefixes)
        pi = rule.target(block)[0]
        law[sequence] = float(pi[torch.arange(length), torch.tensor(sequence)].prod())
        last = sides(drafter, verifier, prefixes[-1:])
        alone.add(bool(rule.defer_mask(last)[0, 0] != rule.defer_mask(block)[0, -1]))
        decisions.add(tuple(rule.defer_mask(block)[0].tolist()))
    assert len(decisions) > 3 and True in alone, "what came before must matter"
    check_follows(counts, law, draws)


class Gaps:
    """Collects the gap of every position that was kept."""

    def __init__(self, rule: LearnedRouter) -> None:
        self.rule, self.at = rule, dict[int, tuple[Tensor, bool]]()

    def observe(self, round_: Round, rows: Sequence[int], kept: Sequence[int]) -> None:
        block = round_.block
        assert block.memory is not None
        gap = self.rule.gap(block.stats, block.memory)
        for place in range(min(round_.accepted[0] + 1, round_.lengths[0])):
            whole = not block.memory[0, place : place + CONTEXT, 0].isnan().any()
            self.at[int(block.positions[0, place])] = gap[0, place], whole


@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_gaps_do_not_depend_on_where_blocks_began(bonus: Any) -> None:
    """At α so low that all is deferred the tokens are the verifier's own, whatever γ is."""
    drafter, verifier, seen = TableLM(1, 16, spread=2.5), TableLM(2, 16), list[Gaps]()
    verifier.table = drafter.table + 0.8 * verifier.table
    # The 0-1 gap is 0 wherever the two agree; the other one has something to say at every position.
    rule = replace(router_of(drafter, verifier), alpha=-1000.0, loss="sampled")
    outs = list[Tensor]()
    for gamma in (2, 5):
        seen.append(Gaps(rule))
        cascade = SpeculativeCascade(ModelDrafter(drafter), verifier, rule, gamma, bonus, observer=seen[-1])
        outs.append(cascade.generate(torch.tensor([PROMPT]), max_new_tokens=50, temperature=0.0).sequences)
    assert torch.equal(*outs)
    common = sorted(place for place in seen[0].at.keys() & seen[1].at.keys() if place >= 3 + CONTEXT)
    compared = [place for place in common if seen[0].at[place][1] and seen[1].at[place][1]]
    assert len(compared) > 5 and (bonus == "verifier" or compared == common)
    for place in compared:
        torch.testing.assert_close(seen[0].at[place][0], seen[1].at[place][0], rtol=0, atol=1e-6)
    assert len({round(float(seen[0].at[place][0]), 4) for place in compared}) > 3
