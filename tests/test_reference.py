"""`mesp.reference` against automatic differentiation of its own forward, of MLX's and mlx-lm's."""

from dataclasses import asdict

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.models.base import create_attention_mask
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import default_loss

from mesp import reference
from mesp.models import PROJECTIONS, Architecture

TOLERANCE = 1e-5
SCALE = 2.0
EPS = 1e-6


def relative_error(actual: mx.array, expected: mx.array) -> float:
    """‖a - b‖₂ / ‖b‖₂"""
    assert actual.shape == expected.shape
    return (mx.linalg.norm(actual - expected) / mx.linalg.norm(expected)).item()


def assert_close(name: str, actual: mx.array, expected: mx.array) -> None:
    error = relative_error(actual, expected)
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def normal(*arch: int) -> mx.array:
    return mx.random.normal(arch)


def check(forward, backward, oracle, inputs: dict[str, mx.array], zeros=()) -> None:
    """`forward` equals `oracle`, and `backward(y, dy)` the gradients of both by each input.

    Gradients named in `zeros` are zero but for rounding.
    """
    names, arrays = list(inputs), list(inputs.values())
    y = forward(*arrays)
    dy = normal(*y.shape)
    assert_close("y", y, oracle(*arrays))
    actual = backward(y, dy)
    for function in (forward, oracle):
        _, expected = mx.vjp(function, arrays, [dy])
        for name, a, b in zip(names, actual, expected, strict=True):
            if name in zeros:
                limit = TOLERANCE * mx.linalg.norm(dy)
                assert mx.linalg.norm(a) <= limit and mx.linalg.norm(b) <= limit, name
            else:
                assert_close(f"d {name}", a, b)


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(0)


# The pieces.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("T", "in_size", "out_size", "rank", "bits", "group_size"),
    [(1, 32, 8, 1, 4, 32), (7, 64, 96, 4, 4, 64), (33, 256, 40, 8, 4, 128), (5, 64, 64, 3, 8, 32)],
)
def test_linear(T, in_size, out_size, rank, bits, group_size, bias):
    quantized = mx.quantize(normal(out_size, in_size), group_size, bits)
    weights = dict(zip(("p.weight", "p.scales", "p.biases"), quantized, strict=True))
    W = reference.dequantize(weights, "p.", in_size)
    b = normal(out_size) if bias else None

    def forward(x, A, B):
        return reference.linear(x, reference.Projection(W, b, A, B), SCALE)

    def oracle(x, A, B):
        layer = LoRALinear(in_size, out_size, rank, scale=SCALE)
        layer.linear = nn.QuantizedLinear(in_size, out_size, bias, group_size, bits)
        layer.linear.load_weights(
            [(name[2:], array) for name, array in weights.items()] + ([("bias", b)] if bias else [])
        )
        layer.lora_a, layer.lora_b = A, B
        return layer(x)

    x, A, B = normal(1, T, in_size), normal(in_size, rank), normal(rank, out_size)
    check(
        forward,
        lambda y, dy: reference.linear_backward(x, dy, reference.Projection(W, b, A, B), SCALE),
        oracle,
        {"x": x, "A": A, "B": B},
    )


@pytest.mark.parametrize(("T", "n", "size"), [(1, 64, 1.0), (7, 33, 100.0), (32, 192, 1e-2)])
def test_rms_norm(T, n, size):
    x, weight = size * normal(1, T, n), normal(n)
    check(
        lambda x: reference.rms_norm(x, weight, EPS),
        lambda y, dy: [reference.rms_norm_backward(x, dy, weight, EPS)],
        lambda x: mx.fast.rms_norm(x, weight, EPS),
        {"x": x},
    )


