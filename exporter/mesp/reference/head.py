from __future__ import annotations

import mlx.core as mx

from mesp.models.architecture import Architecture
from mesp.reference.model import Weights, dequantize
from mesp.reference.pieces import rms_norm, rms_norm_backward, soft_cap, soft_cap_backward


def cross_entropy(
    x: mx.array,
    targets: mx.array,
    head: Weights,
    arch: Architecture,
    weights: mx.array | None = None,
) -> mx.array:
    """Returns ℒ = Σ_t w_t (logsumexp(z_t) - z_t[target_t]), with z = cap(RMSNorm(x) Wᵀ).

    x [1, T, hidden] is the last block's output. targets [T] are int. weights w [T] are 1 / T by
    default. ℒ [] is in nats, and with the default weights in nats per token.
    """
    z = logits(x, head, arch)
    z_target = mx.take_along_axis(z, targets[None, :, None], axis=-1)[..., 0]
    losses = mx.logsumexp(z, axis=-1) - z_target
    return mx.mean(losses) if weights is None else mx.sum(weights * losses)


def cross_entropy_backward(
    x: mx.array,
    targets: mx.array,
    head: Weights,
    arch: Architecture,
    weights: mx.array | None = None,
) -> mx.array:
    """Returns dx. W is frozen. w_t is 1 / T by default.

    dz = w ∘ cap'(z) ∘ (softmax(z) - onehot(target))
    d_normed = dz W        dx = rms_norm_backward(x, d_normed)
    """
    z = logits(x, head, arch)
    onehot = mx.arange(z.shape[-1]) == targets[:, None]
    dz = mx.softmax(z, axis=-1) - onehot
    dz = dz / targets.size if weights is None else weights[:, None] * dz
    d_normed = soft_cap_backward(z, dz, arch.final_logit_softcapping) @ _matrix(head, x)
    return rms_norm_backward(x, d_normed, head["norm"].astype(mx.float32), arch.rms_norm_eps)


def logits(x: mx.array, head: Weights, arch: Architecture) -> mx.array:
    """Returns z [1, T, vocab_size] = cap(RMSNorm(x) Wᵀ) of x [1, T, hidden]."""
    normed = rms_norm(x, head["norm"].astype(mx.float32), arch.rms_norm_eps)
    return soft_cap(normed @ _matrix(head, x).T, arch.final_logit_softcapping)


def _matrix(head: Weights, x: mx.array) -> mx.array:
    return dequantize(head, "", x.shape[-1])
