"""The loop over steps stands in every model script, and is the same in each; the parts of a run are small."""

import ast
import inspect
import re
import textwrap

from llmc.run import Run
from llmc.saver import Saver
from llmc.settings import Settings
from llmc.step import train_step
from llmc.validation import Validation
from llmc.watch import Guard, Logs, Watch
from models import MODELS

import pytest


def loop_of(kind) -> str:
    """The source of a script's main, with "Model" and "model_" where it names its own."""
    name, source = kind.__name__, inspect.getsource(inspect.getmodule(kind).main)
    return source.replace(f"{name.lower()}_", "model_").replace(name, "Model")


@pytest.mark.parametrize("kind", MODELS[1:])
def test_every_script_has_the_same_loop(kind):
    assert loop_of(kind) == loop_of(MODELS[0])


def test_the_loop_shows_what_a_run_does_in_the_order_in_which_it_happens():
    calls = [node for node in ast.walk(ast.parse(loop_of(MODELS[0]))) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in sorted(calls, key=lambda call: call.lineno)]
    order = [
        "run.exchange.record", "run.save", "run.validate", "run.save_best", "run.sample", "run.told_to_stop",
        "batches.send", "forward_backward", "batches.fetch_losses", "adamw_update", "run.report", "run.stop_before",
    ]  # fmt: skip
    assert [name for name in names if name in order] == order
    assert names.index("model_forward") < names.index("model.loss") < names.index("model_backward")


def test_the_step_that_benchmarks_and_tests_take_is_the_loops():
    """llmc/step.py makes the loop's calls, in its order."""
    names = {
        "model_forward(model, ": "model.forward(", "model_backward(model, ": "model.backward(",
        "s.learning_rate(step)": "learning_rate", "s.batches": "batches.count", "s.step_tokens": "batches.step_tokens",
        "s.weight_decay": "weight_decay", "s.grad_clip": "grad_clip", "run.exchange": "exchange",
        "s.B": "B", "s.T": "T",
    }  # fmt: skip
    loop = loop_of(MODELS[0])
    for name, other in names.items():
        loop = loop.replace(name, other)

    def steps(source: str) -> list[str]:
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
        found = [ast.unparse(node) for node in sorted(found, key=lambda node: node.lineno)]
        return [call for call in found if re.match(r"(model|batches|forward_backward|adamw_update)\b", call)]

    assert steps(loop) == steps(inspect.getsource(train_step).replace("recorded(", "forward_backward("))


@pytest.mark.parametrize("part", [Run, Saver, Validation, Watch, Logs, Guard])
def test_a_part_of_a_run_has_few_attributes_and_a_short_constructor(part):
    source = inspect.getsource(part.__init__)
    targets = {ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(source)))
               if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    assert len([target for target in targets if target.startswith("self.") and target.count(".") == 1]) <= 8
    assert len(source.splitlines()) <= 31


def test_settings_are_never_changed():
    assert Settings.__dataclass_params__.frozen
