from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mesp.models.mlps import MLP, Experts
from mesp.reference.dropout import Masks
from mesp.reference.model import Matrices, Weights, dequantize
from mesp.reference.pieces import Projection, gated, gated_backward, linear, linear_backward

# The ε that is added to the sum of the scores before the division by it. LFM2 adds 1e-6, because a
# sum of sigmoids may be 0.
EPSILON = {"sigmoid": 1e-6, "softmax": 0.0}


def choose(z: mx.array, bias: mx.array | None, experts: Experts) -> mx.array:
    """Returns the k experts with the highest p + bias for each token, int [T, k].

    z [T, E] is the router's output. p is sigmoid(z) or, for a softmax, z. Of experts with equal
    values, the first is chosen. The choice has no gradient.
    """
    p = mx.sigmoid(z) if experts.scores == "sigmoid" else z
    p = p if bias is None else p + bias
    return mx.stop_gradient(mx.argsort(-p, axis=-1)[:, : experts.num_experts_per_tok])


def weigh(z: mx.array, experts: Experts) -> tuple[mx.array, mx.array, mx.array]:
    """Returns w = c p / (Σ p + ε) [T, k], p [T, k], and Σ p + ε [T, 1].

    z [T, k] is the router's output for the chosen experts, and c is the scaling. p is sigmoid(z)
    or, for a softmax, exp(z - max z).
    """
    highest = mx.stop_gradient(mx.max(z, axis=-1, keepdims=True))
    p = mx.sigmoid(z) if experts.scores == "sigmoid" else mx.exp(z - highest)
    total = mx.sum(p, axis=-1, keepdims=True) + EPSILON[experts.scores]
    return experts.scaling * p / total, p, total


def weigh_backward(z: mx.array, dw: mx.array, experts: Experts) -> mx.array:
    """Returns dz = dp ∘ p',   dp = (c dw - Σ w dw) / (Σ p + ε).

    p' is p (1 - p) for a sigmoid, and p for exp.
    """
    w, p, total = weigh(z, experts)
    dp = (experts.scaling * dw - mx.sum(w * dw, axis=-1, keepdims=True)) / total
    return dp * p * (1 - p) if experts.scores == "sigmoid" else dp * p


