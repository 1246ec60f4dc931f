"""What training learned about single tokens: a correction to log P̂ of every candidate, from its identity.

Each token that training met often has a vector and a bias; a position asks with a query, and the candidate's score
changes by query·vector + bias. It is a small output head beside the models' own: it learns what a text prefers that the
models do not know. Tokens that training met rarely are left as they are. Untrained it changes nothing.

Shapes: ``N`` position, ``C`` normalised column, ``K`` candidate, ``R`` row of the table (0: unknown), ``V`` token.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = ["TokenTable"]

_SPREAD = 0.05
"""Deviation of a vector's numbers before training; the query begins at zero."""


class TokenTable(nn.Module):
    """Vectors and biases of known tokens; how many there are is settled by `set_tokens` or by loaded weights.

    Args:
        columns: C, what the query reads.
        rank: length of a vector.
    """

    rows: Tensor

    def __init__(self, columns: int, rank: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.query = nn.Linear(columns, rank, bias=False)
        nn.init.zeros_(self.query.weight)
        self.vectors = nn.Parameter(torch.zeros(1, rank))
        self.biases = nn.Parameter(torch.zeros(1))
        self.register_buffer("rows", torch.zeros(1, dtype=torch.int32))

    def set_tokens(self, tokens: Int[Tensor, "n"], vocab_size: int, seed: int = 0) -> None:
        """Make a row for each token, with a random vector from the seed.

        Raises:
            ValueError: tokens that are not distinct ids below ``vocab_size``.
        """
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
            raise ValueError(
                f"tokens: expected ids in [0, {vocab_size}), got {int(tokens.min())} to {int(tokens.max())}"
            )
        if len(tokens.unique()) < len(tokens):
            raise ValueError("tokens: expected each once, got one twice")
        noise = torch.randn(len(tokens), self.vectors.shape[1], generator=torch.Generator().manual_seed(seed))
        self.vectors = nn.Parameter(torch.cat([torch.zeros(1, noise.shape[1]), _SPREAD * noise]))
        self.biases = nn.Parameter(torch.zeros(len(tokens) + 1))
        self.rows = torch.zeros(vocab_size, dtype=torch.int32)
        self.rows[tokens] = torch.arange(1, len(tokens) + 1, dtype=torch.int32)

    def forward(self, columns: Float[Tensor, "N C"], tokens: Int[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        """Return by how much each candidate's score changes; 0 for unknown tokens, ids beyond the table among them."""
        known = tokens < len(self.rows)
        rows = torch.where(known, self.rows[torch.where(known, tokens, 0)].long(), 0)
        matches = (self.vectors[rows] * self.query(self.dropout(columns)).unsqueeze(1)).sum(dim=-1) + self.biases[rows]
        return torch.where(rows > 0, matches, 0.0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Take on the sizes of what is loaded, if they fit each other."""
        loaded = [state_dict.get(prefix + name) for name in ("vectors", "biases", "rows")]
        if all(values is not None for values in loaded):
            _check_table(self.vectors.shape[1], *loaded)
        for name in ("vectors", "biases"):
            if prefix + name in state_dict:
                setattr(self, name, nn.Parameter(torch.empty_like(state_dict[prefix + name])))
        if prefix + "rows" in state_dict:
            self.rows = torch.empty_like(state_dict[prefix + "rows"])
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _check_table(rank: int, vectors: Tensor, biases: Tensor, rows: Tensor) -> None:
    """Refuse a table whose rows lead outside it, or whose parts are of different sizes."""
    count = len(biases) if biases.dim() == 1 else 0
    if not count or vectors.shape != (count, rank):
        shapes = f"{list(vectors.shape)} and {list(biases.shape)}"
        raise ValueError(f"token table: expected vectors [R, {rank}] and biases [R], got {shapes}")
    if rows.dim() != 1 or rows.is_floating_point() or not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= count:
        raise ValueError(f"token table: expected a row in [0, {count}) for each token, got another")
