"""Writes text with a model that was trained, token by token as it comes.

    python generate.py -e gpt2_124M.bin --prompt "The meaning of life is" -g 100
    python generate.py -e checkpoints/step_00002000 --temperature 0.8 --top-k 50 --samples 4
    python generate.py -e gpt2_124M.bin --prompts questions.txt --stop "?" > answers.jsonl

The text begins with the prompt, and the prompt begins a document. Before it the model sees the token that begins a
text, unless the prompt has it already; if the tokenizer has none, the token that ends one. transformers puts a token
there only if the tokenizer's file does, and GPT-2's does not: --no-bos does the same. The text ends after -g tokens or,
unless --ignore-eot is given, with a token that ends a text: the tokenizer's, the one between documents, or one that a
file beside the tokenizer or the model names, such as generation_config.json.

The model sees at most -t tokens. By default these are as many as it was trained with, if a checkpoint says so. A model
with learned positions has learned nothing for later positions, and one with rotary positions has not seen such
distances either. When a text gets longer, the model keeps its last half and computes it again. It forgets the rest.

Several texts are written at once. The first is printed as it comes, and the others after it, each after a line "---".
With --prompts each text is a line of JSON: its "prompt", the number of its "sample", the "text" that follows the
prompt, the number of its "tokens", and as its "end" what ended it: the end of a text ("eot"), a stop text ("stop") or
-g ("length"). Other fields of an object of a .jsonl or a .json are passed through. On a terminal, control characters
are left out.

    python generate.py -e run --chat                         # a conversation, by the chat template of the model
    python generate.py -e run --prompts chats.jsonl --chat   # answers conversations, as dev/data/chat.py reads them

In a conversation Ctrl-C ends an answer, /reset begins anew, and /quit or Ctrl-D ends it. What is typed meanwhile is the
next message. The cache stays from turn to turn: only new tokens go through the model.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P leaves it out
import device
from dev.chat import talk
from dev.foreign import try_tokenizer
from dev.hf.common import end_tokens
from dev.scripts import NEEDED, find_model, kind_of
from device.errors import UserError
from llmc.data.chat import ChatTemplate, Conversation, conversation_of
from llmc.data.find_tokenizer import load_model_tokenizer, named_tokenizer
from llmc.data.hf_tokenizer import without_surrogates
from llmc.data.tokenizer import StreamDecoder, Tokenizer
from llmc.files.checkpoint_dir import training_flags
from llmc.files.files import open_file
from llmc.files.model_file import read_model_header
from llmc.model.activations import Cache, choose_attention
from llmc.run.arguments import (
    Parser,
    a_name,
    a_path,
    add_device_arguments,
    limited,
    natural,
    non_negative,
    number,
    positive,
    seed,
)
from llmc.run.program import run_program
from llmc.run.settings import recorded_flags
from llmc.step.generation import NOT_FINITE, Writer, model_for_inference
from llmc.step.memory import check_text_memory
from llmc.step.sampler import samplers_of

CHAT_CONTEXT = 4096  # if neither -t nor a checkpoint says more or less
MAX_TEXTS = 65535  # at once: a grid's second dimension
share = limited(number, ((lambda x: 0 < x <= 1), "be above 0 and at most 1"))


def context_of(trained: int | None, asked: int | None, longest: int) -> int:
    """How many tokens the model sees: as many as the user asked for, else as many as it was trained with, else as many
    as it can. trained: what a checkpoint says. Raises UserError for more than it can. Prints a line for more than it
    was trained with."""
    if asked and asked > longest:
        raise UserError(f"-t {asked} is above the model's longest sequence, {longest}: lower -t")
    if trained is None or trained > longest:
        return asked or longest
    if asked and asked > trained:
        print(f"-t {asked} goes beyond the {trained} tokens at which the model was trained", file=sys.stderr)
    return asked or trained


def trained_attention(path: Path, trained: str | None, asked: str) -> str:
    """The attention to use: ReLU if the model was trained with it, else what the user asked for. trained: what a
    checkpoint says. Raises UserError if the user asked for another function than the model was trained with."""
    if trained and asked != "auto" and (asked == "relu") != (trained == "relu"):
        raise UserError(f"-a {asked}: {path.parent} was trained with {trained} attention: leave -a out")
    return "relu" if trained == "relu" else asked


def stop_text(text: str) -> str:
    """A text that is not empty, in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # the command line had a byte of another encoding
        text = ""
    if not text:
        raise argparse.ArgumentTypeError("must be a text in UTF-8 that is not empty")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Write text with a trained model.", allow_abbrev=False)
    add = parser.add_argument
    add("-e", "--model", type=a_path, default="gpt2_124M.bin", help="a .bin or a checkpoint directory (%(default)s)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default="", metavar="TEXT", help="how the text begins (nothing)")
    prompts.add_argument("--prompt-file", type=a_name, metavar="FILE",
                         help="a file with the prompt, less a line break at its end; -: standard input")  # fmt: skip
    prompts.add_argument("--prompts", type=a_name, metavar="FILE",
                         help='a file with a prompt on each line, in a .jsonl {"prompt": TEXT}, or a .json with a list '
                         "of these or of texts; -: standard input. Prints lines of JSON")  # fmt: skip
    add("--chat", action="store_true", help="prompts are questions or conversations; without any, a conversation")
    add("--system", type=stop_text, metavar="TEXT", help="with --chat: what the model is told before a conversation")
    add("--template", type=a_path, metavar="FILE", help="with --chat: another chat template than the model's")
    add("-g", "--tokens", type=natural, metavar="N", help="tokens to write at most (200; with --chat 1000)")
    add("--samples", type=positive, default=1, metavar="N", help="texts of each prompt (%(default)s)")
    add("--stop", type=stop_text, action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times")  # fmt: skip
    add("--ignore-eot", action="store_true", help="go on after a token that ends a text")
    add("--no-bos", action="store_true",
        help="no token in front of a prompt. Without this flag, the token that begins a text is put there, or if there "
        "is none, <|endoftext|>; transformers puts none in front of GPT-2's prompts")  # fmt: skip
    add("--temperature", type=non_negative, default=1.0, metavar="X", help="0: always the likeliest token (1)")
    add("--top-k", type=natural, default=0, metavar="K", help="draw from the K likeliest tokens; 0: from all (0)")
    add("--top-p", type=share, default=1.0, metavar="P",
        help="draw from the likeliest tokens that together have the probability P, after --top-k (1)")  # fmt: skip
    add("--seed", type=seed, default=1337, metavar="N", help="another seed, another text (%(default)s)")
    add("-t", "--context", type=positive, metavar="T",
        help="tokens that the model sees at most (by default as many as a sequence had in training, by its checkpoint; "
        "for a .bin alone as many as it has positions). When a text gets longer, the last half of these tokens is kept "
        "and computed again")  # fmt: skip
    add("--tokenizer", type=a_path, metavar="FILE",
        help="the model's tokenizer: its file or folder, or gpt2 or bytes (the one beside it)")
    add_device_arguments(parser)
    return parser


# Prompts


def read_text(name: str, flag: str) -> str:
    """The text of a file, or of standard input if the name is "-". Raises UserError if it cannot be read, is empty, or
    is not UTF-8."""
    where = "standard input" if name == "-" else name
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open_file(name) as file:
                data = file.read()
    except OSError as error:
        raise UserError(f"{flag} {name}: {error.strerror.lower()}; name a file, or - for standard input") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 from byte {error.start} on: convert it (iconv -t UTF-8)") from None
    if not text.strip("\r\n"):
        raise UserError(f"{where} is empty: write a prompt into it, or leave {flag} out")
    return text


def prompts_of(args: argparse.Namespace) -> list[tuple[str, dict]]:
    """The prompts that the flags name, each with its name for messages. A prompt is an object with a text "prompt"; a
    line of a .jsonl may have more in it; with --chat it has a conversation, or a line is a question. Raises UserError
    if there are none."""
    if args.prompt_file:
        text = read_text(args.prompt_file, "--prompt-file")
        text = text.removesuffix("\n").removesuffix("\r")
        return [("--prompt-file", {"prompt": text})]
    if not args.prompts:
        try:
            args.prompt.encode()
        except UnicodeEncodeError:  # the command line had a byte that is not UTF-8
            raise UserError("--prompt is not UTF-8: convert it, or name a file of UTF-8 with --prompt-file") from None
        return [("--prompt", {"prompt": args.prompt})]
    text, suffix = read_text(args.prompts, "--prompts"), Path(args.prompts).suffix.lower()
    found, named = [], "standard input" if args.prompts == "-" else args.prompts
    for where, record in records_of(text, suffix):
        fields = {"prompt": record} if isinstance(record, str) else record
        if args.chat and fields is not None:
            found.append((f"{named}, {where}", fields))
            continue
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
            raise UserError(f'{named}, {where}: not of the form {{"prompt": "text"}}')
        found.append((f"{named}, {where}", fields | {"prompt": without_surrogates(fields["prompt"])}))
    if not found:
        raise UserError(f"{named} has no prompt: write one into it, or leave --prompts out")
    return found


def records_of(text: str, suffix: str) -> Iterator[tuple[str, object]]:
    """The records of a file of prompts, each with its place: of a .json with a list these are its items, else lines.
    A line of JSON that is damaged is None."""
    if suffix == ".json" and isinstance(items := from_json(text), list):
        yield from ((f"record {n}", item) for n, item in enumerate(items, 1))
        return
    for n, line in enumerate(text.split("\n"), 1):
        if line := line.removesuffix("\r"):
            yield f"line {n}", from_json(line) if suffix in (".json", ".jsonl", ".ndjson") else line


def from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def tokens_of(
    prompts: list[tuple[str, dict]], tokenizer: Tokenizer, context: int, longest: int, bos: bool = True
) -> list[list[int]]:
    """The tokens of each prompt. bos: whether the token that begins a text stands before them; a prompt that has it
    gets no second one. Raises UserError for a prompt that is longer than what the model sees, and for one without any
    token."""
    found = []
    for name, fields in prompts:
        prompt = fields["prompt"]
        tokens = tokenizer.encode(prompt) if prompt else []
        if bos and tokens[:1] != [tokenizer.bos]:
            tokens.insert(0, tokenizer.bos)
        if not tokens:
            raise UserError(f"{name} has no tokens, and --no-bos puts none in front of it: write a prompt")
        if tokenizer.rows and (highest := max(tokens)) >= tokenizer.rows:
            spelled = tokenizer.tokens[highest].decode(errors="replace")
            raise UserError(f"{name} has the token {spelled!r}, and the model has no row for it: leave it out")
        if len(tokens) > context:
            remedy = f"shorten it, or raise -t (at most {longest})" if context < longest else "shorten it"
            raise UserError(f"{name} has {len(tokens)} tokens, and the model sees {context}: {remedy}")
        found.append(tokens)
    return found


def render(template: ChatTemplate, name: str, record: dict, system: str | None) -> str:
    """The text before the answer to the conversation in a record."""
    try:
        messages, _ = conversation_of(record, answered=False)
        given = [{"role": "system", "content": system}] if system and messages[0]["role"] != "system" else []
        return template.render(given + messages, prompt=True)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


# Texts


@dataclass
class Text:
    """A text, as far as it is written. `fields` has the prompt. `opening` is the prompt as it is printed, and `text`
    follows it. `held` is not printed yet, because it may be the beginning of a stop text. `end` says why the text
    ended, if it has ended."""

    fields: dict
    sample: int
    opening: str
    decoder: StreamDecoder
    stops: list[str]
    ends: set[int]
    tokens: int = 0
    text: str = ""
    held: str = ""
    end: str = ""

    def push(self, token: int) -> None:
        """Adds a token."""
        self.tokens += 1
        if token in self.ends:
            self.finish("eot")
        else:
            self.add(self.decoder.push(token))

    def add(self, piece: str) -> None:
        self.held += piece
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            self.text, self.held, self.end = self.text + self.held[: min(found)], "", "stop"
            return
        kept = max((n for stop in self.stops for n in range(len(stop)) if self.held.endswith(stop[:n])), default=0)
        free = len(self.held) - kept
        self.text, self.held = self.text + self.held[:free], self.held[free:]

    def finish(self, end: str) -> None:
        """Ends the text, with `held`, unless a stop text is in that."""
        self.add(self.decoder.flush())
        if not self.end:
            self.text, self.held, self.end = self.text + self.held, "", end

    def as_json(self) -> str:
        return json.dumps(self.fields | {name: getattr(self, name) for name in ("sample", "text", "tokens", "end")})


def write(cache: Cache, texts: list[Text], tokens: list[list[int]], args: argparse.Namespace) -> None:
    """Continues the texts, whose prompts have these tokens, and prints them in their order. As JSON it prints only
    texts that have ended; else also the text that comes next, as far as it is written."""
    writer = Writer(cache, args.temperature, args.top_k, args.top_p)
    samplers = [sampler for _ in texts[:: args.samples] for sampler in samplers_of(args.seed, args.samples)]
    printed = shown = written = 0  # printed: texts; shown: characters of the next text; written: tokens
    finished = [False] * len(texts)
    started = said = time.perf_counter()
    rate = ""

    def show() -> None:
        nonlocal printed, shown
        while printed < len(texts):
            text = texts[printed]
            if args.prompts:
                print(f"{text.as_json()}\n" * bool(text.end), end="", flush=True)
            else:
                whole = text.opening + text.text
                last = printed + 1 == len(texts)
                ending = ("\n" if last else "\n---\n") if text.end else ""
                print(whole[shown:] + ending, end="", flush=True)
                shown = len(whole)
            if not text.end:
                return
            printed, shown = printed + 1, 0

    show()
    for step, drawn in enumerate(writer.tokens(tokens, samplers, args.tokens, finished)):
        for b, token in enumerate(drawn):
            if not finished[b]:
                if token == NOT_FINITE:
                    print(end="" if args.prompts else "\n", flush=True)
                    raise UserError(
                        f"{args.model}: its logits are NaN or infinity after {texts[b].tokens} tokens of a text, so "
                        "none can be drawn: take a model whose weights are finite, such as an older checkpoint"
                    )
                texts[b].push(token)
                written += 1
                finished[b] = bool(texts[b].end)
        show()
        now = time.perf_counter()
        if step == 0:
            first, before = now, written
        else:
            rate = f": {(written - before) / (now - first):.1f} tokens per second"
        if args.prompts and now - said > 5 and not all(finished):
            said = now
            print(f"{step + 1} of at most {args.tokens} tokens of each text{rate}", file=sys.stderr)
    for text in texts:
        if not text.end:
            text.finish("length")
    show()
    seconds = time.perf_counter() - started
    print(f"{written} tokens in {seconds:.1f} s on {device.name}{rate}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    args.tokens = (1000 if args.chat else 200) if args.tokens is None else args.tokens
    talks = args.chat and not (args.prompt or args.prompt_file or args.prompts)
    if talks and args.samples > 1 or args.chat and args.no_bos:
        raise UserError("a chat template begins a text, and a conversation has one: leave --no-bos and --samples out")
    if (args.system or args.template) and not args.chat:
        raise UserError("--system and --template are of a conversation: add --chat")
    device.use(args.device)
    device.use_precision(args.precision)

    path = find_model(args.model)
    kind = kind_of(path)
    config = read_model_header(path, kind.Config, f"{NEEDED}; dev/download_starter_pack.sh fetches gpt2_124M.bin")
    trained = recorded_flags(kind.Config, training_flags(path), path.parent)
    context = context_of(trained.get("sequence_length"), args.context, config.max_seq_len)
    if talks and not args.context and not trained.get("sequence_length"):
        context = min(context, CHAT_CONTEXT)
    prompts = [] if talks else prompts_of(args)
    if args.tokenizer:
        args.tokenizer = named_tokenizer(args.tokenizer)
        try_tokenizer(args.tokenizer)
    tokenizer = load_model_tokenizer(
        path, config.vocab_size, args.tokenizer, trained, args.chat or any(f["prompt"] for _, f in prompts)
    )
    ends, asked = set() if args.ignore_eot else tokenizer.ends | end_tokens(path), prompts
    if args.chat:
        template = ChatTemplate(Path(args.tokenizer or tokenizer.path), tokenizer, args.template)
        asked = [(name, {"prompt": render(template, name, fields, args.system)}) for name, fields in prompts]
    tokens = tokens_of(asked, tokenizer, context, config.max_seq_len, not args.no_bos and not args.chat)
    terminal = not args.prompts and sys.stdout.isatty()
    if (count := len(tokens) * args.samples or 1) > MAX_TEXTS:
        raise UserError(f"{count} texts at once are more than {MAX_TEXTS}: lower --samples or give fewer prompts")
    T = context if talks else min(context, max(map(len, tokens)) + args.tokens)
    attention = trained_attention(path, trained.get("attention"), args.attention)
    attention = choose_attention(attention, config.head_size)
    check_text_memory(kind, config, count, T)
    cache = Cache(model_for_inference(kind, path, T), count, T, attention)
    if talks:
        def encode(messages: Conversation) -> list[int]:
            named = [("the conversation", {"prompt": template.render(messages, prompt=True)})]
            return tokens_of(named, tokenizer, sys.maxsize, sys.maxsize, bos=False)[0]

        begin = lambda: Text({}, 0, "", StreamDecoder(tokenizer, terminal), args.stop, ends)  # noqa: E731
        return talk(Writer(cache, args.temperature, args.top_k, args.top_p), encode, begin, args)

    tokens = [each for each in tokens for _ in range(args.samples)]
    texts = []
    for (_, fields), first in zip(prompts, tokens[:: args.samples], strict=True):
        for n in range(args.samples):
            decoder = StreamDecoder(tokenizer, terminal)
            opening = "" if args.chat else "".join(decoder.push(token) for token in first[not args.no_bos :])
            texts.append(Text(fields, n, opening, decoder, args.stop, ends))
    write(cache, texts, tokens, args)


if __name__ == "__main__":
    run_program(main, out_of_memory="lower --samples or -t, or give fewer prompts", interrupted="")
