"""How a program that trains begins."""

from argparse import Namespace
from collections.abc import Callable

from llmc.model.model import Model
from llmc.ranks import ranks
from llmc.run.arguments import parse_arguments
from llmc.run.dry_run import dry_run
from llmc.run.program import run_program
from llmc.run.settings import check_same_flags


def run_trainer(
    train: Callable[[type[Model], Namespace], None], kind: type[Model], script: str = "", **defaults: str | float
) -> None:
    """Runs train(kind, flags) with the flags of the command line, or what --dry-run asks for, as run_program does.
    script, defaults: of a program that is not the model's own (arguments.py: make_parser).

    If several ranks have been started, they meet first, so that one of them speaks for all. Once the run has begun, it
    handles Ctrl-C itself.
    """

    def meet_and_train() -> None:
        ranks.meet()
        flags = parse_arguments(kind.Config, script=script, **defaults)
        if flags.dry_run:
            return dry_run(kind, flags)
        ranks.start(flags.gpus)
        check_same_flags(flags)
        train(kind, flags)

    run_program(meet_and_train, interrupted="interrupted before the first step")
