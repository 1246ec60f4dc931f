"""Which directions of a model's hidden state are worth reading: principal components, each of unit variance.

Knows no head and no file. Shapes: ``N`` position, ``H`` hidden state.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["principal_directions"]


def principal_directions(states: Float[Tensor, "N H"], rank: int, seed: int = 0) -> Float[Tensor, "H rank"]:
    """Find the directions along which states vary most, scaled so that they vary by one along each.

    Args:
        states: centred, NaN nowhere.
        rank: how many; at most N and H.
        seed: of the randomised search.

    Raises:
        ValueError: more directions than positions.
    """
    from sklearn.decomposition import PCA  # slow to import, and not needed by heads without hidden states

    if rank > min(states.shape):
        raise ValueError(f"rank: expected at most {min(states.shape)} for states {list(states.shape)}, got {rank}")
    found = PCA(rank, svd_solver="randomized", random_state=seed).fit(states.cpu().numpy())
    scale = torch.from_numpy(found.explained_variance_).clamp_min(1e-12).sqrt()
    return (torch.from_numpy(found.components_).T / scale).float()