@pytest.mark.parametrize(
    ("heads", "T", "D", "theta"), [(1, 1, 2, 1e4), (3, 7, 8, 1e4), (2, 65, 64, 1e6)]
)
def test_rope(heads, T, D, theta):
    check(
        lambda x: reference.rope(x, theta),
        lambda y, dy: [reference.rope_backward(dy, theta)],
        lambda x: mx.fast.rope(x, D, traditional=False, base=theta, scale=1.0, offset=0),
        {"x": normal(1, heads, T, D)},
    )


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "D"),
    [(1, 2, 1, 8), (7, 1, 1, 16), (9, 4, 4, 8), (32, 4, 2, 16), (33, 14, 2, 64)],
)
def test_attention(T, heads, kv_heads, D):
    q, k, v = normal(1, heads, T, D), normal(1, kv_heads, T, D), normal(1, kv_heads, T, D)
    check(
        reference.attention,
        lambda attn_out, dy: reference.attention_backward(q, k, v, attn_out, dy),
        lambda q, k, v: reference.merge_heads(
            mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5, mask="causal")
        ),
        {"q": q, "k": k, "v": v},
        zeros=("q", "k") if T == 1 else (),
    )


@pytest.mark.parametrize(("T", "n", "size"), [(1, 8, 1.0), (7, 33, 10.0), (32, 96, 0.1)])
def test_swiglu(T, n, size):
    gate, up = size * normal(1, T, n), normal(1, T, n)
    check(
        reference.swiglu,
        lambda y, dy: reference.swiglu_backward(gate, up, dy),
        lambda gate, up: nn.silu(gate) * up,
        {"gate": gate, "up": up},
    )


@pytest.mark.parametrize(
    ("T", "hidden", "vocab_size", "bits", "group_size"),
    [(1, 64, 50, 4, 64), (7, 128, 300, 4, 32), (32, 128, 1000, 8, 128)],
)
def test_cross_entropy(T, hidden, vocab_size, bits, group_size):
    weight, scales, biases = mx.quantize(normal(vocab_size, hidden), group_size, bits)
    norm = 0.2 * normal(hidden)
    head = {"weight": weight, "scales": scales, "biases": biases, "norm": norm}
    targets = mx.random.randint(0, vocab_size, (T,))

    def oracle(x):
        normed = mx.fast.rms_norm(x, norm, EPS)
        logits = mx.quantized_matmul(
            normed, weight, scales, biases, group_size=group_size, bits=bits
        )
        return nn.losses.cross_entropy(logits[0], targets, reduction="mean")

    x = normal(1, T, hidden)
    check(
        lambda x: reference.cross_entropy(x, targets, head, EPS),
        lambda y, dy: [dy * reference.cross_entropy_backward(x, targets, head, EPS)],
        oracle,
        {"x": x},
    )


# LoRA parameters.


