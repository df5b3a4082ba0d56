"""The exception tree: what a user of pagedjax can catch. Knows nothing of the rest.

PagedJaxError
├── ConfigError            an engine option is wrong, or the options contradict each other
├── ModelFormatError       a model's files (config, weights, tokenizer, template) cannot be used
├── CapacityError          the memory at hand cannot hold what the options ask for
├── RequestError           one request is wrong; every other request goes on
├── AllocationError        no page is free; the scheduler turns it into waiting or preemption
├── DeviceError            the device runs no step any more; every request was ended
├── EventLogError          an event log is damaged, or of another version
├── TransferError          pages could not be moved back from the host; they are computed again
└── IntegrityError         an invariant of the engine is broken: a bug in pagedjax, please report it
"""


class PagedJaxError(Exception):
    """Base of every exception that pagedjax raises on purpose."""


class ConfigError(PagedJaxError, ValueError):
    """An engine option is out of range, unknown, or contradicts another one."""


class ModelFormatError(PagedJaxError, ValueError):
    """A model's config, weights, tokenizer or chat template is missing, damaged or unsupported."""


class CapacityError(PagedJaxError, RuntimeError):
    """Memory is too small; the message holds the needed and available sizes and what would fit."""


class RequestError(PagedJaxError, ValueError):
    """One request cannot be served as asked.

    Attributes:
      param: name of the offending parameter, or None when it is the request as a whole.
      code: machine-readable kind, as OpenAI's API names them where it does
        (`"invalid_value"`, `"context_length_exceeded"`, `"unknown_parameter"`, ...).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        """Keeps `param` and `code` beside the message."""
        super().__init__(message)
        self.param = param
        self.code = code


class AllocationError(PagedJaxError, RuntimeError):
    """The page pool has fewer free pages than asked for; nothing was changed."""


class DeviceError(PagedJaxError, RuntimeError):
    """Steps fail for every request; the original error is its cause."""


class TransferError(PagedJaxError, RuntimeError):
    """Pages could not be brought back from the host pool; raised before a step's forward ran.

    Attributes:
      host_pages: the host pages whose content is lost, ids in [1, num_host_pages].
    """

    def __init__(self, message: str, *, host_pages: frozenset[int]):
        """Keeps `host_pages` beside the message."""
        super().__init__(message)
        self.host_pages = host_pages


class EventLogError(PagedJaxError, ValueError):
    """A file is not an event log, or a line of it is damaged; the message has the line's number."""


class IntegrityError(PagedJaxError, RuntimeError):
    """`check_integrity()` found a broken invariant."""
