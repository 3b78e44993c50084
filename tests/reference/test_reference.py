import itertools

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.trainer import default_loss

from helpers.derivatives import TOLERANCE, assert_close, check, normal, relative_error
from helpers.models import (
    FAMILIES,
    TINY,
    arrays_of,
    given_to,
    load_lora,
    mlx_lm_model,
    run_layer,
    text_of,
)
from helpers.preferences import TRL
from mesp import reference
from mesp.models.architecture import Architecture, Block
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import name_there

SCALE = 2.0
EPS = 1e-6


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(0)


@pytest.mark.parametrize(("T", "n", "size"), [(1, 64, 1.0), (7, 33, 100.0), (32, 192, 1e-2)])
def test_rms_norm(T, n, size):
    x, weight = size * normal(1, T, n), normal(n)
    check(
        lambda x: reference.rms_norm(x, weight, EPS),
        lambda y, dy: [reference.rms_norm_backward(x, dy, weight, EPS)],
        lambda x: mx.fast.rms_norm(x, weight, EPS),
        {"x": x},
    )


SMALL = TINY | {"hidden_size": 64, "num_hidden_layers": 2}
SMALL |= {"intermediate_size": 128, "vocab_size": 160}


def architecture(**changes) -> Architecture:
    return Architecture.from_config(SMALL | changes)


def random_lora(arch: Architecture, rank: int) -> list[mx.array]:
    lora = reference.init_lora(arch, rank, seed=3)
    return [w + 0.05 * normal(*w.shape) for w in lora]


def random_dora(flat: mx.array, weights: reference.Weights, block: Block) -> mx.array:
    matrices = reference.unpack_lora(reference.add_magnitudes(flat, weights, block), block)
    for name in block.modules:
        A, B, m = matrices[name]
        matrices[name] = (A, B, m * (1 + 0.1 * normal(*m.shape)))
    return reference.pack_lora(matrices, block)


def quantized(config: dict, group_size: int = 32) -> nn.Module:
    return text_of(mlx_lm_model(config, lambda path: Quantization(4, group_size)))


def reference_model(model: nn.Module, arch: Architecture) -> reference.Model:
    embedding = dict(model.model.embed_tokens.parameters())
    head = embedding if arch.tie_word_embeddings else dict(model.lm_head.parameters())
    blocks = list(map(arrays_of, model.layers, arch.blocks))
    offset = 0 if arch.model_type.startswith("qwen3_5") else arch.norm_offset
    norm = model.model[name_there("model.norm", arch.model_type)[6:]].weight + offset
    norm = norm / arch.logits_scaling
    every = dict(tree_flatten(model.model.parameters()))
    per_layer = {
        f"model.{n}": a for n, a in every.items() if "per_layer_" in n or "_per_layer" in n
    }
    return reference.Model(arch, blocks, embedding, head | {"norm": norm}, per_layer)


def load_all(model: nn.Module, lora: list[mx.array], arch: Architecture) -> None:
    model.freeze()
    for layer, flat, block in zip(model.layers, lora, arch.blocks, strict=True):
        load_lora(layer, flat, block, SCALE)


def flat_gradient(grads: dict, block: Block) -> mx.array:
    arrays = dict(tree_flatten(grads))
    matrices = {}
    for name, shape in block.adapted().items():
        a, b = arrays[f"{name}.lora_a"], arrays[f"{name}.lora_b"]
        # mlx-lm's experts have A [experts, rank, in] and B [experts, out, rank].
        pair = (a.swapaxes(1, 2), b.swapaxes(1, 2)) if len(shape) == 3 else (a, b)
        matrices[name] = (*pair, *([arrays[f"{name}.m"]] if f"{name}.m" in arrays else []))
    return reference.pack_lora(matrices, block)


def without_gradient(block: Block) -> tuple[str, ...]:
    """A single token attends only to itself, whatever its query and key are. With an output gate,
    `q_proj` also computes the gate, so its gradient is not zero. The state before the first token
    is zero, so its decay has no effect.
    """
    if getattr(block.mixer, "output_gate", False):
        return ("self_attn.k_proj",)
    return ("self_attn.q_proj", "self_attn.k_proj", "linear_attn.in_proj_a")


