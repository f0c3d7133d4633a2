"""Makes a dataset of your own chats. It has the tokens of conversations, and marks those that a model does not learn.

    python dev/data/chat.py chats.jsonl --model qwen3_0.6B.bin --show 3        # shows what would be learned
    python dev/data/chat.py chats.jsonl --model qwen3_0.6B.bin -o data/chats

A record has "messages" with role and content, "conversations" with from and value, "prompt" and "completion", or
"instruction", perhaps "input", and "output"; a prompt and a completion may be lists of messages, too. The chat template
that came with the model makes a text of it, and the model's tokenizer the tokens, as transformers does.

Writes data/chats_{train,val}.bin, and the tokenizer and the template beside them. Of equal conversations one stays. A
hash of each decides whether it is for validation, whatever --learn says. A record that is no such conversation is left
out, and a line names the first one of each kind.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data import common
from dev.data.documents import File, records_of
from dev.data.text import LEAST, find_files, for_validation, listed, share, training_command
from device.errors import UserError, first_line
from device.host import free_memory
from device.progress import telling
from llmc.data.chat import ChatTemplate, conversation_of
from llmc.data.find_tokenizer import named_tokenizer
from llmc.data.hf_tokenizer import read_json
from llmc.data.token_file import MARK, UNMARKED, write_tokens
from llmc.data.tokenizer import Tokenizer, printable
from llmc.files.files import replacing
from llmc.run.arguments import Parser, a_path, positive

import numpy as np

KINDS = ("lines", "list", "parquet", "arrow")


def make_parser() -> Parser:
    parser = Parser(description="Make a dataset of conversations, of which a model learns the answers.")
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help="a file or folder of .jsonl .json .parquet .arrow, also packed as"
        f" {' '.join(common.PACKED)}; what datasets saved; OWNER/NAME[:CONFIG] of the Hugging Face hub")  # fmt: skip
    add("--model", metavar="DIR|FILE", type=a_path, required=True, help="has the tokenizer and the chat template: a"
        " .bin and what the import put beside it, a checkpoint, a folder, a tokenizer.json, gpt2 or bytes")  # fmt: skip
    add("-o", "--out", metavar="PREFIX", type=a_path, help="such as data/chats")
    add("--template", metavar="FILE", type=a_path, help="another chat template, of Jinja")
    add("--learn", choices=("all", "answers", "last"), default="answers", help="last: the last answer (%(default)s)")
    add("-t", "--sequence-length", metavar="T", type=positive, default=1024, help="of the training, where a longer"
        " conversation is cut (%(default)s)")  # fmt: skip
    add("--pack", choices=("rows", "one"), default="rows", help="rows: one conversation follows another; one: each has"
        " a row of T tokens to itself (%(default)s)")  # fmt: skip
    add("--split", metavar="NAME", default="train", help="of a data set that has several (%(default)s)")
    add("--val", metavar="F", type=share, default=0.05, help="share of the conversations for validation (%(default)s)")
    add("--show", metavar="N", type=positive, help="print N conversations, what is learned in colour or [], and end")
    return parser


def records(files: list[File]) -> Iterator[tuple[str, object]]:
    """All records, each with its place. Raises UserError where a file is damaged, or is of another kind."""
    for path, kind, *_ in files:
        if kind not in KINDS:
            raise UserError(f"{path}: conversations are records: use .jsonl, .json, .parquet or .arrow")
        done, blocks = 0, partial(common.blocks_of, path, "utf-8")
        try:
            for done, record in enumerate(records_of(path, kind, (), blocks), 1):  # noqa: B007  for the message
                yield f"{path}, record {done}", record
        except UserError:
            raise
        except Exception as error:  # of many kinds
            raise UserError(f"{path}, record {done + 1}: {type(error).__name__}: {first_line(error)}") from None


class Encoder:
    """Makes marked tokens of records. notes: how many records have each note, and places: the first ones. ends: the
    tokens that end an answer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, learn: str, longest: int) -> None:
        self.tokenizer, self.template, self.learn, self.longest = tokenizer, template, learn, longest
        self.notes, self.places, self.ends = Counter(), {}, set()

    def note(self, note: str, place: str) -> None:
        self.notes[note] += 1
        self.places.setdefault(note, place)

    def __call__(self, place: str, record: object) -> np.ndarray | None:
        """A conversation's tokens, int32, marked (llmc/data/token_file.py). None, and a note, if it has nothing to
        learn or cannot be learned."""
        try:
            messages, left_out = conversation_of(record)
            text, answers = self.template.answers(messages)
        except UserError as error:
            return self.note(f"left out: {error}", place)
        ids, places = self.tokenizer.encode_with_places(text)
        first, last = np.array(places).T
        answers = [(first < end) & (last > begin) for begin, end in answers]
        self.ends.update(np.array(ids)[answers[-1]][-1:].tolist())
        parts = {"all": [np.ones(len(ids), bool)], "answers": answers, "last": answers[-1:]}[self.learn]
        learned = np.logical_or.reduce(parts)
        learned[0] = False  # no token of the conversation stands before it
        tokens = np.where(learned, np.int32(ids), np.int32(ids) | MARK)[: self.longest]
        if not (tokens >= 0).any():
            return self.note(f"left out: nothing to learn in its first {self.longest} tokens", place)
        if len(ids) > self.longest:
            self.note(f"cut after {self.longest} tokens", place)
        for what in left_out:
            self.note(f"{what} left out", place)
        return tokens


