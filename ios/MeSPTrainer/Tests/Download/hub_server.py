"""Serves a folder's files as the Hub does, with faults for tests.

    python hub_server.py FOLDER FAULTS

FAULTS is a JSON object: for a path, the list of the faults of its responses, in order. The path of
the list of files is `api`. A fault is one of these:

- `cut`: the connection is closed in the middle of the body.
- `stall`: nothing is sent after the middle of the body; 30 seconds later the connection is closed.
- `flip`: the file's first byte is changed.
- `long`, `short`: more, or fewer, bytes are sent than the file has.
- `whole`: the whole file is sent in response to a range request.
- `other`: the response's range begins one byte later than the requested range.
- `trickle`: the first half is sent slowly, byte by byte, until someone requests `/go-on`.
- `expired`: the response redirects to another host. That host refuses the request.
- a number: the response has this status.
- an object: the response's body is the text in `answer`, repeated `times` times (default 1).

The server prints its port, and then each request for a file or the list, with its Range.
"""

import hashlib
import json
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef"
going = threading.Event()
folder, faults = Path(sys.argv[1]), json.loads(sys.argv[2])


def file_list() -> bytes:
    """Returns the Hub's list of a model's files. Only safetensors files have a SHA-256."""
    siblings = []
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            entry = {"rfilename": file.relative_to(folder).as_posix(), "size": len(data)}
            if file.suffix == ".safetensors":
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append({**entry, "blobId": hashlib.sha1(data).hexdigest()})
    return json.dumps({"id": "someone/model", "sha": COMMIT, "siblings": siblings}).encode()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/expired":
            return self.answer(403)
        if self.path == "/go-on":
            going.set()
            return self.answer(200)
        is_list = re.fullmatch(r"/api/models/\w+/[\w.-]+/revision/main\?blobs=true", self.path)
        revision, _, path = self.path.partition("/resolve/")[2].partition("/")
        if is_list:
            path = "api"
        elif revision != COMMIT and path != "manifest.json":
            path = "of another commit"
        asked = self.headers.get("Range")
        # one write, because several threads print
        print(f"{path} {asked or 'whole'}\n", end="", flush=True)
        left = faults.get(path, [])
        fault = left.pop(0) if left else None
        file = folder / path
        if isinstance(fault, int) or not (is_list or file.is_file()):
            return self.answer(fault if isinstance(fault, int) else 404)
        if fault == "expired":
            return self.answer(302, f"http://localhost:{server.server_address[1]}/expired")
        data = file_list() if is_list else file.read_bytes()
        if isinstance(fault, dict):
            data = fault["answer"].encode() * fault.get("times", 1)
        if fault == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if asked and fault != "whole":
            if start >= len(data):
                return self.answer(416)
            self.send_response(206)
            begin = start + 1 if fault == "other" else start
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            data = data[start:]
        else:
            self.send_response(200)
        if fault == "long":
            data += b"more"
        if fault == "short":
            data = data[:-1]
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        if fault == "trickle":
            for place in range(half):
                self.wfile.write(data[place : place + 1])
                going.wait(0.005)
        else:
            self.wfile.write(data[:half])
        self.wfile.flush()
        if fault == "stall":
            time.sleep(30)
        if fault in ("stall", "cut"):
            self.close_connection = True
            return
        self.wfile.write(data[half:])

    def answer(self, status, location=None):
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def end_with_input():
    sys.stdin.read()
    os._exit(0)


threading.Thread(target=end_with_input, daemon=True).start()
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
