"""Conversations: what a record holds, the text that a chat template makes of it, and which parts of it are answers.

A template is a program that came with a model. So it runs in Jinja's sandbox, as in transformers, whose functions and
filters it finds here, too.
"""

import json
import re
import uuid
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from device.errors import UserError, first_line
from llmc.data.hf_tokenizer import neighbours, read_json, without_surrogates
from llmc.data.tokenizer import Tokenizer, in_one_line

Conversation = list[dict[str, str]]  # messages: role, content

FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))  # a record's keys
NAMES = {"human": "user", "gpt": "assistant"}  # ShareGPT's, and what they are here
ROLES = ("system", "user", "assistant")
EDGE = uuid.uuid4().hex  # where an answer begins and ends; no text has it


def conversation_of(record: Any, answered: bool = True) -> tuple[Conversation, set[str]]:
    """The conversation in a record, and what of it is left out: thoughts, or the tools that it may use. Which of FORMS
    it has, its keys say. answered: it must end with an answer; else with a question, and an answer at the end is left
    out, or missing. Raises UserError for what is not such a conversation."""
    there = {key for key, value in record.items() if value is not None} if isinstance(record, dict) else set()
    forms = [form for form in FORMS if there.issuperset(form if answered else form[:1])]
    if len(forms) != 1:
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        needed = ", ".join(" and ".join(form if answered else form[:1]) for form in FORMS)
        raise UserError(f"it has {keys[:200] or 'nothing'}, and must have one of {needed}")
    parts = [record[key] for key in forms[0] if key in there]
    if forms[0][0] == "instruction" and record.get("input"):
        parts[0] = f"{content_of(parts[0])}\n\n{content_of(record['input'])}"
    if len(forms[0]) == 2:  # of each a text, or messages
        pairs = zip(ROLES[1:], parts, strict=False)
        parts = [each if has_turns(each) else [{"role": role, "content": each}] for role, each in pairs]
    if not all(isinstance(part, list) and part for part in parts):
        raise UserError("no list of messages")
    found, left_out = [], {"tools"} if record.get("tools") else set()
    for number, turn in enumerate(sum(parts, []), 1):
        role, content = message_of(turn, number)
        if role == "assistant":
            whole, content = content, re.sub(r"^\s*<think>.*?</think>\s*", "", content, flags=re.DOTALL)
            left_out |= {"thoughts"} if whole != content or turn.get("reasoning_content") else set()
        found.append({"role": role, "content": content})
    if not answered and found[-1]["role"] == "assistant":
        del found[-1]
    check_order(found, answered)
    return found, left_out


def has_turns(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(turn, dict) and "role" in turn for turn in content)


def message_of(turn: Any, number: int) -> tuple[str, str]:
    """The role and the content of a turn. Raises UserError if it has none, or uses tools."""
    turn = turn if isinstance(turn, dict) else {}
    role, content = (turn.get("role"), turn.get("content")) if "role" in turn else (turn.get("from"), turn.get("value"))
    if role in ("tool", "function", "function_call", "observation") or turn.get("tool_calls"):
        raise UserError("it uses tools")
    if not isinstance(role, str):
        raise UserError(f"turn {number} has no role and content, or from and value")
    return NAMES.get(role, role), content_of(content, f"turn {number}")


def content_of(content: Any, where: str = "the record") -> str:
    """The text of a content: a string, or a list whose parts are all texts."""
    texts = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in texts):
        raise UserError(f"{where} has content that is no text")
    return without_surrogates("".join(part["text"] for part in texts))


def check_order(messages: Conversation, answered: bool) -> None:
    """Raises UserError unless questions and answers take turns, after what is said by others than the user, and none is
    empty."""
    expected = "user"
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role in ("user", "assistant"):
            if role != expected:
                raise UserError(f"turn {number} is the {role}'s, and must be the {expected}'s")
            if not message["content"].strip():
                raise UserError(f"turn {number}, the {role}'s, is empty")
            expected = "assistant" if role == "user" else "user"
    if not messages or messages[-1]["role"] != ("assistant" if answered else "user"):
        raise UserError(f"it does not end with {'an answer' if answered else 'a question'}")


