import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops

from helpers.derivatives import check, normal
from mesp import reference


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(0)


def with_batch(function):
    def rule(q, k, v, log_g, beta):
        by_token = [each.swapaxes(0, 1)[None] for each in (q, k, v, mx.exp(log_g), beta)]
        return function(*by_token)[0][0].swapaxes(0, 1)

    return rule


def rule_inputs(T: int, heads: tuple[int, int], sizes: tuple[int, int], decay: str) -> dict:
    (Hk, Hv), (dk, dv) = heads, sizes
    q, k = normal(Hk, T, dk), normal(Hk, T, dk)
    if decay == "near keys":
        k = 0.1 * k + normal(Hk, 1, dk)
    q, k = reference.rms_norm(q, 1 / dk, 1e-6), reference.rms_norm(k, dk**-0.5, 1e-6)
    log_g = {
        "strong": -20 * mx.random.uniform(shape=(Hv, T)),
        "weak": -1e-4 * mx.random.uniform(shape=(Hv, T)),
        "near keys": -1e-4 * mx.random.uniform(shape=(Hv, T)),
        "mixed": -mx.exp(3 * normal(Hv, T) - 2),
    }[decay]
    beta = mx.sigmoid(normal(Hv, T))
    if decay == "near keys":
        beta = mx.sigmoid(normal(Hv, T) + 3)
    return {"q": q, "k": k, "v": normal(Hv, T, dv), "log_g": log_g, "beta": beta}


SMALL = [(1, (1, 1), (8, 8)), (7, (2, 2), (8, 16)), (65, (1, 3), (16, 8)), (256, (2, 4), (16, 16))]
CASES = [(*small, decay) for small in SMALL for decay in ("strong", "weak", "mixed", "near keys")]


@pytest.mark.parametrize(
    ("T", "heads", "sizes", "decay"), [*CASES, (1024, (1, 2), (8, 8), "mixed")]
)
def test_gated_delta_rule(T, heads, sizes, decay):
    inputs = rule_inputs(T, heads, sizes, decay)
    check(
        reference.gated_delta_rule,
        lambda out, dy: reference.gated_delta_rule_backward(*inputs.values(), dy),
        with_batch(gated_delta_ops),
        inputs,
        zeros=("log_g",) if T == 1 else (),
    )


@pytest.mark.parametrize("rate", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(
    ("T", "heads", "groups", "P", "N"),
    [(1, 1, 1, 4, 4), (7, 2, 1, 8, 4), (65, 4, 2, 4, 8), (200, 3, 1, 8, 16)],
)
def test_state_space(T, heads, groups, P, N, rate):
    A_log, D = mx.log(rate * (0.5 + mx.random.uniform(shape=(heads,)))), normal(heads)
    inputs = {"x": normal(heads, T, P), "dt": 0.01 + mx.random.uniform(shape=(heads, T))}
    inputs |= {"B": normal(groups, T, N), "C": normal(groups, T, N)}

    def by_token(x, dt, B, C):
        decay = mx.exp(-mx.exp(A_log)[:, None] * dt)
        B, C = (mx.repeat(each, heads // groups, axis=0) for each in (B, C))
        S, rows = mx.zeros((heads, P, N)), []
        for t in range(T):
            written = (dt[:, t, None] * x[:, t])[..., None] * B[:, t, None]
            S = decay[:, t, None, None] * S + written
            rows.append((S * C[:, t, None]).sum(axis=-1) + D[:, None] * x[:, t])
        return mx.stack(rows, axis=1)

    check(
        lambda *arrays: reference.state_space(*arrays, -mx.exp(A_log), D),
        lambda y, dy: reference.state_space_backward(*inputs.values(), -mx.exp(A_log), D, dy),
        by_token,
        inputs,
    )


def test_log_decay():
    vectors = mx.log(16 * mx.random.uniform(shape=(4,))), normal(4)
    check(
        lambda a: reference.log_decay(a, *vectors),
        lambda y, dy: [reference.log_decay_backward(inputs["a"], dy, *vectors)],
        lambda a: mx.log(compute_g(vectors[0], a, vectors[1])),
        inputs := {"a": normal(1, 9, 4)},
    )
    assert reference.log_decay(mx.array(100.0), mx.log(mx.array(16.0)), 0.0).item() == -1600
