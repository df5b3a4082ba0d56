"""Why a batch job ends without having begun."""


class CannotStart(Exception):
    """Something is wrong before the first line was answered; the text is for the user."""