def architecture(**changes) -> Architecture:
    """A small model: two layers of 4 heads in 2 groups."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "rms_norm_eps": EPS,
        "rope_theta": 1e4,
    }
    return Architecture.from_config(config | changes)


def random_lora(arch: Architecture, rank: int) -> list[mx.array]:
    """As after some training: A and B nonzero."""
    lora = reference.init_lora(arch, rank, seed=3)
    return [w + 0.05 * normal(*w.shape) for w in lora]


def test_lora_layout():
    arch, rank = architecture(hidden_size=96, num_attention_heads=3, num_key_value_heads=1), 4
    flat = random_lora(arch, rank)[0]
    matrices = reference.unpack_lora(flat, arch, rank)
    assert [(name, (A.shape, B.shape)) for name, (A, B) in matrices.items()] == [
        ("self_attn.q_proj", ((96, 4), (4, 96))),
        ("self_attn.k_proj", ((96, 4), (4, 32))),
        ("self_attn.v_proj", ((96, 4), (4, 32))),
        ("self_attn.o_proj", ((96, 4), (4, 96))),
        ("mlp.gate_proj", ((96, 4), (4, 128))),
        ("mlp.up_proj", ((96, 4), (4, 128))),
        ("mlp.down_proj", ((128, 4), (4, 96))),
    ]
    A, B = matrices["self_attn.q_proj"]
    assert A[1, 2] == flat[1 * 4 + 2]
    assert B[1, 2] == flat[96 * 4 + 1 * 96 + 2]
    assert mx.array_equal(reference.pack_lora(matrices), flat)
    assert reference.lora_rank(flat, arch) == rank


def test_init_lora():
    arch, rank = architecture(), 8
    lora = reference.init_lora(arch, rank, seed=5)
    assert len(lora) == arch.num_hidden_layers
    assert not mx.array_equal(lora[0], lora[1])
    assert not mx.array_equal(lora[0], reference.init_lora(arch, rank, seed=6)[0])
    for A, B in reference.unpack_lora(lora[1], arch, rank).values():
        bound = A.shape[0] ** -0.5
        assert 0.9 * bound < mx.abs(A).max() <= bound
        assert mx.abs(mx.mean(A)) < 0.1 * bound
        assert mx.all(B == 0)
    key = mx.random.split(mx.random.split(mx.random.key(5), 2)[1], 7)[6]
    A, _ = reference.unpack_lora(lora[1], arch, rank)["mlp.down_proj"]
    assert mx.array_equal(A, mx.random.uniform(-(128**-0.5), 128**-0.5, (128, rank), key=key))


# The block and the model, against mlx-lm.


def mlx_lm_model(arch: Architecture, group_size: int = 32) -> qwen2.Model:
    """A quantized Qwen2 model with random weights, biases and norms."""
    model = qwen2.Model(qwen2.ModelArgs.from_dict(asdict(arch)))
    vectors = [
        (name, 0.3 * normal(*array.shape) + (1 if "norm" in name else 0))
        for name, array in tree_flatten(model.parameters())
        if array.ndim == 1
    ]
    model.load_weights(vectors, strict=False)
    nn.quantize(model, group_size=group_size, bits=4)
    return model


def reference_model(model: qwen2.Model, arch: Architecture) -> reference.Model:
    """The same weights for the reference, taken before LoRA layers wrap them."""
    embedding = dict(model.model.embed_tokens.parameters())
    blocks = [dict(tree_flatten(layer.parameters())) for layer in model.layers]
    return reference.Model(arch, blocks, embedding, embedding | {"norm": model.model.norm.weight})


def load_lora(layer: nn.Module, flat: mx.array, arch: Architecture, rank: int) -> None:
    """Wraps an mlx-lm block's projections in LoRALinear; only `flat`'s parameters are trainable."""
    modules = dict(layer.named_modules())
    wrapped = []
    for name, (A, B) in reference.unpack_lora(flat, arch, rank).items():
        lora = LoRALinear.from_base(modules[name], r=rank, scale=SCALE)
        lora.lora_a, lora.lora_b = A, B
        wrapped.append((name, lora))
    layer.freeze()
    for name, lora in wrapped:
        parent, child = name.split(".")
        setattr(layer[parent], child, lora)


def flat_gradient(grads: dict) -> mx.array:
    """mlx-lm's gradients of a block's LoRALinear modules as the flat vector."""
    arrays = dict(tree_flatten(grads))
    return reference.pack_lora(
        {name: (arrays[f"{name}.lora_a"], arrays[f"{name}.lora_b"]) for name in PROJECTIONS}
    )


def assert_same_gradient(actual, expected, arch, rank, T) -> None:
    """Flat LoRA gradients, matrix by matrix. One token attends to itself only: q, k get none."""
    actual, expected = (reference.unpack_lora(g, arch, rank) for g in (actual, expected))
    for name in PROJECTIONS:
        for matrix, a, b in zip("AB", actual[name], expected[name], strict=True):
            if T == 1 and name in ("self_attn.q_proj", "self_attn.k_proj"):
                assert mx.linalg.norm(a) <= TOLERANCE * mx.linalg.norm(actual["mlp.up_proj"][0])
            else:
                assert_close(f"{name} {matrix}", a, b)


BLOCKS = [
    (1, 8, 32, {}),
    (7, 1, 32, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    (33, 4, 64, {"num_attention_heads": 8}),
    (32, 16, 128, {"hidden_size": 128, "intermediate_size": 256, "rope_theta": 1e6}),
]


@pytest.mark.parametrize(("T", "rank", "group_size", "changes"), BLOCKS)
def test_block(T, rank, group_size, changes):
    arch = architecture(**changes)
    model = mlx_lm_model(arch, group_size)
    weights = reference_model(model, arch).blocks[0]
    lora = random_lora(arch, rank)[0]
    x, dy = normal(1, T, arch.hidden_size), normal(1, T, arch.hidden_size)
    block = (lora, SCALE, weights, arch)

    y, *intermediates = reference.block_forward(x, *block)
    dx, d_lora = reference.block_backward(x, intermediates, dy, *block)
    dx_vjp, d_lora_vjp = reference.mebp_block_gradient(x, dy, *block)
    assert_close("dx (vjp)", dx, dx_vjp)
    assert_same_gradient(d_lora, d_lora_vjp, arch, rank, T)

    layer = model.layers[0]
    load_lora(layer, lora, arch, rank)
    trainable = layer.trainable_parameters()

    def mlx_lm_block(x, parameters):
        layer.update(parameters)
        return (layer(x, create_attention_mask(x)) * dy).sum()

    assert_close("y", y, layer(x, create_attention_mask(x)))
    dx_lm, grads = mx.grad(mlx_lm_block, argnums=(0, 1))(x, trainable)
    assert_close("dx (mlx-lm)", dx, dx_lm)
    assert_same_gradient(d_lora, flat_gradient(grads), arch, rank, T)


@pytest.mark.parametrize(("T", "rank", "group_size", "changes"), BLOCKS)
def test_block_intermediates(T, rank, group_size, changes):
    arch = architecture(**changes)
    model = mlx_lm_model(arch, group_size)
    weights = reference_model(model, arch).blocks[0]
    lora = random_lora(arch, rank)[0]
    x = normal(1, T, arch.hidden_size)
    _, *intermediates = reference.block_forward(x, lora, SCALE, weights, arch)

    layer = model.layers[0]
    load_lora(layer, lora, arch, rank)
    attention, mlp = layer.self_attn, layer.mlp

    def heads(x, count):
        return x.reshape(1, T, count, arch.head_dim).transpose(0, 2, 1, 3)

    attn_in = layer.input_layernorm(x)
    q = attention.rope(heads(attention.q_proj(attn_in), arch.num_attention_heads))
    k = attention.rope(heads(attention.k_proj(attn_in), arch.num_key_value_heads))
    v = heads(attention.v_proj(attn_in), arch.num_key_value_heads)
    attn_out = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=arch.head_dim**-0.5, mask="causal"
    )
    attn_out = attn_out.transpose(0, 2, 1, 3).reshape(1, T, -1)
    x_mid = x + attention.o_proj(attn_out)
    mlp_in = layer.post_attention_layernorm(x_mid)
    expected = [attn_in, q, k, v, attn_out, x_mid, mlp.gate_proj(mlp_in), mlp.up_proj(mlp_in)]
    for name, a, b in zip(reference.INTERMEDIATES, intermediates, expected, strict=True):
        assert_close(name, a, b)


@pytest.mark.parametrize(("T", "rank", "group_size", "changes"), BLOCKS)
def test_model(T, rank, group_size, changes):
    arch = architecture(**changes)
    model = mlx_lm_model(arch, group_size)
    ours = reference_model(model, arch)
    lora = random_lora(arch, rank)
    window = mx.random.randint(0, arch.vocab_size, (T + 1,))
    ours_gradients = reference.gradients(ours, lora, window, SCALE)

    model.freeze()
    for layer, flat in zip(model.layers, lora, strict=True):
        load_lora(layer, flat, arch, rank)
    lengths = mx.array([[1, T]])
    (loss, _), grads = nn.value_and_grad(model, default_loss)(model, window[None], lengths)

    assert_close("loss", ours_gradients.loss, loss)
    assert_close("loss", reference.loss(ours, lora, window, SCALE), loss)
    for actual, layer_grads in zip(ours_gradients.lora, grads["model"]["layers"], strict=True):
        assert_same_gradient(actual, flat_gradient(layer_grads), arch, rank, T)


def test_gradients_by_activations():
    """`x` and `dx` of `gradients`: the loss as a function of any block's input, differentiated."""
    arch = architecture(num_hidden_layers=3)
    model = reference_model(mlx_lm_model(arch), arch)
    lora = random_lora(arch, 4)
    window = mx.random.randint(0, arch.vocab_size, (10,))
    g = reference.gradients(model, lora, window, SCALE)
    assert len(g.x) == len(g.dx) == 4

    def loss_from(first, x):
        for flat, weights in zip(lora[first:], model.blocks[first:], strict=True):
            x = reference.block_forward(x, flat, SCALE, weights, arch)[0]
        return reference.cross_entropy(x, window[1:], model.head, EPS)

    for i in range(4):
        value, dx = mx.value_and_grad(lambda x, i=i: loss_from(i, x))(g.x[i])
        assert_close("loss", g.loss, value)
        assert_close(f"dx.{i}", g.dx[i], dx)


