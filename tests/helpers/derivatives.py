import mlx.core as mx

TOLERANCE = 1e-5


def relative_error(actual: mx.array, expected: mx.array) -> float:
    assert actual.shape == expected.shape
    return (mx.linalg.norm(actual - expected) / mx.linalg.norm(expected)).item()


def assert_close(name: str, actual: mx.array, expected: mx.array) -> None:
    error = relative_error(actual, expected)
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def normal(*arch: int) -> mx.array:
    return mx.random.normal(arch)


def check(forward, backward, oracle, inputs: dict[str, mx.array], zeros=()) -> None:
    """Checks that `forward` and `oracle` have the same output, and that `backward` returns the
    gradients of both.

    Gradients whose names are in `zeros` must be zero within rounding.
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
