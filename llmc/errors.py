"""The errors that a user must mend, and how any error is said in a line."""


class UserError(ValueError):
    """A wrong flag, file or value: its message is one line that names the thing and the remedy.

    The command line prints it as `error: message` and exits with status 1.
    """


def first_line(error: Exception) -> str:
    """What an error says, in a line; its kind, where it says nothing."""
    return next(filter(None, (line.strip(" =") for line in str(error).splitlines())), type(error).__name__)
