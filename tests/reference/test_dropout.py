import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from helpers.derivatives import normal
from helpers.models import FAMILIES
from mesp import reference
from mesp.models.architecture import Architecture

T, WIDTH = 256, 256
HALF = (1 << 32) - 1
DROPOUT = reference.Dropout(0.3, seed=7, step=11, sequence=2)


def kept(key: int, p: float, rows: int = T, width: int = WIDTH) -> np.ndarray:
    return np.array(reference.dropout_mask(key, p, rows, width)) > 0


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def hash_of(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & HALF
    x = (x ^ x >> 15) * 0x846CA68B & HALF
    return x ^ x >> 16


def is_kept(key: int, p: float, token: int, number: int) -> bool:
    of_token, of_input = hash_of(token + key & HALF), hash_of(number + (key >> 32) & HALF)
    return of_token * (of_input | 1) & HALF >= int(float(np.float32(p)) * 2**32)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 3, 0xFFFFFFFE00000001, 9051668793697793611])
def test_a_mask_follows_from_its_key(key, p):
    factor = np.float32(1) / (np.float32(1) - np.float32(p))
    expected = [[factor * is_kept(key, p, t, j) for j in range(40)] for t in range(9)]
    mask = reference.dropout_mask(key, p, 9, 40)
    assert mask.dtype == mx.float32
    assert np.array_equal(np.array(mask), np.array(expected, np.float32))


def test_the_limit_is_that_of_a_float32():
    """0.9 is slightly smaller in float32, which the trainer uses, than in float64. The tested
    input's hash lies between the two limits, so the input is kept.
    """
    key, number = 574, 111342
    assert reference.dropout_mask(key, 0.9, 1, number + 1)[0, number] > 0


def test_a_mask_is_a_part_of_a_larger_one():
    whole = reference.dropout_mask(5, 0.3, 40, 60)
    assert mx.array_equal(reference.dropout_mask(5, 0.3, 7, 9), whole[:7, :9])


def test_a_key_follows_from_seed_step_sequence_block_and_layer():
    of = [7, 11, 2, 4, 6]
    key = 0
    for number in of:
        key = reference.scattered(key + number)
    assert DROPOUT.key(4, 6) == key
    keys = {
        reference.Dropout(0.3, seed, step, sequence).key(block, layer)
        for seed, step, sequence, block, layer in itertools.product(range(5), repeat=5)
    }
    assert len(keys) == 5**5


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_of_a_block_has_a_mask(family):
    arch = Architecture.from_config(FAMILIES[family])
    for i in map(arch.blocks.index, arch.kinds):
        frozen = DROPOUT.masks(i, arch.blocks[i], 5)
        block = arch.training_experts().blocks[i]
        masks = DROPOUT.masks(i, block, 5)
        assert list(masks) == list(block.adapted()) and list(frozen) == list(block.modules)
        for layer, (name, (*stack, _, width)) in enumerate(block.adapted().items()):
            key = DROPOUT.key(i, layer)
            assert masks[name].shape == (*stack, 5, width)
            if stack:
                key, mask = reference.scattered(key + 1 + 1), masks[name][1]
            else:
                mask = masks[name]
                assert mx.array_equal(mask, frozen[name])
            assert mx.array_equal(mask, reference.dropout_mask(key, 0.3, 5, width))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    for step in range(10):
        mask = np.array(reference.dropout_mask(DROPOUT._replace(step=step).key(0, 0), p, T, WIDTH))
        assert set(np.unique(mask)) == {0, np.float32(1) / np.float32(1 - np.float32(p))}
        deviation = np.sqrt(p * (1 - p) / mask.size)
        assert abs((mask == 0).mean() - p) < 5 * deviation
    for axis in (0, 1):
        deviations = np.sqrt(p * (1 - p) / WIDTH)
        shares = (mask == 0).mean(axis=axis)
        assert abs(shares.mean() - p) < 5 * deviation
        if p * WIDTH > 20:
            assert np.abs(shares - p).max() < 5 * deviations


def test_masks_of_other_keys_are_independent():
    numbers = [(0, 0, 0, 0, 0)]
    numbers += [tuple(int(i == at) for i in range(5)) for at in range(5)]
    numbers += [tuple(2 * int(i == at) for i in range(5)) for at in range(5)]
    keys = [
        reference.Dropout(0.3, seed, step, sequence).key(block, layer)
        for seed, step, sequence, block, layer in numbers
    ]
    keys += [reference.scattered(keys[0] + 1 + expert) for expert in range(3)]
    masks = [kept(key, 0.3) for key in keys]
    for a, b in itertools.combinations(masks, 2):
        assert abs(correlation(a, b)) < 5 / np.sqrt(a.size)
        for moved in (np.roll(b, 1, axis=0), np.roll(b, 1, axis=1), b.T):
            assert abs(correlation(a, moved)) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_tokens_and_inputs_are_independent(p):
    for mask in (kept(DROPOUT.key(3, 2), p, 64, 4096), kept(DROPOUT.key(3, 2), p, 4096, 64).T):
        pairs = np.corrcoef(mask)[np.triu_indices(64, 1)]
        assert np.abs(pairs).max() < 5 / np.sqrt(4096)
        assert abs(pairs.mean()) < 5 / np.sqrt(4096 * pairs.size)
        assert abs(4096 * np.square(pairs).mean() - 1) < 5 * np.sqrt(2 / pairs.size)


def test_the_mean_over_steps_is_the_input():
    mx.random.seed(0)
    x, p, steps = np.array(normal(4, 8)), 0.3, 4000
    masks = np.stack(
        [
            np.array(reference.dropout_mask(DROPOUT._replace(step=step).key(0, 0), p, 4, 8))
            for step in range(steps)
        ]
    )
    deviation = np.abs(x) * np.sqrt(p / (1 - p) / steps)
    assert (np.abs((x * masks).mean(axis=0) - x) < 5 * deviation).all()


def test_mlx_lm_drops_as_many_and_scales_as_much():
    mx.random.seed(0)
    p, ones = 0.3, mx.ones((T, WIDTH))
    theirs = np.array(LoRALinear(WIDTH, 8, r=2, dropout=p).dropout(ones))
    ours = np.array(reference.dropout_mask(1, p, T, WIDTH))
    assert np.allclose(np.unique(ours), np.unique(theirs), rtol=1e-6, atol=0)
    deviation = np.sqrt(2 * p * (1 - p) / ours.size)
    assert abs((ours == 0).mean() - (theirs == 0).mean()) < 5 * deviation
