"""The basis in which keys are sketched: the directions in which their scores differ most, coarsely quantised.

Let `Σ` be the second moment of a KV head's queries, `L Lᵀ = Σ`, and `V` the first eigenvectors of `Lᵀ cov(k) L`. A
score is `q·k = (q L⁻ᵀ)·(k L)`: the queries are white, and the keys' variances say how much each direction matters. A
key's code is `k L V` over a step a channel, a query's side `q L⁻ᵀ V` times the step. Where codes are of another basis
than the request's, a query's side is the one that is nearest to its scores, by least squares. This project's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import Sketch, decode_codes
from sparsekv.kernels.codes import largest
from sparsekv.util.errors import SparseKVError

RIDGE = 0.05
"""Share of the queries' mean variance that is added to every direction: few queries leave most of them out."""
CLIP_4, CLIP_8 = 3.0, 6.0
"""How many standard deviations of a channel the largest code of 4 and of 8 bits stands for."""

FLOOR, PLAIN, SQUARED = 1e-3, 2, 5
"""What is added to a covariance, over its mean variance, so that no direction vanishes; and how often the basis is
multiplied by it and then by its square, which ends within 1 % of the eigenvectors' error."""

LEAST = 1e-4
"""Share of the codes' mean variance that is added to each when the queries' side is fitted to them."""
BLOCK = 8192


