"""Why a batch job ends early."""


class CannotStart(Exception):
    """Something is wrong before the first line was answered; the text is for the user."""


class InputChanged(Exception):
    """The input was written while it was read: nobody knows which lines were answered."""


class EnginesLost(Exception):
    """No worker of a cluster is left, or the cluster is gone; the text says how that showed."""


class UnreadableInput(OSError):
    """The input cannot be read to its end; the text names it."""
