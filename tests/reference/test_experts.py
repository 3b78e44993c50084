"""The mixture of experts alone: its router, ties, and experts that no token chose."""

from dataclasses import replace

import mlx.core as mx
import pytest

from helpers.derivatives import assert_close, normal
from mesp.models.families import SEPARATE_MLP
from mesp.models.mlps import MLP, Experts
from mesp.reference.experts import (
    choose,
    mix_by_experts,
    mix_by_experts_backward,
    weigh,
    weigh_backward,
    weigh_mlp,
    weigh_mlp_backward,
)
from mesp.reference.model import dequantize

HIDDEN, WIDTH, COUNT, TOP = 64, 32, 6, 2
KINDS = {
    "softmax": Experts("gate", "experts", "softmax", None, COUNT, TOP, WIDTH),
    "sigmoid": Experts("gate", "experts", "sigmoid", "bias", COUNT, TOP, WIDTH, 1.5),
}


@pytest.fixture(params=KINDS)
def experts(request) -> Experts:
    return KINDS[request.param]


def weights_of(experts: Experts) -> dict[str, mx.array]:
    """Random ones, quantized."""
    arrays = {} if experts.bias is None else {experts.bias: 0.3 * normal(COUNT)}
    shapes = {name: (COUNT, *shape) for name, shape in experts.stacked(HIDDEN).items()}
    for name, shape in (shapes | {experts.router: (COUNT, HIDDEN)}).items():
        quantized = mx.quantize(normal(*shape) * shape[-1] ** -0.5, 32, 8)
        parts = zip(("weight", "scales", "biases"), quantized, strict=True)
        arrays |= {f"{name}.{part}": array for part, array in parts}
    return arrays


def test_the_gradient_of_the_weights(experts):
    z, dw = normal(5, TOP), normal(5, TOP)
    expected = mx.grad(lambda z: (weigh(z, experts)[0] * dw).sum())(z)
    assert_close("dz", weigh_backward(z, dw, experts), expected)


def test_of_equal_scores_the_first_experts_are_chosen(experts):
    bias = None if experts.bias is None else mx.zeros(COUNT)
    z = mx.array([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0], [0.0] * COUNT])
    assert choose(z, bias, experts).tolist() == [[1, 2], [0, 1]]


def test_the_bias_chooses_and_weighs_nothing():
    experts = KINDS["sigmoid"]
    z, bias = mx.zeros((1, COUNT)), mx.array([0.0, 0, 0, 0, 1, 2])
    assert choose(z, bias, experts).tolist() == [[5, 4]]
    w, _, _ = weigh(z[:, :TOP], experts)
    assert w.tolist()[0] == pytest.approx([0.75, 0.75], rel=1e-5)


@pytest.mark.parametrize("T", [1, 3, 40])
def test_the_gradient_of_a_mixture(experts, T):
    weights, x, dy = weights_of(experts), normal(1, T, HIDDEN), normal(1, T, HIDDEN)

    def loss(x):
        return (mix_by_experts(x, weights, experts, "silu") * dy).sum()

    actual = mix_by_experts_backward(x, dy, weights, experts, "silu")
    assert_close("dx", actual, mx.grad(loss)(x))


@pytest.mark.parametrize("T", [1, 9])
def test_the_gradient_of_an_mlp_that_the_token_weighs(T):
    mlp = MLP(SEPARATE_MLP, WIDTH, replace(KINDS["softmax"], mlp_gate="g"))
    arrays = mx.quantize(normal(1, HIDDEN), 32, 8)
    weights = dict(zip(("g.weight", "g.scales", "g.biases"), arrays, strict=True))
    x, out, dy = (normal(1, T, HIDDEN) for _ in range(3))

    def loss(x, out):
        return (weigh_mlp(x, out, weights, mlp) * dy).sum()

    dx, d_out = mx.grad(loss, argnums=(0, 1))(x, out)
    actual = weigh_mlp_backward(x, out, dy, weights, mlp)
    assert_close("d_out", actual[0], d_out)
    assert_close("dx", actual[1], dx)


def test_an_expert_without_tokens_takes_no_part(experts):
    """Its matrices may hold anything."""
    weights, x = weights_of(experts), normal(1, 2, HIDDEN)
    dy = normal(1, 2, HIDDEN)
    z = x[0] @ dequantize(weights, f"{experts.router}.", HIDDEN).T
    chosen = choose(z, weights.get(experts.bias or ""), experts).flatten().tolist()
    unused = next(e for e in range(COUNT) if e not in chosen)
    before = mix_by_experts(x, weights, experts, "silu")
    gradient = mix_by_experts_backward(x, dy, weights, experts, "silu")
    for name in experts.stacked(HIDDEN):
        scales = weights[f"{name}.scales"]
        scales[unused] = mx.full(scales.shape[1:], float("nan"))
    assert mx.array_equal(mix_by_experts(x, weights, experts, "silu"), before)
    after = mix_by_experts_backward(x, dy, weights, experts, "silu")
    assert mx.array_equal(after, gradient)


def test_sizes_that_cannot_be_are_refused():
    for change in ({"num_experts_per_tok": 7}, {"num_experts": 0}, {"scores": "tanh"}):
        with pytest.raises(ValueError, match="experts"):
            replace(KINDS["softmax"], **change).check()
