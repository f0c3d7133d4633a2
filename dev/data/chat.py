"""Your own chats as a dataset: conversations to shards of tokens, of which a model learns the answers.

    python dev/data/chat.py chats.jsonl --model qwen3_0.6B.bin --show 3        # shows what would be learned
    python dev/data/chat.py chats.jsonl --model qwen3_0.6B.bin -o data/chats

A record has "messages" with role and content, "conversations" with from and value, "prompt" and "completion", or
"instruction", perhaps "input", and "output"; a prompt and a completion may be lists of messages, too. The chat template
that came with the model makes a text of it, and the model's tokenizer the tokens, as transformers does.

Writes data/chats_{train,val}_<number>.bin, and the tokenizer and the template beside them. Of equal conversations one
stays. A hash of each decides whether it is for validation, whatever --learn says. A record that is no such conversation
is left out, and a line names the first ones.
"""

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data import common
from dev.data.documents import UNDECODABLE_REMEDY, File, records_of
from dev.data.shards import in_shards
from dev.data.text import LEAST, find_files, for_validation, listed, model_beside, share
from dev.foreign import try_tokenizer
from device.errors import UserError, first_line
from device.progress import telling
from llmc.data.chat import ChatTemplate, Unfit, conversation_of
from llmc.data.find_tokenizer import named_tokenizer
from llmc.data.hf_tokenizer import neighbours, read_json
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
        " .bin with what the import put beside it, a checkpoint, a folder, or a tokenizer.json")  # fmt: skip
    add("-o", "--out", metavar="PREFIX", type=a_path, help="such as data/chats")
    add("--template", metavar="FILE", type=a_path, help="another chat template, of Jinja")
    add("--learn", choices=("all", "answers", "last"), default="answers", help="last: the last answer (%(default)s)")
    add("-t", "--sequence-length", metavar="T", type=positive, default=1024, help="of the training, where a longer"
        " conversation is cut (%(default)s)")  # fmt: skip
    add("--pack", choices=("rows", "one"), default="rows", help="rows: one conversation follows another; one: each has"
        " a row of T tokens to itself (%(default)s)")  # fmt: skip
    add("--split", metavar="NAME", default="train", help="of a data set that has several (%(default)s)")
    add("--val", metavar="F", type=share, default=0.05, help="share of the conversations for validation (%(default)s)")
    add("--shard-tokens", metavar="N", type=positive, default=10**8, help="tokens each (%(default)s)")
    add("--show", metavar="N", type=positive, help="print N conversations, what is learned in colour or [], and end")
    return parser


def records(files: list[File]) -> Iterator[tuple[str, object]]:
    """All records, each with its place. Raises UserError where a file is damaged, or is of another kind."""
    for path, kind, *_ in files:
        if kind not in KINDS:
            raise UserError(f"{path}: conversations are records: use .jsonl, .json, .parquet or .arrow")
        done, blocks = 0, partial(common.blocks_of, path, "utf-8", UNDECODABLE_REMEDY)
        try:
            for done, record in enumerate(records_of(path, kind, (), blocks), 1):  # noqa: B007  for the message
                yield f"{path}, record {done}", record
        except UserError:
            raise
        except Exception as error:  # of many kinds
            raise UserError(f"{path}, record {done + 1}: {type(error).__name__}: {first_line(error)}") from None


