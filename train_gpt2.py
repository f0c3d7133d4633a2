"""Trains GPT-2 as llm.c's mainline, train_gpt2.cu, does: the model and the loop of train_gpt2_fp32.py, in bf16 unless
--precision says otherwise, and with its beta2."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P leaves it out
from llmc.run.trainer import run_trainer
from train_gpt2_fp32 import GPT2, train

if __name__ == "__main__":
    run_trainer(train, GPT2, script="train_gpt2.py", precision="bf16", beta2=0.95)