class ChatTemplate:
    """The chat template of a tokenizer: the file `given`, else what lies beside the tokenizer's file `path`. Raises
    UserError if there is none, if it has a mistake, or if Jinja is missing."""

    def __init__(self, path: Path, tokenizer: Tokenizer, given: Path | None = None) -> None:
        try:
            import jinja2.ext
            import jinja2.nodes
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError("a chat template needs Jinja: pip install jinja2") from None

        class Generation(jinja2.ext.Extension):
            """{% generation %}: what a model is to learn. EDGE stands before and after it."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser):
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            def _marked(self, caller) -> str:
                return EDGE + caller() + EDGE

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        self.path, self.source, self.special = template_of(path, given)
        if not self.special:
            ends = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eot}
            self.special = {name: tokenizer.tokens[token].decode(errors="replace") for name, token in ends.items()}
        self.marks = bool(re.search(r"\{%-?\s*generation\b", self.source))
        extensions = [Generation, jinja2.ext.loopcontrols]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
        environment.globals |= {"raise_exception": refuse}
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self.template = environment.from_string(self.source)
        except Exception as error:  # Python's own, too
            raise UserError(f"{self.path}: the chat template has a mistake ({first_line(error)})") from None

    def render(self, messages: Conversation, prompt: bool = False) -> str:
        """The text of a conversation. prompt: with what stands before the next answer."""
        return self._render(messages, prompt).replace(EDGE, "")

    def _render(self, messages: Conversation, prompt: bool = False) -> str:
        unknown = [message["role"] for message in messages if message["role"] not in ROLES]
        if unknown and not re.search(rf"""['"]{re.escape(unknown[0])}['"]""", self.source):
            raise UserError(f"the template does not know the role {unknown[0]!r}")
        try:
            return self.template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self.special
            )
        except Exception as error:  # of many kinds, for it is a program
            raise UserError(f"the template refuses it ({first_line(error)})") from None

    def answers(self, messages: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where the answers begin and end in it, with what ends each. These are the
        parts in {% generation %}; in a template without it, an answer is all from the prompt up to the end of turn.
        Raises UserError if this cannot be found out."""
        whole = self.render(messages)
        parts = self._render(messages if self.marks else list(map(with_edges, messages))).split(EDGE)
        answered = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if "".join(parts) != whole or len(parts) != 2 * len(answered) + 1 or not all(parts[1::2]):
            raise UserError("the template does not put each answer into the text once, as it is")
        if self.marks:
            ends = list(accumulate(map(len, parts)))
            return whole, list(zip(ends[:-1:2], ends[1::2], strict=True))
        end_of_turn = parts[-1].strip()
        found, at = [], 0
        for k, n in enumerate(answered):
            prompt = self.render(messages[:n], prompt=True)
            first = at + len(parts[2 * k])
            at = first + len(parts[2 * k + 1])
            last = re.compile(r"\s*" + re.escape(end_of_turn)).match(whole, at)
            if not whole.startswith(prompt) or len(prompt) > first or not last:
                raise UserError(f"the template writes the turns before turn {n + 1} in another way if more follow")
            found.append((len(prompt), last.end()))
        return whole, found


def with_edges(message: dict[str, str]) -> dict[str, str]:
    """A message; an answer with EDGE around it, inside its white space, which a template may cut."""
    inner = message["content"].strip() if message["role"] == "assistant" else ""
    return message | {"content": message["content"].replace(inner, EDGE + inner + EDGE, 1)} if inner else message


def template_of(path: Path, given: Path | None) -> tuple[Path, str, dict[str, Any]]:
    """Where the chat template of the tokenizer's file `path` is, its text, and the special tokens by the names that it
    has for them. Raises UserError if there is none."""
    beside = neighbours(path)
    config, special = {}, {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in beside and beside[name].is_file():
            config = read_json(beside[name])
            special |= {key: value.get("content") if isinstance(value, dict) else value
                        for key, value in config.items() if key.endswith("_token")}  # fmt: skip
    special = {name: value for name, value in special.items() if isinstance(value, str)}
    place, template = given or beside.get("chat_template.jinja"), config.get("chat_template")
    if place and (given or place.is_file()):
        with in_one_line(f"{place}: it cannot be read"):
            return place, place.read_text("utf-8"), special
    if isinstance(template, list):  # several, by name
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise UserError(f"{path}: no chat template is beside it; take an instruct model, or name one with --template")
    return beside["tokenizer_config.json"], template, special