def shown(tokens: np.ndarray, tokenizer: Tokenizer, colour: bool) -> str:
    """The text of marked tokens, what is learned in colour or in brackets."""
    before, after = ("\x1b[1;32m", "\x1b[0m") if colour else ("[", "]")
    text = ""
    for part in np.split(tokens, np.flatnonzero(np.diff(tokens >= 0)) + 1):
        spelled = printable(b"".join(tokenizer.decode(token) for token in part & UNMARKED).decode(errors="replace"))
        text += f"{before}{spelled}{after}" if part[0] >= 0 else spelled
    return text


def write_split(path: Path, conversations: list[np.ndarray], row: int, tokenizer: Tokenizer) -> None:
    """row: T, if each conversation has a row of T tokens; else 0."""
    nothing = np.int32(tokenizer.eot) | MARK
    if row:
        conversations = [np.pad(each, (0, row - len(each)), constant_values=nothing) for each in conversations]
        conversations.append(np.array([nothing]))  # a target for the last row's last token
    write_tokens(path, np.concatenate(conversations), tokenizer.vocab_size, True, row)


def write_ends(prefix: Path, ends: set[int]) -> None:
    """Adds the tokens that end an answer to those in generation_config.json: all programs end a text there, also
    transformers with the exported model."""
    path, config = (prefix.with_name(f"{prefix.name}_{name}.json") for name in ("generation_config", "config"))
    content, other = (read_json(file) if file.is_file() else {} for file in (path, config))
    known = next((found for of in (content, other) if (found := of.get("eos_token_id")) is not None), [])
    known = known if isinstance(known, list) else [known]
    if ends - {*known}:
        with replacing(path) as file:
            file.write(json.dumps(content | {"eos_token_id": known + sorted(ends - {*known})}, indent=2).encode())


def main() -> None:
    args = make_parser().parse_args()
    if not args.show and (not args.out or args.out.is_dir() or not args.out.name):
        raise UserError("-o must be a prefix of file names, such as data/chats; or --show N shows some conversations")
    paths = argparse.Namespace(paths=args.paths, split=args.split, suffix=[], separator=None, field=[])
    files = find_files(paths, Counter())
    path = named_tokenizer(args.model)
    tokenizer = common.load_tokenizer(str(path))
    template = ChatTemplate(path, tokenizer, args.template)
    encoder, found, duplicates = Encoder(tokenizer, template, args.learn, args.sequence_length), {}, 0
    with telling(lambda: f"{len(found):,} conversations"):
        each = (tokens for place, record in records(files) if (tokens := encoder(place, record)) is not None)
        for tokens in islice(each, args.show):
            key = hashlib.blake2b((tokens & UNMARKED).tobytes(), digest_size=16).digest()  # whatever is learned
            duplicates += key in found
            found.setdefault(key, tokens)
    for note in encoder.notes:
        print(f"{note}: {encoder.notes[note]:,} (first: {encoder.places[note]})")
    conversations = list(found.values())
    if len(conversations) < (1 if args.show else 2):
        raise UserError(f"{args.paths[0]}: too few conversations, {len(conversations)}: name more, or others")
    if args.show:
        for tokens in conversations:
            print(f"\n{shown(tokens, tokenizer, sys.stdout.isatty())}")
        return
    sizes = np.array([len(tokens) for tokens in conversations], np.uint64)
    val = for_validation(np.array([int.from_bytes(key[:8], "little") for key in found], np.uint64), sizes, args.val,
                         LEAST)  # fmt: skip
    row = args.sequence_length if args.pack == "one" else 0
    needed = 8 * row * len(conversations)  # a row's int32 tokens are there twice while a file is written
    if needed > free_memory():
        raise UserError(f"-t {row}: {len(conversations):,} rows of {row:,} tokens need {needed >> 20:,} MiB of memory, "
                        f"and {free_memory() >> 20:,} are free: lower -t, or leave --pack one out")  # fmt: skip
    common.make_folder(args.out.parent)
    with tempfile.TemporaryDirectory(prefix=f"{args.out.name}_", dir=args.out.parent) as work:
        prefix, summary = Path(work) / args.out.name, {}
        common.write_vocabulary(prefix, tokenizer, path)
        if args.template:
            with replacing(prefix.with_name(f"{prefix.name}_chat_template.jinja")) as file:
                file.write(template.source.encode())
        write_ends(prefix, encoder.ends & tokenizer.special)
        for split, which in ("train", np.flatnonzero(~val)), ("val", np.flatnonzero(val)):
            chosen = [conversations[n] for n in which]
            write_split(prefix.with_name(f"{prefix.name}_{split}.bin"), chosen, row, tokenizer)
            learned = sum(int((tokens >= 0).sum()) for tokens in chosen)
            for name, count in ("conversations", len(which)), ("tokens", int(sizes[which].sum())), ("learned", learned):
                summary.setdefault(name, {})[split] = count
        common.move(sorted(Path(work).iterdir()), args.out.parent, "-o")
    summary["duplicates"] = duplicates
    for name, of in summary.items():
        print(f"{name:14} {listed(of) if isinstance(of, dict) else of}")
    fewest, targets = min(summary["conversations"].values()), min(summary["tokens"].values()) - 1
    T = args.sequence_length if row else min(args.sequence_length, targets)
    B = min(4, fewest if row else targets // T)
    print(f"\n    {training_command(path, args.out, f'-b {B} -t {T} -l 1e-5')}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not at once: the folder of unfinished files goes first
    common.run(main)
