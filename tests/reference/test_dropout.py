import itertools

import mlx.core as mx
import numpy as np
import pytest

from helpers.models import FAMILIES
from mesp import reference
from mesp.models.architecture import Architecture

HALF = (1 << 32) - 1
DROPOUT = reference.Dropout(0.3, seed=7, step=11, sequence=2)


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