def code_size(width: int | None, wide: int | None, dim: int) -> tuple[int, int]:
    """Bytes of a key's code and how many of its channels have 8 bits: a quarter of the head dimension, and an eighth of
    the bytes, by default."""
    width = max(1, dim // 4) if width is None else width
    return width, width // 8 if wide is None or not width else wide


def check_sketch(width: int, wide: int, dim: int) -> None:
    """Refuse a code of `width` bytes with `wide` channels of 8 bits that cannot be. Raises SparseKVError."""
    if not 0 <= wide <= width:
        raise SparseKVError(f"a sketch of {width} bytes has {wide} channels of 8 bits; expected 0 to {width}, a byte "
                            "each")
    if not 1 <= 2 * width - wide <= dim:
        raise SparseKVError(f"a sketch of {width} bytes with {wide} channels of 8 bits has {2 * width - wide} "
                            f"channels; expected 1 to {dim}, the head dimension; use other bytes")


def second_moment(queries: Tensor, heads_kv: int, used: Tensor | None = None) -> Tensor:
    """Mean of `q qᵀ` over the queries of every group, `[B, Hkv, d, d]` float32 at least: queries `[B, Hq, T, d]`, used
    `[B, T]`; zero where there are none."""
    batch, heads_q, count, _ = queries.shape
    kind = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(kind).unflatten(1, (heads_kv, -1))
    if used is not None:
        grouped = torch.where(used[:, None, None, :, None], grouped, 0.0)
    number = torch.full((batch,), float(count), dtype=kind, device=queries.device) if used is None else used.sum(-1)
    rows = grouped.flatten(2, 3)
    return rows.mT @ rows / (number.clamp(min=1) * (heads_q // heads_kv))[:, None, None, None]


def fit_sketch(moment: Tensor, mean: Tensor, covariance: Tensor, width: int, wide: int) -> Sketch:
    """Fit the sketch of keys to the queries that will meet them (this project's own).

    Queries that are all alike, or zero, and keys that are leave a sound basis: directions that nothing is known of
    count alike.

    Args:
        moment: second moment of the queries, `[..., Hkv, d, d]`.
        mean, covariance: of the keys, `[..., Hkv, d]` and `[..., Hkv, d, d]`.
        width: of a code [bytes].
        wide: the first channels, which have 8 bits; the others have 4.

    Raises:
        SparseKVError: a code that cannot be.
    """
    dim, rank = moment.shape[-1], 2 * width - wide
    check_sketch(width, wide, dim)
    kind = torch.promote_types(moment.dtype, torch.float32)
    eye, tiny = torch.eye(dim, dtype=kind, device=moment.device), torch.finfo(kind).tiny
    moment, covariance, mean = (x.to(kind) for x in (moment, covariance, mean))
    # of a size that float32 can factor, whatever the queries' is
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    factor, failed = torch.linalg.cholesky_ex(moment / size.clamp(min=tiny) + RIDGE * eye)
    factor = torch.where((failed > 0)[..., None, None], eye, factor)
    variance, vectors = principal(factor.mT @ covariance @ factor, rank)
    # a channel in which keys do not differ has nothing to tell
    least = torch.where(variance[..., :1] > 0, 1e-6 * variance[..., :1], 1.0)
    clip = torch.where(torch.arange(rank, device=moment.device) < wide, CLIP_8, CLIP_4)
    step = (clip / largest(rank, width, moment.device) * torch.maximum(variance, least).sqrt())[..., None, :]
    keys = factor @ vectors / step
    queries = torch.linalg.solve_triangular(factor.mT, vectors, upper=True) * step
    return Sketch(keys.contiguous(), (mean[..., None, :] @ keys).squeeze(-2), queries.contiguous())


def principal(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest variances `[..., r]`, falling, and their directions `[..., d, r]`, orthonormal, of covariances
    `[..., d, d]`: nearly the first eigenvectors, by orthogonal iteration (Golub and Van Loan, Matrix Computations, 8.2)
    from the axes of the largest variances, in float64, which bears a Cholesky factor of the squares. Directions of
    nearly equal variance may stay mixed, which costs a code nothing. All matrices at once: solvers on a GPU take the
    eigenvectors of one after the other."""
    wide = covariance.double()
    axes = wide.diagonal(dim1=-2, dim2=-1)
    size = axes.mean(-1)[..., None, None].clamp(min=torch.finfo(torch.float32).tiny)
    matrix = wide / size + FLOOR * torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    first = axes.argsort(-1, descending=True)[..., :rank]
    basis = torch.zeros_like(wide[..., :rank]).scatter_(-2, first[..., None, :], 1.0)
    for power in (matrix,) * PLAIN + (matrix @ matrix,) * SQUARED:
        grown = torch.nn.functional.normalize(power @ basis, dim=-2)
        basis = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(grown.mT @ grown).L.mT, grown, upper=True,
                                              left=False)
    variance, order = (basis * (wide @ basis)).sum(-2).sort(-1, descending=True)
    vectors = basis.gather(-1, order[..., None, :].expand_as(basis))
    return variance.to(covariance.dtype), vectors.to(covariance.dtype)


def fit_queries(sketch: Sketch, codes: Tensor, keys: Tensor, used: Tensor) -> Tensor:
    """Fit the queries' side to codes that are there: the linear map from codes to keys with the least squared error on
    these keys, which is the best for every query alike.

    Args:
        sketch: of the codes; its own side is kept where no two keys differ.
        codes: `[B, Hkv, N, w]`.
        keys: `[B, Hkv, N, d]`.
        used: `[B, N]` bool.

    Returns:
        `[B, Hkv, d, r]`.
    """
    kind = torch.promote_types(keys.dtype, torch.float32)
    rank, dim = sketch.rank, keys.shape[-1]
    number = used.sum(-1).clamp(min=1)[:, None, None, None].to(kind)
    sums = torch.zeros(*keys.shape[:2], 1 + rank, rank + dim, dtype=kind, device=keys.device)
    for first in range(0, keys.shape[2], BLOCK):
        part = slice(first, first + BLOCK)
        inside = used[:, None, part, None]
        numbers = torch.where(inside, decode_codes(codes[:, :, part], rank), 0).to(kind)
        both = torch.cat([numbers, torch.where(inside, keys[:, :, part], 0).to(kind)], dim=-1)
        sums += torch.cat([inside.to(kind).expand(*both.shape[:-1], 1), numbers], dim=-1).mT @ both
    means = sums[:, :, :1] / number
    sums = sums[:, :, 1:] / number - means[..., :rank].mT @ means
    square, cross = sums.split([rank, dim], dim=-1)
    size = square.diagonal(dim1=-2, dim2=-1)
    # a code that never changes says nothing, and keeps the side it had
    still = size <= 1e-6
    square = torch.where((still[..., None] | still[..., None, :]), 0.0, square)
    square = square + torch.diag_embed(torch.where(still, 1.0, LEAST * size.mean(-1, keepdim=True)))
    cross = torch.where(still[..., None], sketch.queries.to(kind).mT.expand_as(cross), cross)
    # what was added to the square lets it be solved: nobody waits to learn whether it was
    return torch.linalg.solve_ex(square, cross).result.mT.contiguous()