class Mixture(NamedTuple):
    """The operands of a mixture of experts.

    `lora` has A [experts, in, rank] and B [experts, rank, out] of each stacked matrix. It is empty
    if the experts are frozen. With dropout, `masks` has M [experts, T, in] of each stacked matrix.
    """

    experts: Experts
    hidden_act: str
    weights: Weights
    lora: Matrices
    scale: float
    masks: Masks | None = None

    def router(self, hidden: int) -> mx.array:
        """Returns R [experts, hidden]."""
        return dequantize(self.weights, f"{self.experts.router}.", hidden)

    def projections(self, e: int, tokens: mx.array, hidden: int) -> list[Projection]:
        """Returns gate, up and down of expert e. The adapters of a frozen expert are 0."""
        found = []
        for name, (rows, columns) in self.experts.stacked(hidden).items():
            prefix = f"{name}."
            own = {part: a[e] for part, a in self.weights.items() if part.startswith(prefix)}
            A, B = mx.zeros((columns, 1)), mx.zeros((1, rows))
            if name in self.lora:
                A, B = (matrix[e] for matrix in self.lora[name])
            M = self.masks[name][e, tokens] if self.masks and name in self.masks else None
            W = dequantize(own, prefix, columns)
            found.append(Projection(W, None, A, B, self.scale, M=M))
        return found

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the experts of each token and their weights, both [T, k]."""
        z, bias = x @ self.router(x.shape[-1]).T, self.experts.bias
        bias = None if bias is None else self.weights[bias].astype(mx.float32)
        chosen = choose(z, bias, self.experts)
        w, _, _ = weigh(mx.take_along_axis(z, chosen, axis=-1), self.experts)
        return chosen, w


def mix_by_experts(x: mx.array, mixture: Mixture) -> mx.array:
    """Returns y = Σ w_e down_e(act(gate_e(x)) ∘ up_e(x)), summed over each token's experts.

    x, y [1, T, hidden]. Each expert computes only the tokens that chose it.
    """
    x = x[0]
    chosen, w = mixture.route(x)
    y = mx.zeros(x.shape)
    for e, rows, slots in _by_expert(chosen, mixture.experts):
        gate, up, down = mixture.projections(e, rows, x.shape[-1])
        g, u = linear(x[rows], gate), linear(x[rows], up)
        out = linear(gated(g, u, mixture.hidden_act), down)
        y = y.at[rows].add(w[rows, slots][:, None] * out)
    return y[None]


def mix_by_experts_backward(
    x: mx.array, dy: mx.array, mixture: Mixture
) -> tuple[mx.array, Matrices]:
    """Returns dx and the gradients of `lora`.

    For each expert, X are the rows of its tokens, H = act(gate(X)) ∘ up(X), and dY is the gradient
    of y in these rows. Q is the input gradient of down for the output gradient dY.

        dw = rowsum(Q ∘ H)        dH = w ∘ Q        dX = input gradients of gate and up
        dx += dX        dx += dz R for the router's matrix R

    The gradient of an expert without tokens is 0.
    """
    x, dy = x[0], dy[0]
    experts, lora, hidden = mixture.experts, mixture.lora, x.shape[-1]
    chosen, w = mixture.route(x)
    dx, dw = mx.zeros(x.shape), mx.zeros(w.shape)
    grad = {name: (mx.zeros(A.shape), mx.zeros(B.shape)) for name, (A, B) in lora.items()}
    for e, rows, slots in _by_expert(chosen, experts):
        gate, up, down = mixture.projections(e, rows, hidden)
        g, u = linear(x[rows], gate), linear(x[rows], up)
        h, w_e = gated(g, u, mixture.hidden_act), w[rows, slots][:, None]
        q, *_ = linear_backward(h, dy[rows], down)
        dw = dw.at[rows, slots].add(mx.sum(q * h, axis=-1))
        dh, *d_down = linear_backward(h, w_e * dy[rows], down)
        dg, du = gated_backward(g, u, dh, mixture.hidden_act)
        dx_g, *d_gate = linear_backward(x[rows], dg, gate)
        dx_u, *d_up = linear_backward(x[rows], du, up)
        dx = dx.at[rows].add(dx_g + dx_u)
        of_expert = zip(experts.stacked(hidden), (d_gate, d_up, d_down), strict=True)
        for name, (dA, dB) in of_expert if lora else ():
            all_dA, all_dB = grad[name]
            grad[name] = all_dA.at[e].add(dA), all_dB.at[e].add(dB)
    router = mixture.router(hidden)
    z = mx.take_along_axis(x @ router.T, chosen, axis=-1)
    dz = mx.zeros((x.shape[0], experts.num_experts))
    dz = mx.put_along_axis(dz, chosen, weigh_backward(z, dw, experts), axis=-1)
    return (dx + dz @ router)[None], grad


def weigh_mlp(x: mx.array, out: mx.array, weights: Weights, mlp: MLP) -> mx.array:
    """Returns y = w ∘ out [1, T, hidden], with w = sigmoid(x gᵀ), or y = out if the MLP has
    no g.
    """
    g = _mlp_gate(weights, mlp, x.shape[-1])
    return out if g is None else mx.sigmoid(x @ g.T) * out


def weigh_mlp_backward(
    x: mx.array, out: mx.array, dy: mx.array, weights: Weights, mlp: MLP
) -> tuple[mx.array, mx.array]:
    """Returns d_out = w ∘ dy and dx = w (1 - w) rowsum(dy ∘ out) g. If the MLP has no g, returns dy
    and zeros.
    """
    g = _mlp_gate(weights, mlp, x.shape[-1])
    if g is None:
        return dy, mx.zeros(x.shape)
    w = mx.sigmoid(x @ g.T)
    dw = mx.sum(dy * out, axis=-1, keepdims=True)
    return w * dy, (w * (1 - w) * dw) @ g


def _mlp_gate(weights: Weights, mlp: MLP, hidden: int) -> mx.array | None:
    """Returns g [1, hidden] as float32, or None if the MLP has no g."""
    name = mlp.experts and mlp.experts.mlp_gate
    return dequantize(weights, f"{name}.", hidden) if name else None


def _by_expert(chosen: mx.array, experts: Experts) -> list[tuple[int, mx.array, mx.array]]:
    found = []
    for e in range(experts.num_experts):
        rows, slots = np.nonzero(np.array(chosen) == e)
        if rows.size:
            found.append((e, mx.array(rows), mx.array(slots)))
    return found