def test_bfloat16_bundle():
    """Scales, biases and norms may be bfloat16; the reference computes in float32 all the same."""
    arch = architecture()
    model = reference_model(mlx_lm_model(arch), arch)

    def cast(weights, dtype):
        return {k: w if w.dtype == mx.uint32 else w.astype(dtype) for k, w in weights.items()}

    def cast_model(model, dtype):
        parts = [cast(weights, dtype) for weights in (model.embedding, model.head)]
        return reference.Model(arch, [cast(weights, dtype) for weights in model.blocks], *parts)

    small = cast_model(model, mx.bfloat16)
    same = cast_model(small, mx.float32)
    lora, window = random_lora(arch, 4), mx.arange(9)
    a, b = (reference.gradients(m, lora, window, SCALE) for m in (small, same))
    assert a.loss.dtype == mx.float32
    assert a.loss == b.loss
    assert all(mx.array_equal(*pair) for pair in zip(a.lora, b.lora, strict=True))


# The methods.


@pytest.fixture
def training():
    """A small model, a stream of tokens with something to learn, and the settings of `train`."""
    arch = architecture(vocab_size=64)
    model = reference_model(mlx_lm_model(arch), arch)
    tokens = (mx.arange(400) * 7 + mx.random.randint(0, 3, (400,))) % 64
    return model, tokens, dict(seq_len=15, scale=SCALE, learning_rate=0.05)