def assert_same_gradient(actual, expected, block: Block, T: int) -> None:
    actual, expected = (reference.unpack_lora(g, block) for g in (actual, expected))
    for name in block.adapted():
        assert len(actual[name]) == len(expected[name])
        for matrix, a, b in zip("ABm", actual[name], expected[name], strict=False):
            if T == 1 and name in without_gradient(block):
                *_, down = block.modules
                limit = TOLERANCE * mx.linalg.norm(expected[down][0])
                assert mx.linalg.norm(a) <= limit and mx.linalg.norm(b) <= limit
            else:
                assert_close(f"{name} {matrix}", a, b)


class Masked(nn.Module):
    def __init__(self, M: mx.array):
        super().__init__()
        self._M = M  # The underscore keeps M from being a parameter.
        self._chosen = None

    def __call__(self, x: mx.array) -> mx.array:
        if self._M.ndim == 2:
            return x * self._M
        # x is [1, T, 1 or k, 1, in]: one row per token, or one for each of its k experts.
        assert self._chosen.shape[:2] == x.shape[:2], "mlx-lm sorts the tokens of many choices"
        tokens = mx.arange(x.shape[1])[:, None]
        return x * self._M[self._chosen[0], tokens][None, :, :, None]


def put_in_place_of_dropout(
    masks: reference.Masks, layer: nn.Module, patch: pytest.MonkeyPatch
) -> None:
    call = LoRASwitchLinear.__call__

    def with_choice(self: LoRASwitchLinear, x: mx.array, indices: mx.array, **others) -> mx.array:
        self.dropout._chosen = indices
        return call(self, x, indices, **others)

    patch.setattr(LoRASwitchLinear, "__call__", with_choice)
    modules = dict(layer.named_modules())
    for name, M in masks.items():
        modules[name].dropout = Masked(M)


