"""A conversation with a model in the terminal, for generate.py --chat."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from device.errors import UserError, say
from llmc.data.chat import Conversation
from llmc.step.generation import NOT_FINITE, Writer
from llmc.step.sampler import Sampler


def talk(writer: Writer, encode: Callable[[Conversation], list[int]], begin: Callable, args: Namespace) -> None:
    """Reads messages, a line each, and prints answers. encode: the tokens of a conversation up to its next answer.
    begin: makes an empty text (generate.py: Text)."""
    if sys.stdin is None:
        raise UserError("standard input is closed, and --chat reads messages there: open it, or name a --prompt")
    start: Conversation = [{"role": "system", "content": args.system}] if args.system else []
    messages, seen, sampler = list(start), [], Sampler(args.seed)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with typed_text_kept():
        while (line := typed(terminal)) not in ("", "/quit"):
            if line == "/reset":
                messages = list(start)
            elif line.strip():
                messages.append({"role": "user", "content": line})
                try:
                    tokens = fitting(messages, len(start), encode, writer.cache.context, args.tokens)
                except UserError as error:
                    say(str(error))
                    messages.pop()
                    continue
                kept, text = len(os.path.commonprefix([seen, tokens[:-1]])), begin()
                seen = answer(writer, text, tokens, kept, sampler, args)
                messages.append({"role": "assistant", "content": text.text})


@contextmanager
def typed_text_kept() -> Iterator[None]:
    """On a terminal, Ctrl-C drops what was typed and not yet read. In this block it does not."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], before[3] | termios.NOFLSH, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def typed(terminal: bool) -> str:
    """The next line without its end, " " if it is blank, and "" at the end of input."""
    if not terminal:
        line = sys.stdin.buffer.readline().decode(errors="replace")
        return line and (line.rstrip("\r\n") or " ")
    with suppress(ImportError):
        import readline  # noqa: F401  a line can be edited
    while True:
        try:
            return input("\n> ") or " "
        except EOFError:
            return ""
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends this", end="")


def fitting(messages: Conversation, first: int, encode: Callable, context: int, count: int) -> list[int]:
    """The tokens before the next answer. If they leave room for less than `count` tokens, or less than a quarter of the
    context, the oldest turns, from messages[first] on, are removed. Raises UserError if the last message alone is too
    long."""
    room, left = context - min(count, context // 4), list(messages)
    while len(tokens := encode(left)) > room:
        if len(left) <= first + 1:
            wrong = f"this message makes {len(tokens)} tokens, and there is room for {room}"
            raise UserError(f"{wrong}: shorten it, or raise -t")
        del left[first : first + 2]
    if len(left) < len(messages):
        messages[:] = left
        say(f"the context of {context} tokens is full: the oldest turns are left out")
    return tokens


def answer(writer: Writer, text, tokens: list[int], kept: int, sampler: Sampler, args: Namespace) -> list[int]:
    """Writes an answer to the tokens, and prints it. The cache has the first `kept` tokens already. Ctrl-C ends the
    answer. Returns the tokens that the cache has afterwards."""
    finished, seen = [False], list(tokens)
    before = signal.signal(signal.SIGINT, lambda *_: finished.__setitem__(0, True))
    room = writer.cache.context - len(tokens)
    try:
        for (token,) in writer.tokens([tokens], [sampler], min(args.tokens, room), finished, kept):
            if token == NOT_FINITE:
                raise UserError(f"{args.model}: its logits are NaN or infinity: take an older checkpoint")
            shown = len(text.text)
            text.push(token)
            print(text.text[shown:], end="", flush=True)
            seen.append(token)
            finished[0] |= bool(text.end)
    finally:
        signal.signal(signal.SIGINT, before)
    if not text.end:
        shown = len(text.text)
        text.finish("length")
        print(text.text[shown:], end="")
    print(flush=True)
    if text.end == "length" and text.tokens == room:
        say("the context is full: the answer ends here")
    return seen[: max(len(tokens), len(seen) - 1)]  # the last token may not have gone through the model
