"""The starter pack's download, from a local server that also misbehaves as real ones do; and what else is pinned."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from support.server import Answer, Server

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "dev" / "download_starter_pack.sh"
PACK = {
    "tiny_shakespeare_val.bin": "data/", "tiny_shakespeare_train.bin": "data/", "gpt2_tokenizer.bin": "",
    "gpt2_124M.bin": "", "gpt2_124M_debug_state.bin": "",
}  # fmt: skip
MODEL, HALF = "gpt2_124M.bin", 1500

pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")


def test_the_base_image_and_the_actions_are_pinned_and_no_workflow_may_change_the_repository():
    assert re.findall(r"^FROM \S+@sha256:[0-9a-f]{64}$", (ROOT / "Dockerfile").read_text(), re.M)
    for path in (ROOT / ".github" / "workflows").iterdir():
        text = path.read_text()
        assert re.search(r"\n *permissions:\n *contents: read\n", text)
        assert "contents: write" not in text and "write-all" not in text
        assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", used) for used in re.findall("uses: (.*)", text))


@pytest.fixture
def server(rng):
    with Server({name: rng.bytes(2 * HALF) for name in PACK}) as server:
        yield server


@pytest.fixture
def root(tmp_path, server):
    """A repository with nothing but the script in it, which expects the SHA-256 of the server's files."""
    text = SCRIPT.read_text()
    for name, data in server.files.items():
        own = hashlib.sha256(data).hexdigest()
        text, count = re.subn(rf"( {re.escape(name)}) [0-9a-f]{{64}}\n", rf"\1 {own}\n", text)
        assert count == 1
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / SCRIPT.name).write_text(text)
    return tmp_path


def run(root: Path, url: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        ["bash", "dev/download_starter_pack.sh"], cwd=root, capture_output=True, text=True, timeout=60,
        env=environment | {"LLMC_STARTER_PACK_URL": url, "PATH": path},
    )  # fmt: skip


def assert_completes(root: Path, server: Server) -> str:
    """Runs the script. Returns what it prints."""
    result = run(root, server.url)
    assert result.returncode == 0, result.stderr
    assert files(root) == {f"{PACK[name]}{name}": data for name, data in server.files.items()}
    return result.stdout


def files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and path.name != SCRIPT.name)
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_the_files_arrive_where_the_defaults_look_and_a_second_run_fetches_nothing(root, server):
    assert_completes(root, server)
    server.requests.clear()
    assert assert_completes(root, server).count("is there already") == 5 and server.requests == []


def not_found(whole: bytes, start: int) -> Answer:
    return 404, b"<!DOCTYPE html><title>Sorry</title>" * 40, None


def broken_off(whole: bytes, start: int) -> Answer:
    """Says how much there is, and hangs up halfway."""
    return 200, whole[:HALF], len(whole)


def changed(whole: bytes, start: int) -> Answer:
    return 200, whole[:-1] + bytes([whole[-1] ^ 1]), None


@pytest.mark.parametrize("name, part, answer, said, left", [
    *((name, 0, changed, "what the server sent is bad: its SHA-256 is not", 0) for name in PACK),
    ("gpt2_tokenizer.bin", 0, not_found, "the server answered 404", 0),
    (MODEL, 0, broken_off, "run this again to go on", HALF), (MODEL, 700, not_found, "the server answered 404", 700),
])  # fmt: skip
def test_a_run_that_fails_says_why_and_the_next_one_goes_on_with_the_part_that_is_left(
    root, server, name, part, answer, said, left
):
    half = root / f"{PACK[name]}{name}.part"
    if part:
        half.write_bytes(server.files[name][:part])
    server.answers[name] = [answer]
    result = run(root, server.url)
    last_line = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and "error: " in last_line and f"/{name}: " in last_line and said in last_line
    assert files(root).get(f"{PACK[name]}{name}.part", b"") == server.files[name][:left]
    assert not (root / PACK[name] / name).exists() and len(files(root)) == list(PACK).index(name) + bool(left)
    server.requests.clear()
    assert_completes(root, server)
    assert server.requests[0] == (name, left)


def of_another_version(whole: bytes) -> bytes:
    """It begins like the file and is shorter, so only the checksum tells."""
    return whole[:500] + bytes([whole[500] ^ 1]) + whole[501:HALF]


def without_ranges(whole: bytes, start: int) -> Answer:
    return 200, whole, None


@pytest.mark.parametrize("part, answers, said", [
    (lambda whole: b"<!DOCTYPE html>" * 99, [], "of another file or version"),
    (lambda whole: b"x" * 10**6, [], ""), (lambda whole: b"", [], ""),
    (of_another_version, [], "of another file or version"), (lambda whole: whole[:HALF], [without_ranges] * 2, ""),
], ids=["page", "too long", "empty", "version", "no ranges"])  # fmt: skip
def test_a_part_that_cannot_be_gone_on_with_is_fetched_anew(root, server, part, answers, said):
    (root / f"{MODEL}.part").write_bytes(part(server.files[MODEL]))
    server.answers[MODEL] = answers
    assert said in assert_completes(root, server)


def test_without_a_connection_the_exit_status_is_1(root, server):
    server.shutdown()
    server.server_close()
    result = run(root, server.url)
    assert result.returncode == 1 and "cannot be fetched" in result.stderr.splitlines()[-1] and files(root) == {}


def test_only_https_is_used_also_after_a_redirect(root, tmp_path):
    """A curl that notes what it is called with: there is no server with a certificate here."""
    (tmp_path / "curl").write_text('#!/bin/sh\necho "$*" >&2\nexit 7\n')
    (tmp_path / "curl").chmod(0o755)
    for url, schemes in ("", "=https"), ("https://a.example", "=https"), ("http://a.example", "=http,https"):
        result = run(root, url, f"{tmp_path}:{os.environ['PATH']}")
        assert result.returncode == 1 and f"--proto {schemes} --proto-redir {schemes} " in result.stderr
