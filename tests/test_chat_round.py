"""The whole way of a chat model: from a folder of transformers, by training on conversations, to such a folder."""

import io
import json
import sys
from pathlib import Path

import device
import generate
from dev.data import chat as script
from dev.hf import export_hf, import_hf
from dev.write_reference import random_model
from llmc.run.arguments import parse_arguments
from models import TINY
from support.chats import save_tokenizer
from support.datasets import printed
from train_gpt2_fp32 import train

import pytest
import torch
import transformers

RECORDS = [{"prompt": f"the {n}?", "completion": "in the weather there" * (1 + n % 2)} for n in range(60)]


@pytest.mark.parametrize("name, template", [("llama3", "llama3"), ("qwen3", "qwen3")])
def test_a_chat_model_comes_in_learns_and_goes_out(name, template, one_dev, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "hub", template).parent)
    kind, description = TINY[name]
    config = kind.Config.described(f"{description},maxT=512", len(theirs))
    random_model(config, 3).save_pretrained("hub")
    import_hf.main(["hub", "-o", "in.bin"])
    Path("a.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    said = printed(script, "a.jsonl", "-o", "chats", "--model", "in.bin", "-t", "160", "--val", "0.2")
    assert f"python {kind.Config.SCRIPT} -i chats -e in.bin -b " in said
    flags = "-i chats -e in.bin -t 160 -b 2 -x 60 -l 3e-3 -s 0 -v 40 --checkpoint-dir run --device"
    train(kind, parse_arguments(kind.Config, [*flags.split(), device.kind, "--precision", "fp32"]))
    assert "val loss" in capsys.readouterr().out
    export_hf.main(["run", "-o", "out"])
    again = transformers.AutoTokenizer.from_pretrained("out")
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the 7?"}]
    want = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert again.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) == want
    ids = model.generate(torch.tensor([want]), max_new_tokens=40, do_sample=False)[0, len(want) :].tolist()
    end = theirs.eos_token_id
    assert ids[-1] == end and end not in ids[:-1]  # it has learned to end a turn, and transformers ends there
    import_hf.main(["out", "-o", "again.bin"])
    texts = []
    for path in "run", "again.bin":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the 7?\n")))
        capsys.readouterr()
        generate.main(["-e", path, "--chat", "--system", "Be brief.", "--temperature", "0", "-g", "40", "--device",
                       device.kind, "--precision", "fp32"])  # fmt: skip
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == again.decode(ids[:-1]) + "\n"
    for file in "tokenizer.json", "tokenizer_config.json", "chat_template.jinja":
        assert Path("out", file).read_bytes() == Path("hub", file).read_bytes()