SHAPES = [
    (1, 8, 32, {}),
    (7, 1, 32, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    (33, 4, 64, {"num_attention_heads": 8}),
    (32, 16, 128, {"hidden_size": 128, "intermediate_size": 256, "rope_theta": 1e6}),
]
CASES = [pytest.param(T, r, g, SMALL | changes, id=f"qwen2-{T}") for T, r, g, changes in SHAPES]
# Sliding windows have 5 tokens in these configs.
CASES += [pytest.param(T, 4, 32, FAMILIES[f], id=f"{f}-{T}") for f in FAMILIES for T in (1, 5, 12)]
MIXTURES = [f for f in FAMILIES if Architecture.from_config(FAMILIES[f]).has_experts]
CASES += [
    pytest.param(12, 4, 32, FAMILIES[f] | {"trained": True}, id=f"{f}-experts") for f in MIXTURES
]


@pytest.mark.parametrize(
    ("p", "dora"), [(0.0, False), (0.3, False), (0.3, True)], ids=["lora", "dropout", "dora"]
)
@pytest.mark.parametrize(("T", "rank", "group_size", "config"), CASES)
def test_block(T, rank, group_size, config, p, dora, monkeypatch):
    arch = Architecture.from_config(config)
    if config.get("trained"):
        arch = arch.training_experts()
    model = quantized(config, group_size)
    ours = reference_model(model, arch)
    for i in map(arch.blocks.index, arch.kinds):
        described, weights, lora = arch.blocks[i], ours.blocks[i], random_lora(arch, rank)[i]
        if dora:
            lora = random_dora(lora, weights, described)
        x, dy = normal(1, T, arch.hidden_size), normal(1, T, arch.hidden_size)
        block, given = (lora, SCALE, weights, described), given_to(described, T)
        masks = reference.Dropout(p, seed=5, step=3).masks(i, described, T) if p else None

        y = reference.block_forward(x, *block, **given, masks=masks)[0]
        (dx, d_lora, by_shared), (dx_vjp, d_lora_vjp, by_shared_vjp) = (
            gradient(x, dy, *block, **given, masks=masks)
            for gradient in (reference.mesp_block_gradient, reference.mebp_block_gradient)
        )
        assert_close("dx (vjp)", dx, dx_vjp)
        assert_same_gradient(d_lora, d_lora_vjp, described, T)
        if by_shared:
            if T > 1:
                assert_close("the gradient by another block's keys", by_shared[0], by_shared_vjp[0])
            assert_close("the gradient by another block's values", by_shared[1], by_shared_vjp[1])

        layer = model.layers[i]
        load_lora(layer, lora, described, SCALE)
        if masks:
            put_in_place_of_dropout(masks, layer, monkeypatch)

        def mlx_lm_block(x, parameters, layer=layer, described=described, dy=dy, given=given):
            layer.update(parameters)
            return (run_layer(layer, x, described, **given) * dy).sum()

        assert_close("y", y, run_layer(layer, x, described, **given))
        trainable = layer.trainable_parameters()
        dx_lm, grads = mx.grad(mlx_lm_block, argnums=(0, 1))(x, trainable)
        assert_close("dx (mlx-lm)", dx, dx_lm)
        assert_same_gradient(d_lora, flat_gradient(grads, described), described, T)


def test_the_gradient_by_shared_keys_and_values_is_a_sum():
    T, config = 12, FAMILIES["gemma4"]
    arch = Architecture.from_config(config)
    assert arch.owners == {1, 2}
    ours, lora = reference_model(quantized(config), arch), random_lora(arch, 4)
    window = mx.random.randint(0, arch.vocab_size, (T + 1,))
    expected = mx.grad(lambda lora: reference.loss(ours, lora, window, SCALE))(lora)

    def without_sums(*block, d_shared, **given):
        return reference.mesp_block_gradient(*block, **given)

    found, lost = (
        reference.gradients(ours, lora, window, SCALE, gradient)
        for gradient in (reference.mesp_block_gradient, without_sums)
    )
    assert found.loss == lost.loss
    for i, block in enumerate(arch.blocks):
        assert_same_gradient(found.lora[i], expected[i], block, T)
        if i not in arch.owners:
            continue
        a, b = (reference.unpack_lora(each.lora[i], block) for each in (found, lost))
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            for right, wrong in zip(a[name], b[name], strict=True):
                error = mx.linalg.norm(wrong - right) / mx.linalg.norm(right)
                assert error > 0.1, f"{name} of block {i}"


class Windowed(nn.Module):
    def __init__(self, model: nn.Module, arch: Architecture):
        super().__init__()
        self.model, self.arch = model.model, arch

    def __call__(self, tokens: mx.array) -> mx.array:
        h = self.arch.embedding_scale * self.model.embed_tokens(tokens)
        for i, layer in enumerate(self.model.layers):
            h = run_layer(layer, h, self.arch.blocks[i])
        logits = self.model.embed_tokens.as_linear(self.model.norm(h))
        cap = self.arch.final_logit_softcapping
        return cap * mx.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize(("T", "rank", "group_size", "config"), CASES)
def test_model(T, rank, group_size, config):
    arch = Architecture.from_config(config)
    model = quantized(config, group_size)
    ours = reference_model(model, arch)
    lora = random_lora(arch, rank)
    window = mx.random.randint(0, arch.vocab_size, (T + 1,))
    ours_gradients = reference.gradients(ours, lora, window, SCALE)

    load_all(model, lora, arch)
    lengths = mx.array([[1, T]])
    if arch.model_type in ("mistral", "phi3", "gemma2") and T > 5:
        without, _ = default_loss(model, window[None], lengths)
        assert relative_error(ours_gradients.loss, without) > 10 * TOLERANCE, "the window counts"
        model = Windowed(model, arch)
    (loss, _), grads = nn.value_and_grad(model, default_loss)(model, window[None], lengths)

    assert_close("loss", ours_gradients.loss, loss)
    assert_close("loss", reference.loss(ours, lora, window, SCALE), loss)
    layers = zip(ours_gradients.lora, grads["model"]["layers"], arch.blocks, strict=True)
    for actual, layer_grads, block in layers:
        assert_same_gradient(actual, flat_gradient(layer_grads, block), block, T)


# Packed records are tested with each family. The slower automatic differentiation is tested with
# four families, which cover the kinds of mixer.
PACKED = {"small": SMALL, **FAMILIES}
BY_MEBP = ("small", "qwen3_5", "granite-mamba", "lfm2")


@pytest.mark.parametrize(
    ("config", "block_gradient"),
    [
        *(pytest.param(each, reference.mesp_block_gradient, id=n) for n, each in PACKED.items()),
        *(pytest.param(PACKED[n], reference.mebp_block_gradient, id=f"{n}-mebp") for n in BY_MEBP),
    ],
)
def test_packed_records_train_as_a_batch(config, block_gradient):
    arch = Architecture.from_config(config)
    model, lora = reference_model(quantized(config), arch), random_lora(arch, 4)
    lengths = [9, 2, 70, 12]  # in tokens; 70 exceeds a sliding window and a chunk of the delta rule
    starts = [0, *itertools.accumulate(lengths[:-1])]
    window = mx.random.randint(0, arch.vocab_size, (sum(lengths),))
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    records = [window[start:end] for start, end in zip(starts, ends, strict=True)]
    targets = sum(lengths) - len(lengths)

    weights = mx.array([float(i not in starts) / targets for i in range(1, window.size)])
    packed = reference.gradients(model, lora, window, SCALE, block_gradient, weights, starts)
    batch = [
        reference.gradients(
            model, lora, each, SCALE, block_gradient, mx.full(each.size - 1, 1 / targets)
        )
        for each in records
    ]
    assert relative_error(packed.loss, sum(each.loss for each in batch)) <= 1e-6
    assert packed.loss == reference.loss(model, lora, window, SCALE, weights, starts)
    for i, block in enumerate(arch.blocks):
        actual = reference.unpack_lora(packed.lora[i], block)
        expected = reference.unpack_lora(sum(each.lora[i] for each in batch), block)
        for name in block.modules:
            # With AVX2, float32 sums in another order differ by up to 1.4e-6.
            for a, b in zip(actual[name], expected[name], strict=True):
                assert relative_error(a, b) <= 2e-6, name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("config", [pytest.param(c, id=n) for n, c in PACKED.items()])
def test_a_step_with_dropout(config, dora):
    arch = Architecture.from_config(config).training_experts()
    model, lora = reference_model(quantized(config), arch), random_lora(arch, 4)
    if dora:
        lora = list(map(random_dora, lora, model.blocks, arch.blocks))
    window, starts = mx.random.randint(0, arch.vocab_size, (14,)), [0, 8]
    weights = mx.array([0.0 if i in starts else 1 / 12 for i in range(1, window.size)])
    dropout = reference.Dropout(0.3, seed=5, step=3, sequence=1)
    given = {"weights": weights, "starts": starts}

    found = reference.gradients(model, lora, window, SCALE, **given, dropout=dropout)
    loss, expected = mx.value_and_grad(
        lambda lora: reference.loss(model, lora, window, SCALE, **given, dropout=dropout)
    )(lora)
    assert found.loss == loss
    for i, block in enumerate(arch.blocks):
        assert_same_gradient(found.lora[i], expected[i], block, 13)
    others = (None, dropout._replace(step=4), dropout._replace(sequence=0), dropout._replace(p=0.2))
    losses = [
        reference.loss(model, lora, window, SCALE, **given, dropout=other) for other in others
    ]
    assert len({found.loss.item(), *(each.item() for each in losses)}) == 5

    i = arch.num_hidden_layers - 1
    block, x = arch.blocks[i], normal(1, 13, arch.hidden_size)
    others, masks = given_to(block, 13), dropout.masks(i, block, 13)
    operands = (lora[i], SCALE, model.blocks[i], block)
    whole = reference.block_forward(x, *operands, starts=starts, **others, masks=masks)[0]
    alone = []
    for record in (slice(0, 8), slice(8, 13)):
        of_record = {name: rows(array, record) for name, array in others.items()}
        of_masks = {name: M[..., record, :] for name, M in masks.items()}
        alone += reference.block_forward(x[:, record], *operands, **of_record, masks=of_masks)[:1]
    assert_close("y", whole, mx.concatenate(alone, axis=1))


def rows(given, record: slice):
    if isinstance(given, tuple):
        return tuple(rows(each, record) for each in given)
    return given[..., record, :]


@pytest.mark.parametrize("config", [SMALL, FAMILIES["gemma2"], FAMILIES["phi3"]])
def test_gradients_by_activations(config):
    arch = Architecture.from_config(config | {"num_hidden_layers": 3})
    model = reference_model(quantized(config | {"num_hidden_layers": 3}), arch)
    lora = random_lora(arch, 4)
    window = mx.random.randint(0, arch.vocab_size, (10,))
    g = reference.gradients(model, lora, window, SCALE)
    assert len(g.x) == len(g.dx) == 4

    def loss_from(first, x):
        for i in range(first, 3):
            block = (lora[i], SCALE, model.blocks[i], arch.blocks[i])
            x = reference.block_forward(x, *block)[0]
        return reference.cross_entropy(x, window[1:], model.head, arch)

    for i in range(4):
        value, dx = mx.value_and_grad(lambda x, i=i: loss_from(i, x))(g.x[i])
        assert_close("loss", g.loss, value)
        assert_close(f"dx.{i}", g.dx[i], dx)


def test_bfloat16_bundle():
    arch = architecture()
    model = reference_model(quantized(SMALL), arch)

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


@pytest.fixture
def training():
    arch = architecture(vocab_size=64)
    model = reference_model(quantized(SMALL | {"vocab_size": 64}), arch)
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


def test_dora_trains_as_in_mlx_lm():
    arch, rate = architecture(), 0.05
    theirs = quantized(SMALL)
    model = reference_model(theirs, arch)
    plain = reference.init_lora(arch, 4, seed=0)
    lora = list(map(reference.add_magnitudes, plain, model.blocks, arch.blocks))
    windows = mx.random.randint(0, arch.vocab_size, (5, 16))
    without = reference.loss(model, plain, windows[0], SCALE)
    assert_close("loss at first", reference.loss(model, lora, windows[0], SCALE), without)

    load_all(theirs, lora, arch)
    update = optim.SGD(rate)
    gradient, lengths = nn.value_and_grad(theirs, default_loss), mx.array([[1, 15]])
    start = list(lora)
    for window in windows:
        (loss, _), grads = gradient(theirs, window[None], lengths)
        update.update(theirs, grads)
        assert reference.mesp_step(model, lora, window, SCALE, rate) == pytest.approx(
            loss.item(), rel=TOLERANCE
        )
    for i, block in enumerate(arch.blocks):
        parameters = theirs.layers[i].trainable_parameters()
        assert_close("parameters", lora[i], flat_gradient(parameters, block))
        after, before = (reference.unpack_lora(each[i], block) for each in (lora, start))
        for name in block.modules:
            assert not mx.array_equal(after[name][2], before[name][2]), f"m of {name} is trained"


def test_mezo_is_the_finite_difference(training):
    model, tokens, _ = training
    start = random_lora(model.arch, 4)
    window, learning_rate, epsilon = tokens[:16], 0.1, 1e-2
    after, how = list(start), {"seed": 5, "step": 7, "epsilon": epsilon}
    loss = reference.mezo_step(model, after, window, SCALE, learning_rate, **how)
    keys = mx.random.split(mx.random.key(reference.scattered(5) + 7), len(start))
    z = [mx.random.normal(w.shape, key=key) for w, key in zip(start, keys, strict=True)]
    moved = ([w + s * n for w, n in zip(start, z, strict=True)] for s in (epsilon, -epsilon))
    plus, minus = (reference.loss(model, lora, window, SCALE).item() for lora in moved)
    g = (plus - minus) / (2 * epsilon)
    for a, before, noise in zip(after, start, z, strict=True):
        assert_close("LoRA", a, before - learning_rate * g * noise)
        assert_close("update", a - before, (before - learning_rate * g * noise) - before)
    assert loss == (plus + minus) / 2


def test_neighbouring_seeds_share_no_steps():
    # SplitMix64's published first output
    assert reference.scattered(1234567) == 6457827717110365317
    starts = sorted(map(reference.scattered, range(100)))
    assert all(end - start > 2**21 for start, end in itertools.pairwise(starts))


LENGTHS, PROMPTS = (9, 13), (4, 5)  # tokens in each sequence, and in its prompt


@pytest.fixture
def preferring():
    arch = architecture()
    model = quantized(SMALL)
    ours, lora = reference_model(model, arch), random_lora(arch, 4)
    start = reference.init_lora(arch, 4, seed=0)
    windows = [mx.random.randint(0, arch.vocab_size, (n,)) for n in LENGTHS]
    load_all(model, lora, arch)
    return arch, model, ours, lora, start, windows


def answer_mask(window: mx.array, prompt: int) -> mx.array:
    return (mx.arange(1, window.size) >= prompt).astype(mx.float32)


def scored(ours, lora, start, window, prompt) -> reference.Answer:
    mask = answer_mask(window, prompt)
    logp, of_start = (
        -reference.loss(ours, parameters, window, SCALE, mask).item()
        for parameters in (lora, start)
    )
    return reference.Answer(logp, of_start, int(mask.sum().item()))


def logps(model, window, prompt) -> tuple[mx.array, mx.array]:
    every = mx.take_along_axis(
        nn.log_softmax(model(window[None, :-1])[0], axis=-1), window[1:, None], axis=-1
    )[:, 0]
    return (every * answer_mask(window, prompt)).sum(), -every.mean()


def assert_same_training(model, expected_loss, arch, ours, lora, windows, loss, weights):
    value, grads = nn.value_and_grad(model, expected_loss)(model)
    assert loss == pytest.approx(value.item(), rel=TOLERANCE)
    gradients = [
        reference.gradients(ours, lora, window, SCALE, weights=weight).lora
        for window, weight in zip(windows, weights, strict=True)
    ]
    for block, layer in enumerate(grads["model"]["layers"]):
        total = sum(each[block] for each in gradients)
        assert_close(f"gradient of block {block}", total, flat_gradient(layer, arch.blocks[block]))


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo"])
def test_a_pair_trains_as_in_trl(preferring, objective, beta):
    arch, model, ours, lora, start, windows = preferring
    pairs = list(zip(windows, PROMPTS, strict=True))
    answers = [scored(ours, lora, start, *each) for each in pairs]
    gamma = (0.5,) if objective == "simpo" else ()
    pair = getattr(reference, objective)(*answers, beta, *gamma)
    masks = [answer_mask(*each) for each in pairs]
    weights, loss = [pair.chosen * masks[0], pair.rejected * masks[1]], pair.loss
    if objective == "orpo":
        loss += reference.loss(ours, lora, windows[0], SCALE).item()
        weights[0] = weights[0] + 1 / masks[0].size

    def expected(model):
        (chosen, nll), (rejected, _) = (logps(model, *each) for each in pairs)
        return getattr(TRL(beta), {"dpo": "sigmoid"}.get(objective, objective))(
            chosen_logps=chosen, rejected_logps=rejected, chosen_nll_loss=nll,
            ref_chosen_logps=answers[0].reference, ref_rejected_logps=answers[1].reference,
            chosen_count=answers[0].tokens, rejected_count=answers[1].tokens,
        )  # fmt: skip

    assert_same_training(model, expected, arch, ours, lora, windows, loss, weights)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_a_batch_of_labels_trains_as_in_trl(preferring, beta):
    arch, model, ours, lora, start, windows = preferring
    (first, second), (m, n) = windows, PROMPTS
    mismatched = [mx.concatenate([first[:m], second[n:]]), mx.concatenate([second[:n], first[m:]])]
    answers, others = (
        [scored(ours, lora, start, *each) for each in zip(these, PROMPTS, strict=True)]
        for these in (windows, mismatched)
    )
    loss, factors = reference.kto(answers, [True, False], others, beta, desirable=1.5)
    weights = [f * answer_mask(w, p) for f, w, p in zip(factors, windows, PROMPTS, strict=True)]

    def expected(model):
        of = [logps(model, *each)[0] for each in zip(windows, PROMPTS, strict=True)]
        constants = ([each.reference for each in answers], [each.logp for each in others])
        constants += ([each.reference for each in others], [True, False])
        return TRL(beta).kto(mx.stack(of), *map(mx.array, constants))

    assert_same_training(model, expected, arch, ours, lora, windows, loss, weights)


class Bitsandbytes:
    """8-bit AdamW of bitsandbytes 0.50 in NumPy."""

    def __init__(self, size: int) -> None:
        self.maps = {signed: self.create_dynamic_map(signed) for signed in (True, False)}
        self.codes = {signed: np.zeros(size, np.uint8) for signed in (True, False)}
        self.absmax = {signed: np.zeros(-(-size // 256), np.float32) for signed in (True, False)}

    @staticmethod
    def create_dynamic_map(signed: bool, exponent_bits: int = 7) -> np.ndarray:
        data = []
        for i in range(exponent_bits):
            items = 2 ** (i if signed else i + 1) + 1
            boundaries = np.linspace(0.1, 1, items, dtype=np.float32)
            means = (boundaries[:-1] + boundaries[1:]) / np.float32(2)
            data += (np.float32(10.0 ** (i - exponent_bits + 1)) * means).tolist()
            if signed:
                data += (-np.float32(10.0 ** (i - exponent_bits + 1)) * means).tolist()
        return np.sort(np.array([*data, 0, 1], np.float32))

    def dequantized(self, signed: bool) -> np.ndarray:
        scales = np.repeat(self.absmax[signed], 256)[: self.codes[signed].size]
        return self.maps[signed][self.codes[signed]] * scales

    def quantize(self, signed: bool, x: np.ndarray) -> None:
        blocks = np.pad(x, (0, -x.size % 256)).reshape(-1, 256)
        absmax = np.abs(blocks).max(axis=1)
        absmax[absmax == 0] = 1
        code = self.maps[signed]
        indices = np.searchsorted((code[:-1] + code[1:]) / 2, blocks / absmax[:, None])
        self.codes[signed] = indices.reshape(-1)[: x.size].astype(np.uint8)
        self.absmax[signed] = absmax

    def step(self, p, g, number, lr, betas, eps, decay) -> np.ndarray:
        m = self.dequantized(True) * np.float32(betas[0]) + np.float32(1 - betas[0]) * g
        v = self.dequantized(False) * np.float32(betas[1]) + np.float32(1 - betas[1]) * g * g
        corrections = [1 - beta**number for beta in betas]
        denominator = np.sqrt(v) / np.float32(corrections[1] ** 0.5) + np.float32(eps)
        p = p * np.float32(1 - lr * decay) - np.float32(lr / corrections[0]) * m / denominator
        self.quantize(True, m)
        self.quantize(False, v)
        return p


def test_adamw8bit_is_that_of_bitsandbytes():
    """The reference has no bias correction. bitsandbytes gets step 10⁹, at which its correction
    is 1."""
    size, rate, betas, eps, decay = 1000, 1e-3, (0.9, 0.99), 1e-8, 0.1
    w, theirs = normal(size), Bitsandbytes(size)
    p, m, v = np.array(w), *(reference.quantize(mx.zeros(size), signed) for signed in (True, False))
    scale = mx.exp(3 * normal(size))
    for _ in range(30):
        g = scale * normal(size)
        w, m, v = reference.adamw8bit(w, g, m, v, rate, betas, eps, decay)
        p = theirs.step(p, np.array(g), 10**9, rate, betas, eps, decay)
        assert_close("w", w, mx.array(p))
        for moment, signed in ((m, True), (v, False)):
            assert_close("scales", moment.scales, mx.array(theirs.absmax[signed]))
            # Some numbers of bitsandbytes' map differ from the reference's in the last bit, so the
            # nearest codes may differ by one.
            far = np.array(moment.codes).astype(int) - theirs.codes[signed]
            assert np.abs(far).max() <= 1 and (far != 0).mean() < 5e-3
            theirs.codes[signed] = np.array(moment.codes)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_the_nearest_and_of_two_the_lower(signed):
    numbers = reference.dynamic_map(signed)
    assert numbers.size == 256 and (numbers[1:] > numbers[:-1]).all().item()
    assert_close("map", numbers, mx.array(Bitsandbytes.create_dynamic_map(signed)))
    own = reference.quantize(numbers, signed)
    assert own.codes.tolist() == list(range(256))
    assert mx.array_equal(reference.dequantize_moment(own, signed), numbers)
    middles = (numbers[:-1] + numbers[1:]) / 2
    at_middles = reference.quantize(mx.concatenate([middles, mx.array([1.0])]), signed)
    assert at_middles.codes.tolist() == [*range(255), 255]
    x = mx.concatenate([normal(256), mx.zeros(256), 1e-12 * normal(100)])
    x = x if signed else mx.square(x)
    back = reference.dequantize_moment(reference.quantize(x, signed), signed)
    for start, end in ((0, 256), (256, 512), (512, 612)):
        largest = mx.abs(x[start:end]).max()
        assert (mx.abs(back - x)[start:end] <= 0.0071 * largest).all().item()


def test_pack():
    assert reference.pack([3, 4, 2, 6, 3, 9, 1], 8) == [[0, 1, 2], [3, 4], [5], [6]]
    lengths = np.random.default_rng(0).integers(40, 121, 1000).tolist()
    packed = reference.pack(lengths, 512)
    assert sorted(itertools.chain(*packed)) == list(range(1000))
    filled = [sum(lengths[record] for record in each) for each in packed]
    assert max(filled) <= 513
    assert sum(filled) / len(filled) > 0.95 * 512


def test_step_window_visits_all_windows_in_strides():
    for windows in (1, 2, 3, 4, 26, 100, 1000, 1001):
        order = [reference.step_window(step, 3, windows) for step in range(windows)]
        assert sorted(order) == list(range(windows)) and order[0] == 3 % windows
    # The stride is the smallest integer of at least 0.618 · 100 that is coprime to 100: 63.
    assert [reference.step_window(step, 0, 100) for step in range(4)] == [0, 63, 26, 89]
