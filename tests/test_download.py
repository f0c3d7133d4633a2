"""The starter pack's download, from a local server that also misbehaves as real ones do; and what else is pinned."""

import hashlib
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dev.debug_state import DebugState, read_debug_state, write_debug_state
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.token_file import open_tokens, write_tokens
from llmc.data.tokenizer import write_tokenizer
from llmc.files.model_file import read_model, write_model
from llmc.model.tensors import num_parameters
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "dev" / "download_starter_pack.sh"
TINY = GPT2Config(max_seq_len=8, vocab_size=50, num_layers=2, num_heads=2, channels=6)
PACK = {
    "tiny_shakespeare_val.bin": "data",
    "tiny_shakespeare_train.bin": "data",
    "gpt2_tokenizer.bin": ".",
    "gpt2_124M.bin": ".",
    "gpt2_124M_debug_state.bin": ".",
}

ROOT = SCRIPT.parents[1]

pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")


def test_the_base_image_and_the_actions_are_pinned_and_the_workflow_may_only_read():
    assert re.findall(r"^FROM \S+@sha256:[0-9a-f]{64}$", (ROOT / "Dockerfile").read_text(), re.M)
    for path in (ROOT / ".github" / "workflows").iterdir():
        text = path.read_text()
        assert "\npermissions:\n  contents: read\n" in text
        assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", used) for used in re.findall("uses: (.*)", text))