def test_mebp_equals_mesp(training):
    model, tokens, settings = training
    runs = []
    for method in ("mesp", "mebp"):
        lora = reference.init_lora(model.arch, 4, seed=0)
        losses = reference.train(model, lora, tokens, method, 20, **settings)
        runs.append((losses, lora))
    (mesp_losses, mesp_lora), (mebp_losses, mebp_lora) = runs
    for step, (a, b) in enumerate(zip(mesp_losses, mebp_losses, strict=True)):
        assert_close(f"loss of step {step}", mx.array(a), mx.array(b))
    initial = reference.init_lora(model.arch, 4, seed=0)
    for a, b, start in zip(mesp_lora, mebp_lora, initial, strict=True):
        assert_close("LoRA", a, b)
        assert relative_error(a, start) > 1e-3


def test_training_lowers_the_loss(training):
    model, tokens, settings = training
    lora = reference.init_lora(model.arch, 4, seed=0)
    evaluation = dict(seq_len=settings["seq_len"], scale=SCALE, val_batches=5)
    before = reference.evaluate(model, lora, tokens, **evaluation)
    reference.train(model, lora, tokens, "mesp", 60, **settings)
    assert reference.evaluate(model, lora, tokens, **evaluation) < before - 0.1


def test_step_is_gradient_descent(training):
    model, tokens, _ = training
    start = random_lora(model.arch, 4)
    lora = list(start)
    g = reference.gradients(model, lora, tokens[:16], SCALE)
    loss = reference.mesp_step(model, lora, tokens[:16], SCALE, 0.5)
    assert loss == g.loss.item()
    for after, before, d_lora in zip(lora, start, g.lora, strict=True):
        assert mx.array_equal(after, before - 0.5 * d_lora)


def mezo(model, lora, tokens, seed, step, learning_rate=1.0, epsilon=1e-2):
    """The updated parameters and the loss."""
    lora = list(lora)
    loss = reference.mezo_step(
        model, lora, tokens, SCALE, learning_rate, seed=seed, step=step, epsilon=epsilon
    )
    return lora, loss


