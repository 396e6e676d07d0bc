"""The one exception for mistakes of the user: its message is a line that names the place and the cure."""


class UserError(Exception):
    """A mistake in the configuration, the data, the checkpoint or the environment; shown without a traceback."""


def first_line(error: BaseException) -> str:
    """What an error says first: libraries go on with hints and addresses."""
    return str(error).partition("\n")[0]