class Server(ThreadingHTTPServer):
    """Serves `files`, ranges included. A request for a path in `answers` gets that answer instead, once each."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.answers, self.requests = files, {}, []
        self.url = f"http://127.0.0.1:{self.server_port}/main"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.rpartition("/")[2]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.server.requests.append((name, start))
        answers = self.server.answers.get(name)
        status, body, length = answers.pop(0)(self.server.files[name], start) if answers else (None, None, None)
        if status is None:
            whole = self.server.files[name]
            if start >= len(whole):
                status, body = 416, b""
            else:
                status, body = (206 if start else 200), whole[start:]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{start + len(body)}")
        if length != -1:
            self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def error_page(status):
    return lambda whole, start: (status, b"<!DOCTYPE html><title>Sorry</title>" * 40, None)


def broken_off(whole, start):
    """Says how much there is, and hangs up halfway."""
    rest = whole[start:]
    return (206 if start else 200), rest[: len(rest) // 2], len(rest)


@pytest.fixture
def pack(tmp_path, rng):
    """The five files, small but of the right formats."""
    folder = tmp_path / "pack"
    folder.mkdir()
    write_tokens(folder / "tiny_shakespeare_val.bin", rng.integers(0, 50, 300))
    write_tokens(folder / "tiny_shakespeare_train.bin", rng.integers(0, 50, 3001))
    tokens = [rng.bytes(size) for size in rng.integers(1, 255, 50)]
    write_tokenizer(folder / "gpt2_tokenizer.bin", tokens, 49)
    n = num_parameters(TINY)
    write_model(folder / "gpt2_124M.bin", TINY, rng.standard_normal(n).astype(np.float32))
    x = np.zeros((2, 3), np.int32)
    write_debug_state(folder / "gpt2_124M_debug_state.bin", DebugState(x, x, np.zeros((2, 3, 50)), 1.0, np.zeros(n)))
    return folder


@pytest.fixture
def server(pack):
    server = Server({name: (pack / name).read_bytes() for name in PACK})
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def root(tmp_path, pack):
    """A repository with nothing but the script in it, which expects the SHA-256 of the small files."""
    (tmp_path / "repository" / "dev").mkdir(parents=True)
    text = SCRIPT.read_text()
    for name in PACK:
        own = hashlib.sha256((pack / name).read_bytes()).hexdigest()
        text, count = re.subn(rf"( {re.escape(name)}) [0-9a-f]{{64}}\n", rf"\1 {own}\n", text)
        assert count == 1
    (tmp_path / "repository" / "dev" / SCRIPT.name).write_text(text)
    return tmp_path / "repository"


def run(root, url, *args):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        ["bash", "dev/download_starter_pack.sh", *args], cwd=root, env=environment | {"LLMC_STARTER_PACK_URL": url},
        capture_output=True, text=True, timeout=60,
    )


def files(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*") if path.is_file() and path.parent.name != "dev"
    }


def whole_pack(server):
    return {os.path.normpath(f"{folder}/{name}"): server.files[name] for name, folder in PACK.items()}


def last_line(result):
    return result.stderr.strip().splitlines()[-1]


def test_the_files_arrive_where_the_defaults_look_and_load(root, server):
    result = run(root, server.url)
    assert result.returncode == 0, result.stderr
    assert files(root) == whole_pack(server)
    config, _ = read_model(root / "gpt2_124M.bin", GPT2Config)
    assert config == TINY
    read_debug_state(root / "gpt2_124M_debug_state.bin", config)
    assert open_tokenizer(root / "gpt2_tokenizer.bin").vocab_size == 50
    assert open_tokens(root / "data" / "tiny_shakespeare_train.bin").size == 3001


def test_a_second_run_fetches_nothing(root, server):
    run(root, server.url)
    server.requests.clear()
    result = run(root, server.url)
    assert result.returncode == 0 and server.requests == []
    assert result.stdout.count("is there already") == 5


def test_an_error_status_is_an_error_and_leaves_nothing_behind(root, server):
    server.answers["gpt2_tokenizer.bin"] = [error_page(404)] * 9
    result = run(root, server.url)
    assert result.returncode == 1
    assert "error: " in last_line(result) and "gpt2_tokenizer.bin" in last_line(result)
    assert sorted(files(root)) == ["data/tiny_shakespeare_train.bin", "data/tiny_shakespeare_val.bin"]


def test_a_transfer_that_breaks_off_is_resumed_by_the_next_run(root, server):
    server.answers["gpt2_124M.bin"] = [broken_off]
    result = run(root, server.url)
    assert result.returncode == 1 and "run this again to go on" in last_line(result)
    half = len(server.files["gpt2_124M.bin"]) // 2
    assert not (root / "gpt2_124M.bin").exists()
    assert (root / "gpt2_124M.bin.part").stat().st_size == half
    server.requests.clear()
    assert run(root, server.url).returncode == 0
    assert server.requests[0] == ("gpt2_124M.bin", half)
    assert files(root) == whole_pack(server)


@pytest.mark.parametrize("part", [b"<!DOCTYPE html>" * 99, b"x" * 10**6, b""], ids=["page", "too long", "empty"])
def test_a_part_that_cannot_be_gone_on_with_is_fetched_anew(root, server, part):
    (root / "gpt2_124M.bin.part").write_bytes(part)
    result = run(root, server.url)
    assert result.returncode == 0, result.stderr
    assert files(root) == whole_pack(server)


def test_without_a_connection_the_exit_status_is_1(root, server):
    server.shutdown()
    server.server_close()
    result = run(root, server.url)
    assert result.returncode == 1 and "cannot be fetched" in last_line(result)
    assert files(root) == {}


def without_ranges(whole, start):
    return 200, whole, None


def test_a_server_that_is_down_for_a_while_costs_no_progress(root, server):
    part = server.files["gpt2_124M.bin"][:2000]
    (root / "gpt2_124M.bin.part").write_bytes(part)
    server.answers["gpt2_124M.bin"] = [error_page(404)]
    result = run(root, server.url)
    assert result.returncode == 1 and "the server answered 404" in last_line(result)
    assert files(root)["gpt2_124M.bin.part"] == part
    assert run(root, server.url).returncode == 0
    assert server.requests[-2] == ("gpt2_124M.bin", 2000)
    assert files(root) == whole_pack(server)


def test_a_server_without_ranges_sends_all_again(root, server):
    (root / "gpt2_124M.bin.part").write_bytes(server.files["gpt2_124M.bin"][:2000])
    server.answers["gpt2_124M.bin"] = [without_ranges] * 2
    result = run(root, server.url)
    assert result.returncode == 0, result.stderr
    assert files(root) == whole_pack(server)


def test_a_part_of_another_version_is_not_mixed_with_this_one(root, server):
    """It begins like the file and is shorter, so only the checksum tells."""
    part = bytearray(server.files["gpt2_124M.bin"][:2000])
    part[1500] ^= 1
    (root / "gpt2_124M.bin.part").write_bytes(part)
    result = run(root, server.url)
    assert result.returncode == 0 and "of another file or version" in result.stdout, result.stderr
    assert files(root) == whole_pack(server)


def changed(whole, start):
    return 200, whole[:-1] + bytes([whole[-1] ^ 1]), None


@pytest.mark.parametrize("name", PACK)
def test_a_file_with_another_byte_is_refused(root, server, name):
    server.answers[name] = [changed]
    result = run(root, server.url)
    assert result.returncode == 1 and f"{name}: what the server sent is bad: its SHA-256 is not" in last_line(result)
    assert not any(name in file for file in files(root))
    assert run(root, server.url).returncode == 0
    assert files(root) == whole_pack(server)


def test_only_https_is_used_also_after_a_redirect(root, tmp_path):
    """A curl that notes what it is called with: there is no server with a certificate here."""
    (tmp_path / "curl").write_text('#!/bin/sh\necho "$*" >&2\nexit 7\n')
    (tmp_path / "curl").chmod(0o755)
    for url, schemes in ("", "=https"), ("https://a.example", "=https"), ("http://a.example", "=http,https"):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LLMC_STARTER_PACK_URL": url}
        command = ["bash", "dev/download_starter_pack.sh"]
        result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert result.returncode == 1
        assert f"--proto {schemes} --proto-redir {schemes} " in result.stderr
