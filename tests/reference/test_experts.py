from dataclasses import replace

import mlx.core as mx
import pytest

from helpers.derivatives import normal
from mesp.models.mlps import Experts
from mesp.reference import Mixture, choose, mix_by_experts, mix_by_experts_backward, weigh

HIDDEN, WIDTH, COUNT, TOP = 64, 32, 6, 2
KINDS = {
    "softmax": Experts("gate", "experts", "softmax", None, COUNT, TOP, WIDTH),
    "sigmoid": Experts("gate", "experts", "sigmoid", "bias", COUNT, TOP, WIDTH, 1.5),
}


@pytest.fixture(params=KINDS)
def experts(request) -> Experts:
    return KINDS[request.param]


def weights_of(experts: Experts) -> dict[str, mx.array]:
    arrays = {} if experts.bias is None else {experts.bias: 0.3 * normal(COUNT)}
    shapes = {name: (COUNT, *shape) for name, shape in experts.stacked(HIDDEN).items()}
    for name, shape in (shapes | {experts.router: (COUNT, HIDDEN)}).items():
        quantized = mx.quantize(normal(*shape) * shape[-1] ** -0.5, 32, 8)
        parts = zip(("weight", "scales", "biases"), quantized, strict=True)
        arrays |= {f"{name}.{part}": array for part, array in parts}
    return arrays


SCALE = 2.0


def lora_of(experts: Experts, rank: int) -> dict[str, tuple[mx.array, mx.array]]:
    return {
        name: (normal(COUNT, inp, rank) * inp**-0.5, 0.1 * normal(COUNT, rank, out))
        for name, (out, inp) in experts.stacked(HIDDEN).items()
    }


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


def test_an_expert_without_tokens_takes_no_part(experts):
    weights, x = weights_of(experts), normal(1, 2, HIDDEN)
    dy, lora = normal(1, 2, HIDDEN), lora_of(experts, 4)
    mixture = Mixture(experts, "silu", weights, lora, SCALE)
    chosen = mixture.route(x[0])[0].flatten().tolist()
    unused = next(e for e in range(COUNT) if e not in chosen)
    before = mix_by_experts(x, mixture)
    gradient, d_lora = mix_by_experts_backward(x, dy, mixture)
    for name, (d_a, d_b) in d_lora.items():
        assert not d_a[unused].any() and not d_b[unused].any(), name
        assert d_a[chosen[0]].any() and d_b[chosen[0]].any(), name
    for name in experts.stacked(HIDDEN):
        scales = weights[f"{name}.scales"]
        scales[unused] = mx.full(scales.shape[1:], float("nan"))
    assert mx.array_equal(mix_by_experts(x, mixture), before)
    after, _ = mix_by_experts_backward(x, dy, mixture)
    assert mx.array_equal(after, gradient)


def test_sizes_that_cannot_be_are_refused():
    for change in ({"num_experts_per_tok": 7}, {"num_experts": 0}, {"scores": "tanh"}):
        with pytest.raises(ValueError, match="experts"):
            replace(KINDS["softmax"], **change).check()
