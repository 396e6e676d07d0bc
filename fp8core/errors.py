"""The one exception for mistakes of the user: its message is a line that names the place and the cure."""


class UserError(Exception):
    """A mistake in the configuration, the data, the checkpoint or the environment; shown without a traceback."""
