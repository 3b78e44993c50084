"""A fake of Flower's SuperLink with the Fleet protocol over HTTP."""

import hashlib
import io
import json
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def fixed64(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 1) + value


def an_object(kind: str, children: list[str], body: bytes) -> tuple[str, bytes]:
    content = f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body
    return hashlib.sha256(content).hexdigest(), content


class SuperLink:
    """Without a function, a call gets a default answer."""

    def __init__(self, **answers: Callable[[BaseHTTPRequestHandler], bytes | None]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                name = self.path.rsplit("/", 1)[-1]
                self.body = self.rfile.read(int(self.headers["content-length"] or 0))
                outer.calls.append((name, dict(self.headers)))
                default = {"activate-node": field(1, 5), "send-node-heartbeat": field(1, 1)}
                answer = outer.answers.get(name.replace("-", "_"))
                body = default.get(name, b"") if answer is None else answer(self)
                if body is not None:
                    self.send_response(200)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            sent = 0  # bytes of endless answers

            def handle_error(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> "SuperLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def message(objects: list[str], created: float | None = None) -> bytes:
    created = time.time() if created is None else created
    root = objects[0]
    metadata = field(1, 7) + field(2, root.encode()) + field(3, 1) + field(4, 5)
    metadata += field(6, b"1") + fixed64(7, struct.pack("<d", 3600.0)) + field(8, b"train")
    metadata += fixed64(9, struct.pack("<d", created))
    tree = field(1, root.encode())
    for child in objects[1:]:
        tree += field(2, field(1, child.encode()))
    return field(2, field(1, metadata)) + field(3, tree)


Value = float | int | bool | str | list[str]


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return field(4, int(value))
        case int():
            return field(2, 2 * value if value >= 0 else -2 * value - 1)
        case float():
            return fixed64(1, struct.pack("<d", value))
        case str():
            return field(5, value.encode())
        case _:
            return field(25, b"".join(field(1, text.encode()) for text in value))


def question(arrays: dict[str, np.ndarray], config: dict[str, Value]) -> dict[str, bytes]:
    """The first object is the root."""
    objects: dict[str, bytes] = {}

    def add(kind: str, children: list[str], body: bytes) -> str:
        made, content = an_object(kind, children, body)
        objects[made] = content
        return made

    def named(kind: str, ids: dict[str, str]) -> str:
        return add(kind, list(dict.fromkeys(ids.values())), json.dumps(ids).encode())

    def array(numbers: np.ndarray) -> str:
        file = io.BytesIO()
        np.save(file, numbers)
        shape, dtype = list(numbers.shape), numbers.dtype.name
        kind = {"dtype": dtype, "shape": shape, "stype": "numpy.ndarray", "arraychunk_ids": [0]}
        chunk = add("ArrayChunk", [], file.getvalue())
        return add("Array", [chunk], json.dumps(kind).encode())

    items = [
        field(1, field(1, name.encode()) + field(2, _value(value)))
        for name, value in config.items()
    ]
    records = {
        "arrays": named("ArrayRecord", {name: array(each) for name, each in arrays.items()}),
        "config": add("ConfigRecord", [], b"".join(items)),
    }
    root = add("Message", [named("RecordDict", records)], b"")
    return {root: objects.pop(root), **objects}


def asking(*questions: dict[str, bytes]) -> dict[str, Callable[[BaseHTTPRequestHandler], bytes]]:
    messages = iter([message([*objects]) for objects in questions])
    contents = {each: content for objects in questions for each, content in objects.items()}

    def pull(handler: BaseHTTPRequestHandler) -> bytes:
        wanted = next(each for each in contents if each.encode() in handler.body)
        return field(1, 1) + field(2, 1) + field(3, contents[wanted])

    return {"pull_messages": lambda _: next(messages, b""), "pull_object": pull}
