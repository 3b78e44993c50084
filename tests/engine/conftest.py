from collections.abc import Iterator

import pytest

from helpers.models import dequantize_once


@pytest.fixture(scope="module")
def fast_oracle() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        dequantize_once(patch)
        yield