def test_mezo_is_the_finite_difference(training):
    model, tokens, _ = training
    start = random_lora(model.arch, 4)
    window, learning_rate, epsilon = tokens[:16], 0.1, 1e-2
    after, loss = mezo(model, start, window, 5, 7, learning_rate, epsilon)
    keys = mx.random.split(mx.random.key(5 + 1 + 7), len(start))
    z = [mx.random.normal(w.shape, key=key) for w, key in zip(start, keys, strict=True)]
    plus, minus = (
        reference.loss(
            model, [w + s * n for w, n in zip(start, z, strict=True)], window, SCALE
        ).item()
        for s in (epsilon, -epsilon)
    )
    g = (plus - minus) / (2 * epsilon)
    for a, before, noise in zip(after, start, z, strict=True):
        assert_close("LoRA", a, before - learning_rate * g * noise)
        assert_close("update", a - before, (before - learning_rate * g * noise) - before)
    assert loss == (plus + minus) / 2


def test_mezo_is_reproducible_by_seed(training):
    model, tokens, settings = training

    def run(seed):
        lora = reference.init_lora(model.arch, 4, seed=0)
        settings_mezo = settings | dict(learning_rate=1e-3, seed=seed)
        return reference.train(model, lora, tokens, "mezo", 3, **settings_mezo), lora

    (losses, lora), (losses_again, lora_again) = run(1), run(1)
    assert losses == losses_again
    assert all(mx.array_equal(*pair) for pair in zip(lora, lora_again, strict=True))
    assert not mx.array_equal(run(2)[1][0], lora[0])


def test_mezo_follows_the_gradient():
    """Each step's coefficient is z · ∇L, so the mean update over many steps points along -∇L."""
    arch = architecture(
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=32,
    )
    model = reference_model(mlx_lm_model(arch), arch)
    lora, window = random_lora(arch, 1), mx.arange(9)
    gradient = reference.gradients(model, lora, window, SCALE).lora[0]
    total, slopes, coefficients = mx.zeros(gradient.shape), [], []
    for step in range(300):
        update = mezo(model, lora, window, 0, step, epsilon=1e-3)[0][0] - lora[0]
        z = reference.mezo_noise(lora, 0, step)[0]
        slopes.append((z * gradient).sum())
        coefficients.append(-(update * z).sum() / (z * z).sum())
        total = total - update
        mx.eval(total, slopes, coefficients)
    slopes, coefficients = mx.stack(slopes), mx.stack(coefficients)
    assert relative_error(coefficients, slopes) < 0.02
    cosine = (total * gradient).sum() / (mx.linalg.norm(total) * mx.linalg.norm(gradient))
    expected = (300 / (300 + gradient.size)) ** 0.5
    assert abs(cosine.item() - expected) < 0.15


def test_unknown_method(training):
    model, tokens, settings = training
    with pytest.raises(ValueError, match="unknown method: adam"):
        reference.train(model, [], tokens, "adam", 1, **settings)


# Windows.


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 26, 100, 1000, 1001])
def test_step_window_visits_all_windows(windows):
    order = [reference.step_window(step, 3, windows) for step in range(windows)]
    assert sorted(order) == list(range(windows))
    assert order[0] == 3 % windows


def test_step_window_stride():
    # 0.618 · 100 = 61.8: 62 and 64 are even, 63 is coprime to 100.
    assert [reference.step_window(step, 0, 100) for step in range(4)] == [0, 63, 26, 89]


def test_evaluate_takes_the_first_windows(training):
    model, tokens, _ = training
    lora = random_lora(model.arch, 4)
    settings = dict(seq_len=15, scale=SCALE)
    losses = [
        reference.loss(model, lora, tokens[i * 15 : i * 15 + 16], SCALE).item() for i in range(26)
    ]
    two = reference.evaluate(model, lora, tokens, val_batches=2, **settings)
    assert two == pytest.approx(sum(losses[:2]) / 2)
    # A window needs one token more than its length: 391 tokens hold 26 windows, 390 hold 25.
    most = reference.evaluate(model, lora, tokens[:391], val_batches=99, **settings)
    assert most == pytest.approx(sum(losses) / 26)
    fewer = reference.evaluate(model, lora, tokens[:390], val_batches=99, **settings)
    assert fewer == pytest.approx(sum(losses[:25]) / 25)