class Encoder:
    """Makes marked tokens of records. notes: how many records have each note, and places: the first ones."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, learn: str, longest: int) -> None:
        self.tokenizer, self.template, self.learn, self.longest = tokenizer, template, learn, longest
        self.notes, self.places = Counter(), {}

    def note(self, note: str, place: str) -> None:
        self.notes[note] += 1
        self.places.setdefault(note, place)

    def __call__(self, place: str, record: object) -> np.ndarray | None:
        """A conversation's tokens, int32, marked (llmc/data/token_file.py). None, and a note, if it has nothing to
        learn or cannot be learned."""
        try:
            messages, thought = conversation_of(record)
            text, answers = self.template.answers(messages)
        except Unfit as error:
            return self.note(f"left out: {error}", place)
        ids, places = self.tokenizer.encode_with_places(text)
        if self.learn == "all":
            learned = np.ones(len(ids), bool)
        else:
            learned = np.zeros(len(ids), bool)
            for begin, end in answers if self.learn == "answers" else answers[-1:]:
                learned |= [first < end and last > begin for first, last in places]
        learned[:1] = False  # no token of the conversation stands before it
        tokens = np.where(learned, np.int32(ids), np.int32(ids) | MARK)[: self.longest]
        if not (tokens >= 0).any():
            where = f" in its first {self.longest} tokens" if any(learned) else ""
            return self.note(f"left out: nothing to learn{where}", place)
        if len(ids) > self.longest:
            self.note(f"cut after {self.longest} tokens", place)
        if thought:
            self.note("thoughts left out", place)
        return tokens


def shown(tokens: np.ndarray, tokenizer: Tokenizer, colour: bool) -> str:
    """The text of marked tokens, what is learned in colour or in brackets."""
    before, after = ("\x1b[1;32m", "\x1b[0m") if colour else ("[", "]")
    text = ""
    for part in np.split(tokens, np.flatnonzero(np.diff(tokens >= 0)) + 1):
        spelled = printable(b"".join(tokenizer.decode(token) for token in part & UNMARKED).decode(errors="replace"))
        text += f"{before}{spelled}{after}" if part[0] >= 0 else spelled
    return text


def write_split(
    prefix: Path, split: str, conversations: list[np.ndarray], args: argparse.Namespace, tokenizer: Tokenizer
) -> None:
    row, size, nothing = 0, args.shard_tokens, np.int32(tokenizer.eot) | MARK
    if args.pack == "one":
        row = args.sequence_length
        size = max(1, size // row) * row
        conversations = (np.pad(each, (0, row - len(each)), constant_values=nothing) for each in conversations)
    for number, tokens in enumerate(in_shards(conversations, size, np.dtype(np.int32))):
        last = np.full(int(row > 0), nothing, np.int32)  # a target for the last row's last token
        path = prefix.with_name(f"{prefix.name}_{split}_{number:06d}.bin")
        write_tokens(path, np.append(tokens, last), tokenizer.vocab_size, row)


def write_what_ends(prefix: Path, path: Path, tokenizer: Tokenizer, tokens: np.ndarray) -> None:
    """If the token that ends an answer is not among those that the model's files name, writes another
    generation_config.json, with that token: all programs end a text there, and the export tells others."""
    end = int(tokens[tokens >= 0][-1])
    if end in tokenizer.ends:
        return
    if end not in tokenizer.special:
        print("No token of its own ends an answer in this template: a model may write on behind its answer.")
        return
    beside = neighbours(path).get("generation_config.json", Path())
    known = read_json(beside) if beside.is_file() else {}
    content = known | {"eos_token_id": [end, *sorted(tokenizer.ends - {end})]}
    with replacing(prefix.with_name(f"{prefix.name}_generation_config.json")) as file:
        file.write(json.dumps(content, indent=2).encode())


def main() -> None:
    args = make_parser().parse_args()
    if not args.show and (not args.out or args.out.is_dir() or not args.out.name):
        raise UserError("-o must be a prefix of file names, such as data/chats; or --show N shows some conversations")
    paths = argparse.Namespace(paths=args.paths, split=args.split, suffix=[], separator=None, field=[])
    files = find_files(paths, Counter())
    path = named_tokenizer(args.model)
    try_tokenizer(path)
    tokenizer = common.load_tokenizer(path)
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
    if args.show:
        for tokens in conversations:
            print(f"\n{shown(tokens, tokenizer, sys.stdout.isatty())}")
        return
    if len(conversations) < 2:
        raise UserError(f"{args.paths[0]}: {len(conversations)} conversations are too few: name more, or others")
    sizes = np.array([len(tokens) for tokens in conversations], np.uint64)
    val = for_validation(np.array([int.from_bytes(key[:8], "little") for key in found], np.uint64), sizes, args.val,
                         LEAST)  # fmt: skip
    common.make_folder(args.out.parent)
    with tempfile.TemporaryDirectory(prefix=f"{args.out.name}_", dir=args.out.parent) as work:
        prefix, summary = Path(work) / args.out.name, {}
        common.write_vocabulary(prefix, tokenizer, path)
        if args.template:
            with replacing(prefix.with_name(f"{prefix.name}_chat_template.jinja")) as file:
                file.write(template.source.encode())
        write_what_ends(prefix, path, tokenizer, conversations[0])
        for split, which in ("train", np.flatnonzero(~val)), ("val", np.flatnonzero(val)):
            chosen = [conversations[n] for n in which]
            write_split(prefix, split, chosen, args, tokenizer)
            learned = sum(int((tokens >= 0).sum()) for tokens in chosen)
            for name, count in ("conversations", len(which)), ("tokens", int(sizes[which].sum())), ("learned", learned):
                summary.setdefault(name, {})[split] = count
        common.move(sorted(Path(work).iterdir()), args.out.parent, "-o")
    summary["duplicates"] = duplicates
    for name, of in summary.items():
        print(f"{name:14} {listed(of) if isinstance(of, dict) else of}")
    script, model = model_beside(path)
    how = f"-i {shlex.quote(str(args.out))} -e {shlex.quote(model)} -b 4 -t {args.sequence_length} -l 1e-5"
    print(f"\n    python {script} {how}")


if __name__ == "__main__":
    common.run(main)
