import json
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = settings(
    max_examples=int(os.environ.get("MESP_FUZZ_CASES", 200)),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "blocks/00.bin", "blocks", "a\0b", "uint32"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def paths(value: object, path: tuple = ()) -> list[tuple]:
    inner = []
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    return [path, *(each for key, part in inner for each in paths(part, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, value: object) -> object:
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        inner = [path for path in paths(value) if path]
        if not inner:
            break
        path = draw(st.sampled_from(inner))
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.booleans()) and isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent[path[-1]] = draw(JSON)
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data)))
    middle = draw(st.binary(max_size=9))
    rest = data[at + len(middle) :] if draw(st.booleans()) else b""
    return data[:at] + middle + rest


def texts(original: bytes) -> st.SearchStrategy[bytes]:
    values = changed(json.loads(original)).map(lambda value: json.dumps(value).encode())
    return st.just(original) | damaged(original) | values
