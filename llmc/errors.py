class UserError(ValueError):
    """A wrong flag, file or value: its message is one line that names the thing and the remedy.

    The command line prints it as `error: message` and exits with status 1.
    """
