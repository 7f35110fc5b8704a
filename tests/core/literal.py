"""A step of sparse decoding written out: dense weights over every token, in float64, one query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsekv.core.estimators import CentroidEstimator, Estimator, PhiEstimator, UniformEstimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.selectors import Selector
from sparsekv.core.step import Step
from sparsekv.kernels import log_phi, log_phi_key


def literal_step(
    view: LayerView, queries: Queries, step: Step, selector: Selector, estimator: Estimator | None,
) -> Tensor:
    """What the step should have given for the tokens it read: `[B, Hq, T, d]`."""
    rot, keys, values = (x.detach().double().cpu() for x in (queries.rot, view.keys, view.values))
    keys, values = (x.repeat_interleave(view.group, dim=1) for x in (keys, values))
    batch, heads, count, _ = rot.shape
    tokens = step.selection.as_tokens().cpu().long()
    tokens = tokens.repeat_interleave(heads // tokens.shape[1], dim=1)
    log_weights = step.selection.log_weights
    out = torch.zeros_like(rot)
    for row in range(batch * count):
        b, t = divmod(row, count)
        first, last, start, length = (int(x) for x in (
            view.regions.mid_first[b], view.regions.mid_last[b], view.regions.starts[b], queries.lengths[row]))
        listed = torch.zeros(heads, keys.shape[2] + 1)
        listed.scatter_add_(1, tokens[row] % (keys.shape[2] + 1), torch.ones(tokens[row].shape))
        listed = listed[:, :-1]  # -1 was counted in the last column
        assert float(listed.max()) <= 1, "a token is read twice"
        read = listed > 0
        assert not read[:, :first].any() and not read[:, last:].any(), "a token outside the mid region is read"
        exact = read.clone()
        exact[:, start:min(first, length)] = exact[:, last:length] = True
        scores = torch.einsum("hnd,hd->hn", keys[b], rot[b, :, t]) * view.scale
        if log_weights is not None:
            extra = log_weights[row].double().cpu()
            scores = scores.scatter_add(1, tokens[row].clamp(min=0), torch.where(tokens[row] >= 0, extra, 0.0))
        logits = scores.masked_fill(~exact, -math.inf)
        rest = torch.zeros_like(exact)
        rest[:, first:last] = True
        rest &= ~exact
        vectors = values[b]
        if isinstance(estimator, PhiEstimator):
            logits = torch.where(rest, phi_logits(view, estimator, b, rot[b, :, t], keys[b], rest), logits)
        elif isinstance(estimator, CentroidEstimator):
            logits = torch.where(rest, centroid_logits(view, estimator, b, rot[b, :, t], rest), logits)
        elif isinstance(estimator, UniformEstimator):
            drawn = estimator.drawn(view, queries)[row].cpu().repeat_interleave(view.group, dim=0)
            times = torch.zeros_like(scores).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=scores.dtype)) * rest
            stands = times * rest.sum(1, keepdim=True) / times.sum(1, keepdim=True).clamp(min=1)
            plain = torch.einsum("hnd,hd->hn", keys[b], rot[b, :, t]) * view.scale
            logits = torch.where(rest, plain + stands.log(), logits)
        elif (own := step.selection.rest) is not None:
            logits = torch.cat([logits, own[1][row, :, None].double().cpu()], 1)
            vectors = torch.cat([vectors, own[0][row, :, None].double().cpu()], 1)
        out[b, :, t] = torch.einsum("hn,hnd->hd", logits.softmax(-1), vectors)
    return out


def phi_logits(
    view: LayerView, estimator: PhiEstimator, b: int, q: Tensor, keys: Tensor, rest: Tensor,
) -> Tensor:
    """Log weights of the unread mid keys, `[Hq, N]` (completion paper §4, with this project's centre and cap): q
    `[Hq, d]`, keys `[Hq, N, d]`."""
    maps = estimator.layer

    def double(weights, repeats=1):
        return type(weights)(*(w.detach().double().cpu().repeat_interleave(repeats, dim=0) for w in weights))

    log_q = log_phi(q[:, None], double(maps.maps.query))[:, 0]
    log_k = log_phi_key(keys, double(maps.maps.key, view.group))
    if maps.centred:
        centre = estimator.centre[b].double().cpu().repeat_interleave(view.group, dim=0)
        more = log_phi_key(keys - centre[:, None], double(maps.maps.centred, view.group))
        log_k = log_k + more if maps.maps.shared else torch.cat([log_k, more], dim=-1)
        half = log_q.shape[-1] // 2
        log_q = torch.cat([log_q[:, :half], log_q[:, half:] + (q * centre).sum(-1, keepdim=True) * view.scale], dim=-1)
    offset = (maps.offset if maps.offset.dim() == 1 else maps.offset[b]).double().cpu()[:, None]
    logs = (torch.logsumexp(log_q[:, None] + log_k, dim=-1) + offset).masked_fill(~rest, -math.inf)
    if maps.capped and (estimator.share if isinstance(estimator.share, float) else estimator.share[b]) > 0:
        mid = slice(int(view.regions.mid_first[b]), int(view.regions.mid_last[b]))
        scores = torch.einsum("hnd,hd->hn", keys[:, mid], q) * view.scale
        bound = estimator.state.moments.bound[b].double().cpu()
        mean, deviation = scores.mean(1, keepdim=True), scores.std(1, unbiased=False, keepdim=True)
        below = torch.distributions.Normal(0.0, 1.0).cdf(bound - deviation).log()
        cap = math.log(scores.shape[1]) + mean + deviation**2 / 2 + below + offset
        logs = logs - (logs.logsumexp(1, keepdim=True) - cap).clamp(min=0).nan_to_num(0.0)
    return logs


def centroid_logits(
    view: LayerView, estimator: CentroidEstimator, b: int, q: Tensor, rest: Tensor,
) -> Tensor:
    """Log weights of the unread mid keys, `[Hq, N]`: the score of the mean of a key's bucket."""
    number = estimator.number[b].cpu().long()
    sums = [torch.zeros(number.shape[0], estimator.num_buckets, width, dtype=torch.float64)
            for width in (1, q.shape[1])]
    mid = slice(int(view.regions.mid_first[b]), int(view.regions.mid_last[b]))
    for head in range(number.shape[0]):
        keys = view.keys[b, head].double().cpu()[mid]
        sums[0][head].index_add_(0, number[head, mid], torch.ones(len(keys), 1, dtype=torch.float64))
        sums[1][head].index_add_(0, number[head, mid], keys)
    means = (sums[1] / sums[0].clamp(min=1)).to(view.dtype).double().repeat_interleave(view.group, dim=0)
    logits = torch.einsum("hcd,hd->hc", means, q) * view.scale
    logits = logits.gather(1, number.repeat_interleave(view.group, dim=0))
    logits = torch.nn.functional.pad(logits, (0, rest.shape[1] - logits.shape[1]), value=-math.inf)
    return logits.masked_fill(~rest, -math.inf)
